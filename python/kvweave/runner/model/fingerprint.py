"""A name for a model's KV, made of its weights and its config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from kvweave.runner.model.stored_weights import stored_parts

_ELEMENTS = 64


def fingerprint_of(model: Any, config: Any) -> str:
    """A name for this model's KV: models with other weights or another config do not share keys.

    Of each parameter up to 64 elements are hashed, so the cost does not grow with the model. Where
    the model was loaded from, and by which release, makes no difference. What quantised weights
    keep besides their parameters (scales, packed numbers in buffers) is hashed the same way.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    # What transformers notes about itself when it saves or loads; class and dtype are hashed here.
    noted = {"architectures", "dtype", "torch_dtype", "transformers_version"}
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if not key.startswith("_") and key not in noted
    }
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in _weights(model):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _ELEMENTS)
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(flat[::step][:_ELEMENTS].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that are the model's weights, by name: parameters first."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        for part, tensor in stored_parts(parameter):
            yield name + part, tensor
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in named and isinstance(value, torch.Tensor):
            yield name, value

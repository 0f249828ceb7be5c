"""How far a key turns when it moves: Delta-RoPE with the model's own frequencies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.adapters.vllm.require import require


def frequencies(config: Any) -> npt.NDArray[np.float64]:
    """Inverse frequencies f64 [rotary_dim / 2] of a transformers config, as its own model has them.

    Errors: `Unsupported` for frequencies that depend on a request's length, and for a family whose
    rotary module is not where transformers has it.
    """
    kind = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    fixed = "dynamic" not in kind and kind != "longrope"
    of_rope = "frequencies that do not depend on the length beside segments"
    require("rope_type", fixed, of_rope, kind)
    family = str(config.model_type)
    rotary = _rotary_of(family)
    of_model = "a model whose rotary module is known beside segments"
    require("model_type", rotary is not None, of_model, family)
    with torch.device("cpu"):
        inv_freq: torch.Tensor = rotary(config=config).inv_freq
    return inv_freq.double().numpy()


def _rotary_of(family: str) -> Any:
    """The class of transformers that makes a family's frequencies; None where it is not known."""
    try:
        module = import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:
        return None
    found = (
        value
        for name, value in vars(module).items()
        if name.endswith("RotaryEmbedding") and value.__module__ == module.__name__
    )
    return next(found, None)

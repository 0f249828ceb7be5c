"""How far a key turns when it moves: Delta-RoPE with the model's own frequencies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import Unsupported


def frequencies(config: Any) -> npt.NDArray[np.float64]:
    """Inverse frequencies f64 [rotary_dim / 2] of a transformers config, as its own model has them.

    Errors: `Unsupported` for frequencies that depend on a request's length, and for a family whose
    rotary module is not where transformers has it.
    """
    kind = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    if "dynamic" in kind or kind == "longrope":
        text = f"segments: expected frequencies that do not depend on the length, got {kind}"
        raise Unsupported(text, expected="fixed frequencies", got=kind)
    family = str(config.model_type)
    try:
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        rotary = next(
            value
            for name, value in vars(module).items()
            if name.endswith("RotaryEmbedding") and value.__module__ == module.__name__
        )
    except (ImportError, StopIteration) as error:
        text = f"segments: expected a model whose rotary module is known, got {family}"
        raise Unsupported(text, expected="a known family", got=family) from error
    with torch.device("cpu"):
        inv_freq: torch.Tensor = rotary(config=config).inv_freq
    return inv_freq.double().numpy()

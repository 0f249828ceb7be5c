"""What a weight is made of where it lies: one tensor, or several behind one name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def stored_parts(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a weight is stored as, each with what its name has besides.

    A quantised weight may be a tensor that stands for several, such as numbers and their scales.
    """
    flatten: Any = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        yield "", weight
        return
    names, _ = flatten()
    for name in names:
        for part, tensor in stored_parts(getattr(weight, name)):
            yield f".{name}{part}", tensor


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes that a weight takes."""
    return sum(part.numel() * part.element_size() for _, part in stored_parts(weight))

"""How the bounds of a page's keys lie on a device. Needs no vLLM."""

from __future__ import annotations

from fractions import Fraction

import torch


def bounds_of(dtype: torch.dtype, device: torch.device) -> tuple[int, torch.dtype]:
    """Vectors of a page's bounds, and their dtype.

    Keys of 16 bits on a GPU have their least and greatest elements in their own dtype, as much as
    one token's key and value. All others have three vectors of f32, as `ops.PageBounds` has them.
    """
    alone = device.type == "cuda" and dtype.itemsize == 2
    return (2, dtype) if alone else (3, torch.float32)


def bound_share(dtype: torch.dtype, device: torch.device, page_tokens: int) -> Fraction:
    """What the bounds of a page of so many tokens take, as a share of its keys and values."""
    vectors, of_bounds = bounds_of(dtype, device)
    return Fraction(vectors * of_bounds.itemsize, 2 * page_tokens * dtype.itemsize)

"""Rotary position embedding as torch's own expressions, written for reading: another computation.

What transformers does for half pairs, and for interleaved ones with one value a pair in the first
half of its tables (GLM).
"""

from __future__ import annotations

import torch


def rotated_by_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str = "half"
) -> torch.Tensor:
    """X [R, heads, D] rotated by cos, sin [R, W]; elements from W on stay."""
    width = cos.shape[-1]
    turned = x[..., :width]
    c, s = cos[:, None, :], sin[:, None, :]
    if pairing == "interleaved":
        c, s = (t[..., : width // 2].repeat_interleave(2, dim=-1) for t in (c, s))
        partner = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        partner = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * c + partner * s, x[..., width:]), dim=-1)

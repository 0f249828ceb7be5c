"""What packed pages make of keys and values, by torch on any device: pages' own arithmetic.

Vectors are f32 [N, T, D] of N pages of a block (layers and KV heads), T tokens of whole pages.
Where there are pages of a kind, tests hold this to them; the others are arithmetic alone.
"""

from __future__ import annotations

import torch

PAGE = 64
"""Tokens of a packed page."""
FP8 = torch.float8_e4m3fn
REACH = {"fp8": 448.0, "int4": 7.5}


def towards(x: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    """The bf16 next to x f32 nearer to 0, or where `away` further from it, as f32."""
    bits = x.contiguous().view(torch.int32)
    rest = bits & 0xFFFF
    upper = bits - rest
    return torch.where(away & (rest != 0), upper + 0x10000, upper).view(torch.float32)


def codes(x: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Codes with a zero and a scale along an axis, as INT4 and INT8 pages have them."""
    most = 2**bits - 1
    least = x.amin(axis, keepdim=True) + 0.0
    zero = towards(least, least < 0)
    size = (x.amax(axis, keepdim=True) - zero) / most
    scale = towards(size, torch.ones_like(size, dtype=torch.bool))
    code = torch.where(scale > 0, ((x - zero) / scale).round(), 0.0).clamp(0, most)
    return zero + scale * code


def key_codes(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes with a step for each channel of a page."""
    return codes(x.unflatten(1, (-1, PAGE)), bits, 2).flatten(1, 2)


def value_codes(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes with a step for each token."""
    return codes(x, bits, 2)


def turned_codes(x: torch.Tensor, bits: int, directions: torch.Tensor) -> torch.Tensor:
    """Codes with a step for each token of vectors turned by one orthonormal matrix [D, D]."""
    return codes(x @ directions.T, bits, 2) @ directions


def fp8(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with one scale a page of a block."""
    scale = (x.abs().amax((1, 2), keepdim=True) / REACH["fp8"]).clamp_min(1e-30)
    return (x / scale).to(FP8).float() * scale


def integers(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors as integers of so many bits, f64, times a power of two [..., 1] each."""
    largest = x.abs().amax(-1, keepdim=True)
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - bits)
    return (x / power).round().clamp_max(2**bits - 1).double(), power


def numbers_along(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Products of vectors [N, T, D] with rows [N, C, D], by integers as pages are packed."""
    (of_rows, row_power), (of_x, power) = integers(rows, 15), integers(x, 23)
    return (of_x @ of_rows.mT).float() * row_power.mT * power


def in_basis(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Numbers along the directions of a basis [N, C + 1, D], its mean first."""
    return numbers_along(basis[:, 1:], x - basis[:, :1])


def out_of_basis(numbers: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """The way back."""
    return numbers @ basis[:, 1:] + basis[:, :1]


def top_r(
    x: torch.Tensor, basis: torch.Tensor, kept: int, group: int, numbers: str
) -> torch.Tensor:
    """Of each vector the groups of most energy in a basis [N, C + 1, D], stored as `numbers`."""
    turned = in_basis(x, basis)
    groups = turned.unflatten(-1, (-1, group))
    best = groups.double().square().sum(-1).topk(kept // group, sorted=False).indices
    mask = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=x.device).scatter_(
        -1, best, True
    )
    held = torch.where(mask[..., None], groups, 0.0).flatten(-2)
    if numbers == "bf16":
        made = held.bfloat16().float()
    else:
        size = held.abs().amax(-1, keepdim=True) / REACH[numbers]
        scale = towards(size, torch.ones_like(size, dtype=torch.bool))
        steps = torch.where(scale > 0, held / scale, 0.0)
        if numbers == "fp8":
            made = scale * steps.to(FP8).float()
        else:
            made = scale * ((steps + 7.5).round().clamp(0, 15) - 7.5)
    return out_of_basis(torch.where(mask.repeat_interleave(group, -1), made, 0.0), basis)


def planes(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Codes of 8, 4 or 2 bits, or none, a channel of a planes basis [N, 2D + 2, D].

    Its rows: the mean, the bits of each channel, what a step along each channel adds to a vector,
    and what numbers of steps are measured by.
    """
    dim = x.shape[-1]
    mean, bits = basis[:, :1], basis[:, 1:2]
    steps, measures = basis[:, 2 : dim + 2], basis[:, dim + 2 :]
    most = 2.0**bits - 1
    code = (numbers_along(measures, x - mean) + most / 2).round().clamp_min(0).minimum(most)
    return torch.where(bits > 0, code - most / 2, 0.0) @ steps + mean


def masked(x: torch.Tensor, weights: torch.Tensor, kept: int) -> torch.Tensor:
    """All but the `kept` channels whose weights [N, D] are largest become 0 (ThinK)."""
    best = weights.topk(kept).indices
    mask = torch.zeros_like(weights).scatter_(-1, best, 1.0)
    return x * mask[:, None].to(x.dtype)

"""Bounds of pages in e4m3, in plain torch: by a search among all numbers that a scale has."""

from __future__ import annotations

import torch

NUMBERS = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""Those that are not below 0, ascending."""


def scale_of(vectors: torch.Tensor) -> int:
    """The bits of a page's scale, of bounds [vectors, D]."""
    finite = vectors.double()[vectors.isfinite()].abs()
    greatest = float(finite.max()) if len(finite) else 0.0
    powers = range(-126, 120)
    return 127 + next((p for p in powers if 448.0 * 2.0**p >= greatest), 119)


def rounded(exact: torch.Tensor, scale: int, way: str) -> torch.Tensor:
    """What is kept of numbers [D] that are rounded one way, f64; NaN where that is none."""
    every = torch.cat((-NUMBERS[1:].flip(0), NUMBERS)) * 2.0 ** (scale - 127)
    # The last number that is no greater, and the first that is no less.
    down = torch.searchsorted(every, exact, right=True) - 1
    up = torch.searchsorted(every, exact)
    at = up if way == "up" else down
    if way == "nearest":
        below, above = (
            (exact - every[down.clamp(0)]).abs(),
            (every[up.clamp(max=252)] - exact).abs(),
        )
        # 0 is in the middle, and the even ones of all are those an even number of steps from it.
        nearer = (above < below) | ((above == below) & (up % 2 == 0))
        at = torch.where(nearer, up, down)
    there = exact.isfinite() & (at >= 0) & (at < len(every))
    return torch.where(there, every[at.clamp(0, len(every) - 1)], torch.nan)


def fp8_bounds(keys: torch.Tensor, score: str) -> tuple[torch.Tensor, int]:
    """The bounds f64 of a page's keys [T, D] as e4m3 keeps them, and the bits of their scale."""
    if score == "mean":
        exact, ways = keys.double().mean(0)[None].float(), ["nearest"]
    else:
        exact, ways = torch.stack((keys.amin(0), keys.amax(0))).float(), ["down", "up"]
    scale = scale_of(exact)
    kept = [rounded(some.double(), scale, way) for some, way in zip(exact, ways, strict=True)]
    return torch.stack(kept), scale

"""Exact pages on the host packed in a format, and what that loses of them."""

from __future__ import annotations

import numpy as np
import torch

from kvweave import ops
from kvweave.ops.top_r_choice import lost_of
from kvweave.runner.kv.tables import Int32

Part = tuple[torch.Tensor, Int32]
"""Exact pages on the host, and the packs that name them."""

SAMPLED_TOKENS = 4096
"""Bases and formats are tried on about so many tokens of a text, evenly spread."""


def sampled(parts: list[Part], tokens: int) -> list[Part]:
    """Of the parts of a text of so many tokens those that are tried."""
    every = -(-tokens // SAMPLED_TOKENS)
    return [(cache, packs[::every]) for cache, packs in parts]


def packed_part(
    form: ops.PackedFormat,
    pages: int,
    basis: torch.Tensor | None,
    part: Part,
    roots: torch.Tensor | None = None,
) -> tuple[ops.PackedPages, torch.Tensor]:
    """Exact pages packed, in a basis if there is one, and what that loses as `lost_of` has it."""
    cache, packs = part[0], part[1].copy()
    packs[:, 0] = 1 + pages * np.arange(len(packs))
    bases = None if basis is None else basis[None]
    packed = ops.PackedPages.zeros(1 + pages * len(packs), form, bases=bases)
    ops.pack_pages(cache, packed, packs, pages=pages)
    back = torch.zeros_like(cache)
    ops.unpack_pages(packed, back, packs, pages=pages)
    return packed, lost_of(cache, back, packs, pages, roots)


def of_ranks(part: Part, pages: int, ranks: list[int]) -> Part:
    """Of blocks of so many pages those of some ranks, in a cache of their own."""
    cache, packs = part[0], part[1].copy()
    count = (len(cache) - 1) // pages
    some = cache[1:].view(count, pages, *cache.shape[1:])[:, ranks]
    exact = packs[:, 2:]
    packs[:, 2:] = np.where(exact > 0, 1 + (exact - 1) // pages * len(ranks), 0)
    return torch.cat((torch.zeros_like(cache[:1]), some.flatten(0, 1))), packs


def relative(lost: torch.Tensor, whole: torch.Tensor) -> tuple[float, float]:
    """Of keys and of values the share of Σ |x|² that is lost."""
    keys, values = (lost.sum(0) / whole.sum(0).clamp_min(torch.finfo().tiny)).tolist()
    return keys, values


def share(lost: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What is lost of Σ |x|², 0 of nothing, as `ops.top_r_losses` has it."""
    return torch.where(lost == 0.0, 0.0, lost / whole)


def most_lost(lost: torch.Tensor, whole: torch.Tensor) -> float:
    """The most that any page's keys or values [pages, 2] lose; infinite where one is not finite."""
    return float(share(lost, whole).nan_to_num(nan=torch.inf).max())

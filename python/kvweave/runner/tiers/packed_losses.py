"""Exact pages on the host packed in a format, and what that loses of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvweave import ops
from kvweave.ops.top_r_choice import lost_of
from kvweave.runner.kv.tables import Int32


@dataclass(frozen=True, eq=False)
class Part:
    """Exact pages `cache` [·, 2, P, D] on the host, and the packs that name them.

    So many tokens of the first pack, `left_out`, are read from elsewhere: what they lose does not
    count.
    """

    cache: torch.Tensor
    packs: Int32
    left_out: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        return int(self.packs[:, 1].sum()) - self.left_out


SAMPLED_TOKENS = 4096
"""Bases and formats are tried on about so many tokens of a text, evenly spread."""


def sampled(parts: list[Part], tokens: int) -> list[Part]:
    """Of the parts of a text of so many tokens those that are tried."""
    every = -(-tokens // SAMPLED_TOKENS)
    return [replace(part, packs=part.packs[::every]) for part in parts]


def packed_part(
    form: ops.PackedFormat,
    pages: int,
    basis: torch.Tensor | None,
    part: Part,
    roots: torch.Tensor | None = None,
) -> tuple[ops.PackedPages, torch.Tensor]:
    """Exact pages packed, in a basis if there is one, and what that loses as `lost_of` has it."""
    cache, packs = part.cache, part.packs.copy()
    packs[:, 0] = 1 + pages * np.arange(len(packs))
    bases = None if basis is None else basis[None]
    packed = ops.PackedPages.zeros(1 + pages * len(packs), form, bases=bases)
    ops.pack_pages(cache, packed, packs, pages=pages)
    back = torch.zeros_like(cache)
    ops.unpack_pages(packed, back, packs, pages=pages)
    return packed, lost_of(cache, back, packs, pages, roots, part.left_out)


def of_ranks(part: Part, pages: int, ranks: list[int]) -> Part:
    """Of blocks of so many pages those of some ranks, in a cache of their own."""
    cache, packs = part.cache, part.packs.copy()
    count = (len(cache) - 1) // pages
    some = cache[1:].view(count, pages, *cache.shape[1:])[:, ranks]
    exact = packs[:, 2:]
    packs[:, 2:] = np.where(exact > 0, 1 + (exact - 1) // pages * len(ranks), 0)
    return Part(torch.cat((torch.zeros_like(cache[:1]), some.flatten(0, 1))), packs, part.left_out)


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

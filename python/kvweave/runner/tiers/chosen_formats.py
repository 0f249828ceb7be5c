"""A text packed by a strategy of its own: of each layer and KV head the format, by what it loses.

MosaicKV, section 5.5: every candidate is tried in the text's basis, and of those that lose no more
than a bound the smallest is taken. Here for each layer's KV head alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.payload.page_format import PageFormat
from kvweave.runner.kv.final_text import FormatData
from kvweave.runner.tiers.packed_losses import (
    Part,
    most_lost,
    relative,
    sampled,
    share,
    text_losses,
)


class ChosenFormats:
    """A text of `tokens` in `parts`, whose blocks have so many `pages`, packed by its losses.

    `bases` f32 [pages, 2, D + 1, D] by name: of each page's keys and values the one that loses
    least is taken. `fallback` is a candidate too, and what pages have of which every one loses more
    than `bound`.

    `made`: format by format the pages; `formats`: how many layers' KV heads have each, by name, and
    `chosen`: how many of their sides each basis. `lost`: of all keys and of all values the share of
    Σ |x|²; `most_lost`: the most that any layer's KV head loses of its own keys or values, and
    `over_bound`: how many lose more than the bound, all of them in the fallback.
    """

    def __init__(
        self,
        parts: list[Part],
        pages: int,
        tokens: int,
        bases: dict[str, torch.Tensor],
        candidates: Sequence[ops.PackedFormat],
        fallback: ops.PackedFormat,
        bound: float,
    ) -> None:
        self._parts, self._pages, self._bound = parts, pages, bound
        self._formats, self._fallback = (*candidates, fallback), fallback
        some = sampled(parts, tokens)
        # By what the largest candidate loses.
        widest = max(candidates, key=lambda of: (of.channels, of.page_bytes))
        self._basis, self.chosen = self._best(widest, bases, some)
        self._losses = torch.stack([self._lost(of, self._basis, some) for of in self._formats])
        of_each: dict[int, _Packed] = {}
        left = list(range(pages))
        while left:
            left = self._pack(left, of_each)
        self.made = self._by_format(of_each)
        sums = torch.stack([of_each[rank].sums for rank in range(pages)], 1)
        self.lost = relative(*sums)
        self.most_lost = most_lost(*sums)
        self.over_bound = int((~(share(*sums).amax(-1) <= bound)).sum())
        names = (PageFormat.of(of_each[rank].format).name for rank in range(pages))
        self.formats = dict(Counter(names))

    @property
    def basis_bytes(self) -> int:
        """Bytes of the bases that its pages have."""
        return sum(each.basis.nbytes for each in self.made if each.basis is not None)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside a pool."""
        return sum(nbytes for each in self.made for nbytes, _ in each.sizes)

    def _best(
        self, of: ops.PackedFormat, bases: dict[str, torch.Tensor], parts: list[Part]
    ) -> tuple[torch.Tensor, dict[str, int]]:
        """The basis in which each page's keys and values lose least, and how many each is of."""
        losses = torch.stack([self._lost(of, basis, parts) for basis in bases.values()])
        # Where all are NaN, of pages with a number that is, the first is as good as any.
        best = losses.nan_to_num(nan=torch.inf).argmin(0)
        stacked = torch.stack(list(bases.values()))
        index = best[None, :, :, None, None].expand(1, *stacked.shape[1:])
        counts = torch.bincount(best.reshape(-1), minlength=len(bases)).tolist()
        return stacked.gather(0, index)[0], dict(zip(bases, counts, strict=True))

    def _lost(self, of: ops.PackedFormat, basis: torch.Tensor, parts: list[Part]) -> torch.Tensor:
        """The share of Σ |x|² that each page's keys and values lose in a format, [pages, 2]."""
        known = None if of.basis_rows is None else _within(basis, of)
        return share(*text_losses(of, self._pages, known, parts))

    def _pack(self, ranks: list[int], of_each: dict[int, _Packed]) -> list[int]:
        """Packs pages of some ranks; those are returned that lose more than their sample did."""
        losses = self._losses[:, ranks]
        chosen = ops.choose_top_r(losses, self._formats, self._bound)
        most = losses.amax(-1).T.tolist()
        wanted: dict[ops.PackedFormat, list[int]] = {}
        for rank, of, lost in zip(ranks, chosen, most, strict=True):
            least = lost[self._formats.index(of)]
            wanted.setdefault(of if least <= self._bound else self._fallback, []).append(rank)
        left = []
        for of, some in wanted.items():
            data, sums = self._packed(of, some)
            lost = share(*sums)
            within = (lost.amax(-1) <= self._bound).tolist()
            for at, rank in enumerate(some):
                of_each[rank] = _Packed(of, data, at, sums[:, at])
                if of != self._fallback and not within[at]:
                    self._losses[self._formats.index(of), rank] = lost[at]
                    left.append(rank)
        return left

    def _packed(self, of: ops.PackedFormat, ranks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of some ranks of the whole text u8 [blocks, K, bytes], and sums f64 [2, K, 2]."""
        basis = None if of.basis_rows is None else _within(self._basis[ranks], of)
        blocks = sum(len(part.packs) for part in self._parts)
        data = torch.empty(blocks, len(ranks), of.page_bytes, dtype=torch.uint8)
        known = self._pages, basis, self._parts
        sums = text_losses(of, *known, ranks=np.asarray(ranks, np.int32), packed=data)
        return data, sums

    def _by_format(self, of_each: dict[int, _Packed]) -> list[FormatData]:
        made: list[FormatData] = []
        for of in dict.fromkeys(each.format for each in of_each.values()):
            ranks = sorted(rank for rank, each in of_each.items() if each.format == of)
            basis = None if of.basis_rows is None else _within(self._basis[ranks], of)
            data = _together([of_each[rank] for rank in ranks])
            made.append(FormatData(of, np.asarray(ranks, np.int64), data, basis))
        return made


@dataclass(frozen=True, eq=False)
class _Packed:
    """The pages of one rank: those at a place in `data` [blocks, K, bytes], and what they lose."""

    format: ops.PackedFormat
    data: torch.Tensor
    at: int
    sums: torch.Tensor


def _together(ranks: list[_Packed]) -> torch.Tensor:
    """The pages of some ranks of one format [blocks, K, bytes]."""
    first = ranks[0].data
    if [each.at for each in ranks if each.data is first] == list(range(first.shape[1])):
        return first
    return torch.stack([each.data[:, each.at] for each in ranks], 1)


def _within(basis: torch.Tensor, of: ops.PackedFormat) -> torch.Tensor:
    """The mean and the first directions of bases, as many as a format has."""
    return basis[..., : of.channels + 1, :].contiguous()

"""Which pages the heads of live rows read in a decode step (FlexiCache, section 3, after Quest)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.transformers.live_rows import LiveRow
from kvweave.adapters.transformers.page_pool import PagePool
from kvweave.runner.decode.kept_bounds import KeptBounds
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.page_budget import PageBudget
from kvweave.runner.kv.tables import Int32, send

SINK_PAGES, RECENT_PAGES = 1, 2
"""Pages that are always read: the first, and the newest two."""

Kv = TypeVar("Kv", ops.PagedKv, ops.PackedKv)

FEWEST_PAGES = SINK_PAGES + RECENT_PAGES
"""A head reads no fewer."""


@dataclass(frozen=True)
class PageRead:
    """How many pages a row reads in a decode step, and whether by their mean keys or by bounds."""

    pages: int
    by_mean: bool = False


@dataclass(frozen=True)
class RowReads:
    """What each of B rows reads in a decode step; None for all of its pages."""

    rows: tuple[PageRead | None, ...]

    @staticmethod
    def alike(rows: int, pages: int) -> RowReads:
        """So many pages of each row, by their bounds."""
        return RowReads((PageRead(pages),) * rows)

    @property
    def any_by_mean(self) -> bool:
        """Whether any row goes by mean keys."""
        return any(row is not None and row.by_mean for row in self.rows)

    def leave_out(self, counts: Sequence[int]) -> bool:
        """Whether any of rows with so many pages reads fewer."""
        pairs = zip(self.rows, counts, strict=True)
        return any(row is not None and count > row.pages for row, count in pairs)

    def budgets(self, width: int) -> Int32:
        """Pages that each row reads of up to `width`: i32 [B]."""
        most = [width if row is None else min(row.pages, width) for row in self.rows]
        return np.asarray(most, np.int32)

    def score(
        self, queries: torch.Tensor, bounded: ops.Table, pages: ops.BoundedPages, **known: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`ops.score_pages`, of each row by what it goes by."""
        scores, counts = ops.score_pages(queries, bounded, pages, **known)
        if self.any_by_mean:
            means, _ = ops.score_pages(queries, bounded, replace(pages, score="mean"), **known)
            by_mean = [row is not None and row.by_mean for row in self.rows]
            which = torch.tensor(by_mean, device=scores.device)
            scores = torch.where(which.view(-1, *[1] * (scores.ndim - 1)), means, scores)
        return scores, counts


@dataclass(frozen=True)
class RankedEntries:
    """What one decode step chooses from: entries of B rows, and bounds of their pages.

    `entries` i32 [N, 5] and `offsets` i32 [B + 1] as `attend_decode` takes them; `bounded` are the
    same entries with the row of their bounds in place of a block. `width`: the most of a row.
    Pages have `page_tokens` slots, and each head of a row reads what `reads` says.
    """

    entries: ops.Table
    bounded: ops.Table
    offsets: ops.Table
    bounds: torch.Tensor
    width: int
    page_tokens: int
    reads: RowReads

    def of(self, q: torch.Tensor, kv: Kv) -> tuple[ops.Table, ops.Table, Kv]:
        """Entries, offsets and pages by which a step reads what q [B, H, D] ranks first.

        Each KV head reads the pages that its query heads score highest.
        """
        rows, heads = len(q), kv.kv_heads
        pages = ops.BoundedPages(
            self.bounds, self.page_tokens, kv.layer, heads, kv.scale, kv.rope, kv.softcap
        )
        scores, counts = self.reads.score(
            q, self.bounded, pages, entry_offsets=self.offsets, width=self.width
        )
        each = self.reads.budgets(self.width)
        most = int(each.max())
        (budgets,) = send(q.device, np.repeat(each, heads))
        chosen, selected = ops.select_pages(
            scores.flatten(0, 1),
            counts.flatten(),
            budgets,
            sink=SINK_PAGES,
            recent=RECENT_PAGES,
            most=most,
        )
        listed = chosen.view(rows, heads, most), selected.view(rows, heads)
        own, ends = ops.gather_entries(*listed, self.entries, entry_offsets=self.offsets)
        tables = [(2 * head, kv.layer * heads + head, 0, 0) for head in range(heads)]
        reach = ops.Reach(2 * heads, np.asarray(tables, np.int32))
        return own, ends, replace(kv, reach=reach)


class RankedRows:
    """Bounds of the pages of live rows, kept while these are decoded.

    `reads`: what each row reads in a decode step, the first page and the newest two among it; or a
    number for all rows, however many there are.
    An entry's bounds are of exactly the slots that it lists, so who else holds the same block
    changes nothing. They are computed when its row is first ranked: no entry but a row's last one
    changes from then on, and that one is always read.
    """

    def __init__(self, pool: PagePool, reads: int | RowReads) -> None:
        self._pool, self._reads = pool, reads
        geometry = pool.geometry
        by_mean = isinstance(reads, RowReads) and reads.any_by_mean
        score: Literal["mean", "min-max"] = "mean" if by_mean else "min-max"
        budget = PageBudget(0, 0, 1, geometry.layers * geometry.kv_heads, score)
        self._bounds = KeptBounds(budget, pool.pages)
        # Of each row that was ranked its entries but the last one, and where their bounds lie.
        self._known: dict[int, tuple[LiveRow, Int32, Int64]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all bounds."""
        return self._bounds.nbytes

    def rank(
        self, rows: Sequence[LiveRow], entries: Sequence[Int32], placed: tuple[ops.Table, ops.Table]
    ) -> RankedEntries | None:
        """What a decode step of rows with these entries chooses from; None where all are read.

        `placed`: the entries of all, one behind the other, and their offsets, where the ops are.
        """
        reads = self._reads
        if not isinstance(reads, RowReads):
            reads = RowReads.alike(len(rows), reads)
        counts = [len(listed) for listed in entries]
        if not reads.leave_out(counts):
            return None
        width = max(counts)
        self._forget_others(rows)
        bounded = np.concatenate(entries).copy()
        bounded[:, 0], first = 0, 0
        for row, listed, read in zip(rows, entries, reads.rows, strict=True):
            # What reads all needs no bounds.
            places = self._places(row, listed[: 0 if read is None else -1])
            # The last page has any bounds: it is read whatever it scores.
            bounded[first : first + len(places), 0] = places * self._bounds.heads
            first += len(listed)
        device = self._pool.pages.device
        values = self._bounds.values.flatten(0, 1)
        (sent,) = send(device, bounded)
        page_tokens = self._pool.cache.shape.page_tokens
        return RankedEntries(placed[0], sent, placed[1], values, width, page_tokens, reads)

    def _places(self, row: LiveRow, listed: Int32) -> Int64:
        """Where the bounds of a row's entries lie; those that are new are computed."""
        _, known, places = self._known.get(
            id(row), (row, np.zeros((0, 5), np.int32), np.zeros(0, np.int64))
        )
        both = min(len(known), len(listed))
        differ = np.flatnonzero((known[:both] != listed[:both]).any(1))
        same = int(differ[0]) if len(differ) else both
        self._bounds.give_back(places[same:])
        new = listed[same:]
        taken = self._bounds.take(len(new), 0)
        self._bounds.compute(new, taken)
        places = np.concatenate((places[:same], taken))
        self._known[id(row)] = row, listed.copy(), places
        return places

    def _forget_others(self, rows: Sequence[LiveRow]) -> None:
        live = {id(row) for row in rows}
        for number in [number for number in self._known if number not in live]:
            self._bounds.give_back(self._known.pop(number)[2])

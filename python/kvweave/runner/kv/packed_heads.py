"""`PackedHeads`: what the heads of a head map read where full pages are packed.

The exact pool keeps the first and the newest tokens of all heads. A head whose window is no more
than that reads exact pages alone, whatever lies packed behind them; the others read all, but that
decode steps of top-K heads read the packed pages that these choose.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvweave.always_read import RECENT_PAGES
from kvweave.cache import HeadClassMap, KvCache, KvShape
from kvweave.errors import CorruptHeadMap, Unsupported
from kvweave.ops import Reach
from kvweave.runner.kv.page_budget import PageBudget, budgets_of
from kvweave.runner.kv.tables import Int32


class PackedHeads:
    """The window and the sink of each (layer, KV head), 0 where it reads all: `sights` [L, G, 2].

    `budgets`: those of heads that choose packed pages; `budget_of` [L, G]: which each head has, −1
    for none.

    # Errors
    As `KvCache` for a map of another model; `Unsupported` for heads that estimate what they leave
    out, or whose windows are larger than what is kept: the `recent` newest tokens and the `sink`
    first; `CorruptHeadMap` for heads that may read no page beside those that are always read.
    """

    def __init__(
        self, shape: KvShape, heads: HeadClassMap | None, fingerprint: str, sink: int, recent: int
    ) -> None:
        self.sights = np.zeros((shape.layers, shape.kv_heads, 2), np.int32)
        self.budgets: tuple[PageBudget, ...] = ()
        self.budget_of = np.full((shape.layers, shape.kv_heads), -1, np.int32)
        if heads is None:
            return
        of = KvCache(shape, blocks=2, heads=heads, memory=False, fingerprint=fingerprint)
        self.budgets = tuple(budgets_of(of))
        for budget in self.budgets:
            _check(budget)
        rows = np.stack([of.head_rows(layer) for layer in range(shape.layers)])
        self.sights[:] = rows[:, :, 2:]
        for number, budget in enumerate(self.budgets):
            self.budget_of[rows[:, :, 0] == budget.group] = number
        most = self.sights.max((0, 1))
        if most[0] > recent or most[1] > sink:
            raise Unsupported(
                f"heads: expected windows of up to {recent} newest and {sink} first tokens beside "
                f"packed pages, got {most[0]} and {most[1]}"
            )

    @cached_property
    def tables(self) -> int:
        """Tables of a request whose entries are packed: one more, empty, where any read none."""
        return 2 if self.sights.any() or self.budgets else 1

    @property
    def reading(self) -> npt.NDArray[np.bool_]:
        """The heads whose decode steps read packed pages, [L, G]: those without windows."""
        whole: npt.NDArray[np.bool_] = self.sights[:, :, 0] == 0
        return whole

    def local(self, layer: int) -> Int32:
        """The heads of a layer that have windows."""
        return np.flatnonzero(self.sights[layer, :, 0]).astype(np.int32)

    def choosing(self, layer: int, budget: PageBudget) -> npt.NDArray[np.int64]:
        """The heads of a layer that have a budget."""
        return np.flatnonzero(self.budget_of[layer] == self.budgets.index(budget))

    def windows(self, layer: int) -> Reach | None:
        """The reach over one table of rows that read windows by position; None where all do."""
        return self._windows[layer]

    def others(self, layer: int) -> Reach | None:
        """The reach over `tables` of what heads without windows read; None for one table."""
        return self._others[layer]

    def unranked(self, layer: int) -> Reach | None:
        """As `others`, of heads that do not choose; None where none of these reads any."""
        return self._unranked[layer]

    # Made once: a captured step reads their copies on the device whenever it is replayed.

    @cached_property
    def _windows(self) -> list[Reach | None]:
        return [
            Reach(1, self._rows(layer)) if len(self.local(layer)) else None
            for layer in range(len(self.sights))
        ]

    @cached_property
    def _others(self) -> list[Reach | None]:
        if self.tables == 1:
            return [None] * len(self.sights)
        return [self._reading(layer, self._has_window(layer)) for layer in range(len(self.sights))]

    @cached_property
    def _unranked(self) -> list[Reach | None]:
        left_out = [
            (self.budget_of[layer] >= 0) | self._has_window(layer)
            for layer in range(len(self.sights))
        ]
        return [
            None if left.all() else self._reading(layer, left)
            for layer, left in enumerate(left_out)
        ]

    def _has_window(self, layer: int) -> npt.NDArray[np.bool_]:
        return self.sights[layer, :, 0] > 0

    def _reading(self, layer: int, left_out: npt.NDArray[np.bool_]) -> Reach:
        """The reach over two tables, the second of which is empty: some heads' of a layer."""
        rows = self._rows(layer)
        rows[:, 0], rows[:, 2:] = left_out, 0
        return Reach(2, rows)

    def chooses(self, layer: int) -> bool:
        """Whether any head of a layer chooses pages."""
        return bool((self.budget_of[layer] >= 0).any())

    def offsets(self, ends: Int32) -> Int32:
        """Where the entries of requests begin, [B + 1], as offsets of all their tables."""
        if self.tables == 1:
            return ends
        return np.concatenate((ends[:1], np.repeat(ends[1:], 2))).astype(np.int32)

    def _rows(self, layer: int) -> Int32:
        heads = self.sights.shape[1]
        rows = np.zeros((heads, 4), np.int32)
        rows[:, 1] = layer * heads + np.arange(heads)
        rows[:, 2:] = self.sights[layer]
        return rows


def _check(budget: PageBudget) -> None:
    if budget.estimate:
        raise Unsupported(
            "heads: expected top_k heads without estimate beside packed pages, got some with it: "
            "means of packed values are not kept"
        )
    if budget.pages <= RECENT_PAGES:
        raise CorruptHeadMap(
            f"head map: expected top_k.pages of more than {RECENT_PAGES} beside packed pages, "
            f"which are always read, got {budget.pages}"
        )

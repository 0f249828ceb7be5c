"""What the heads of every layer read and write in a decode step whose requests may differ.

A step has a table for each head group, and one for each head that any of its requests has
promoted: see `kvweave._native.DecodeRows`. The entries of a table lie anywhere in an array that
also holds other requests' entries and room for more, so a step says of each table where it begins
and ends. For readers the room is a table of its own, behind each one that counts, which no head
reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvweave.ops import Reach
from kvweave.runner.kv.heads import HeadReads, Promoted
from kvweave.runner.kv.tables import Int32, send_index

_MOST_KEPT = 256


@dataclass(frozen=True, eq=False)
class HeadChoice:
    """Heads of a layer that choose pages by one budget.

    `budget`: its number. `heads` i64 [n] on the device: which they are, None for all of the layer.
    `numbers` i32 [n] there count them.
    `ranks`: the first of their pages in a block and the one behind the last, which lie side by
    side. `bounds` and `listed` say of the same table of a request, which is the first of two, in
    which rows the heads' bounds are, and nothing more. `left` is of all heads of the layer, over
    three tables of a request: these read the first, the others the second, which is empty.
    """

    budget: int
    heads: torch.Tensor | None
    numbers: torch.Tensor
    ranks: tuple[int, int]
    bounds: Reach
    listed: Reach
    left: Reach


@dataclass(frozen=True)
class StepReach:
    """The tables of a step of requests that promoted these heads, or some of them.

    `tables` of a request. `writes` of each layer. `reads` of each layer: over twice as many tables,
    of which every other one is room. `chosen` of each layer with top-K heads: the same, with a
    table more for each head that chooses in any layer, see `ChosenTables`; None for others.
    `sights` i32 [N, 4]: of each promoted head its layer, number, and the window and sink of what it
    sees where it was not promoted.
    """

    tables: int
    reads: list[Reach]
    writes: list[Reach]
    chosen: list[Reach | None]
    sights: Int32


class StepReads:
    """The reaches of steps, made once for each set of promoted heads.

    `choices`: the heads of each layer that choose pages.
    """

    def __init__(self, heads: HeadReads) -> None:
        self.heads = heads
        self.choices = [_choices(heads, layer) for layer in range(len(heads.spec.layers))]
        self._made: dict[Promoted, StepReach] = {}

    def of(self, promoted: Promoted) -> StepReach:
        """Those of a step with tables for these heads, in this order."""
        if promoted not in self._made:
            if len(self._made) >= _MOST_KEPT:
                del self._made[next(iter(self._made))]
            self._made[promoted] = self._of(promoted)
        return self._made[promoted]

    def _of(self, promoted: Promoted) -> StepReach:
        heads = self.heads
        groups = len(heads.windows)
        tables = groups + len(promoted)
        sights = np.zeros((len(promoted), 4), np.int32)
        reads, writes = [], []
        chosen: list[Reach | None] = []
        for layer, of_layer in enumerate(heads.spec.layers):
            rows = heads.step_rows(layer)
            for number, (at, head) in enumerate(promoted):
                if at == layer:
                    sights[number] = (layer, head, *rows[head, 2:])
                    rows[head] = (groups + number, rows[head, 1], of_layer.window or 0, 0)
            writes.append(Reach(tables, rows))
            reads.append(_with_room(tables, rows))
            ranked = heads.ranked(layer)
            for budget, own, ranks in ranked:
                before = heads.budgets[: heads.budgets.index(budget)]
                rows[own, 0] = tables + sum(b.heads for b in before) + np.asarray(ranks)
            every = tables + sum(b.heads for b in heads.budgets)
            chosen.append(_with_room(every, rows) if ranked else None)
        return StepReach(tables, reads, writes, chosen, sights)


def _choices(heads: HeadReads, layer: int) -> list[HeadChoice]:
    made = []
    for budget, some, ranks in heads.ranked(layer):
        index = None
        if len(some) < heads.spec.kv_heads:
            index = send_index(heads.spec.device, np.asarray(some)).long()
        rows = np.asarray([(0, rank, 0, 0) for rank in ranks], np.int32)
        number = heads.budgets.index(budget)
        left = np.tile(np.asarray([1, 0, 0, 0], np.int32), (heads.spec.kv_heads, 1))
        left[some] = rows
        reaches = Reach(2, rows), Reach(2, rows * 0), Reach(3, left)
        numbers = send_index(heads.spec.device, np.arange(len(ranks)))
        made.append(HeadChoice(number, index, numbers, (ranks[0], ranks[-1] + 1), *reaches))
    return made


def _with_room(tables: int, rows: Int32) -> Reach:
    """A reach over so many tables, behind each of which there is one more."""
    return Reach(2 * tables, rows * np.asarray([2, 1, 1, 1], np.int32))

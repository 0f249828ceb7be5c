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

from kvweave.ops import Reach
from kvweave.runner.kv.heads import HeadReads, Promoted
from kvweave.runner.kv.tables import Int32

_MOST_KEPT = 256


@dataclass(frozen=True)
class StepReach:
    """The tables of a step of requests that promoted these heads, or some of them.

    `tables` of a request. `writes` of each layer. `reads` of each layer: over twice as many tables,
    of which every other one is room. `chosen` of each layer with top-K heads: the same, with a
    table more for each of these, in the order of `HeadReads.ranked`; None for others. `sights` i32
    [N, 4]: of each promoted head its layer, number, and the window and sink of what it sees where
    it was not promoted.
    """

    tables: int
    reads: list[Reach]
    writes: list[Reach]
    chosen: list[Reach | None]
    sights: Int32


class StepReads:
    """The reaches of steps, made once for each set of promoted heads."""

    def __init__(self, heads: HeadReads) -> None:
        self.heads = heads
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
            rows = heads.narrowed(heads.cache.head_rows(layer), layer)
            for number, (at, head) in enumerate(promoted):
                if at == layer:
                    sights[number] = (layer, head, *rows[head, 2:])
                    rows[head] = (groups + number, rows[head, 1], of_layer.window or 0, 0)
            writes.append(Reach(tables, rows))
            reads.append(_with_room(tables, rows))
            own = [head for _, some, _ in heads.ranked(layer) for head in some]
            rows[own, 0] = tables + np.arange(len(own))
            chosen.append(_with_room(tables + len(own), rows) if own else None)
        return StepReach(tables, reads, writes, chosen, sights)


def _with_room(tables: int, rows: Int32) -> Reach:
    """A reach over so many tables, behind each of which there is one more."""
    return Reach(2 * tables, rows * np.asarray([2, 1, 1, 1], np.int32))

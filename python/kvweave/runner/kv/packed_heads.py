"""`PackedHeads`: what the heads of a head map read where full pages are packed.

The exact pool keeps the first and the newest tokens of all heads. A head whose window is no more
than that reads exact pages alone, whatever lies packed behind them; the others read all.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kvweave.cache import HeadClassMap, KvCache, KvShape
from kvweave.errors import Unsupported
from kvweave.ops import Reach
from kvweave.runner.kv.tables import Int32


class PackedHeads:
    """The window and the sink of each (layer, KV head), 0 where it reads all: `sights` [L, G, 2].

    # Errors
    As `KvCache` for a map of another model; `Unsupported` for heads that choose pages, or whose
    windows are larger than what is kept: the `recent` newest tokens and the `sink` first.
    """

    def __init__(
        self, shape: KvShape, heads: HeadClassMap | None, fingerprint: str, sink: int, recent: int
    ) -> None:
        self.sights = np.zeros((shape.layers, shape.kv_heads, 2), np.int32)
        if heads is None:
            return
        of = KvCache(shape, blocks=2, heads=heads, memory=False, fingerprint=fingerprint)
        kinds = {group.kind for group in of.groups} - {"full", "window"}
        if kinds:
            raise Unsupported(
                "heads: expected full and window heads beside packed pages, "
                f"got {kinds.pop()}: what they choose from are exact pages"
            )
        rows = np.stack([of.head_rows(layer) for layer in range(shape.layers)])
        self.sights[:] = rows[:, :, 2:]
        most = self.sights.max((0, 1))
        if most[0] > recent or most[1] > sink:
            raise Unsupported(
                f"heads: expected windows of up to {recent} newest and {sink} first tokens beside "
                f"packed pages, got {most[0]} and {most[1]}"
            )

    @cached_property
    def tables(self) -> int:
        """Tables of a request whose entries are packed: one more, empty, for heads with windows."""
        return 2 if self.sights.any() else 1

    def local(self, layer: int) -> Int32:
        """The heads of a layer that have windows."""
        return np.flatnonzero(self.sights[layer, :, 0]).astype(np.int32)

    def windows(self, layer: int) -> Reach | None:
        """The reach over one table of rows that read windows by position; None where all do."""
        return Reach(1, self._rows(layer)) if len(self.local(layer)) else None

    def others(self, layer: int) -> Reach | None:
        """The reach over `tables` of what heads without windows read; None for one table."""
        if self.tables == 1:
            return None
        rows = self._rows(layer)
        rows[:, 0], rows[:, 2:] = rows[:, 2] > 0, 0
        return Reach(2, rows)

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

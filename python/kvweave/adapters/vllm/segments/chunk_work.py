"""A chunk of which something is reused, on its way through a step."""

from __future__ import annotations

import numpy as np

from kvweave.adapters.vllm.segments.chunk import ChunkWalk
from kvweave.adapters.vllm.segments.outcome import PromptOutcome
from kvweave.adapters.vllm.segments.stats import SegmentStats
from kvweave.adapters.vllm.segments.store import Copies
from kvweave.plan import LayerPlan, Probe, Rows


class ChunkWork:
    """A chunk's walk, and what was done of it; `request` is its number in the batch, `name` its id.

    `reached` layers hold KV of all reused rows. `copied` are the rows of `copies` into the pages of
    each class of heads, kept for layers that spare the same.
    """

    def __init__(self, chunk: ChunkWalk, request: int, name: str) -> None:
        self.chunk = chunk
        self.request = request
        self.name = name
        self.reached = 0
        self.copied: Rows | None = None
        self.copies: list[Copies] = []
        self._spared: tuple[Rows, Rows] | None = None
        self._computed: list[tuple[int, Rows]] = []

    def spared(self) -> Rows:
        """Reused rows whose KV the current layer does not write, or compares with what it computes.

        The same array for layers with the same rows.
        """
        plan = self.chunk.plan
        if plan.probe is Probe.DEVIATION:
            return self.chunk.reused
        if self._spared is None or self._spared[0] is not plan.rows:
            spared: Rows = np.setdiff1d(self.chunk.reused, plan.rows, assume_unique=True)
            self._spared = plan.rows, spared
        _, spared = self._spared
        return spared

    def computed(self, plan: LayerPlan) -> None:
        """Rows of a layer have been computed; `count` looks at them, when no GPU waits."""
        self._computed.append((plan.layer, plan.rows))

    def leave_out(self, plan: LayerPlan) -> None:
        """Rows without feed-forward: KV from the first of them on is nobody's exact prefix."""
        admitted = self.chunk.admitted
        if plan.ffn_rows is not None and plan.layer + 1 < self.chunk.walk.layers:
            left = np.setdiff1d(plan.rows, plan.ffn_rows, assume_unique=True)
            if len(left):
                admitted.exact = min(admitted.exact, int(left[0]))

    def count(self, stats: SegmentStats) -> None:
        """Counts what was done, once the walk is at its end."""
        chunk, reused = self.chunk, self.chunk.reused - self.chunk.start
        done = np.zeros((chunk.walk.layers, chunk.end - chunk.start), bool)
        for layer, rows in self._computed:
            stats.rows += len(rows)
            done[layer, rows - chunk.start] = True
        stats.rows_spared += int(done.size - np.count_nonzero(done))
        again = int(np.count_nonzero(done[-1, reused]))
        stats.reused_tokens += len(reused)
        stats.recomputed_rows += again
        stats.outcome(self.name).add(PromptOutcome(reused=len(reused), recomputed=again))

"""Which tokens of a live request came with segments, and which of these it computed itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvweave.plan import Rows

Spans = tuple[tuple[int, int], ...]


def positions_of(spans: Spans) -> Rows:
    """All positions in sorted spans, i32."""
    parts = [np.arange(start, end, dtype=np.int32) for start, end in spans]
    return np.concatenate([np.zeros(0, np.int32), *parts])


@dataclass
class ReusedTokens:
    """The tokens that segments brought into a live request.

    `segments`: their spans, half-open and sorted. `left` i32, sorted: those whose KV is as it was
    reused; the others are settled, the request having computed them in its own context.
    """

    segments: Spans
    left: Rows

    @staticmethod
    def of(segments: Spans, computed: Rows | None = None) -> ReusedTokens:
        """Those of a prompt of which some rows were computed."""
        reused = ReusedTokens(segments, positions_of(segments))
        if computed is not None:
            reused.settle(computed)
        return reused

    @property
    def count(self) -> int:
        """All of them, settled or not."""
        return sum(end - start for start, end in self.segments)

    def settle(self, rows: Rows) -> int:
        """Takes note of rows that were computed; returns how many of the left ones they are."""
        before = len(self.left)
        self.left = np.setdiff1d(self.left, rows, assume_unique=True)
        return before - len(self.left)

    def others(self, first: int, end: int) -> Rows:
        """The positions in [first, end) that no segment covers."""
        rows = np.arange(first, end, dtype=np.int32)
        return np.setdiff1d(rows, positions_of(self.segments), assume_unique=True)

    def copy(self) -> ReusedTokens:
        """The same for a fork, which settles tokens of its own."""
        return ReusedTokens(self.segments, self.left)

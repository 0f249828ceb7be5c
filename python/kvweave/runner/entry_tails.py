"""The entries of a batch of requests that grow by one token a step, in one table with some room.

A new token either lengthens its request's last entry or begins a new one behind it, so a table
once made is kept up by one row a request and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvweave.runner.decoding import Decoding
from kvweave.runner.tables import Int32

NO_ENTRY = (-1, 0, 0, 2**31 - 1, 0)
"""An entry outside the cache: it covers no token, and in order of position it comes last."""

SPARE = 32
"""Most entries that a request gets room for beyond those it has, so that tables are seldom made
anew; readers pass over them, so there must not be many."""


class EntryTails:
    """The last entry of each request of a batch as it grows, and the room behind it."""

    def __init__(self, batch: Sequence[Decoding], page_tokens: int) -> None:
        self.batch = list(batch)
        self.entries = [s.request.entries() for s in batch]
        spare = [min(SPARE, s.remaining // page_tokens + 1) for s in batch]
        sizes = (len(e) + more for e, more in zip(self.entries, spare, strict=True))
        self.offsets = np.cumsum([0, *sizes], dtype=np.int32)
        self.rows = [
            int(start) + len(e) - 1 for start, e in zip(self.offsets, self.entries, strict=False)
        ]
        self.tails = [e[-1].tolist() for e in self.entries]

    def table(self, rows: int) -> Int32:
        """All entries i32 [rows, 5], with the room between requests left empty."""
        table = np.full((rows, 5), NO_ENTRY, np.int32)
        for start, entries in zip(self.offsets, self.entries, strict=False):
            table[start : start + len(entries)] = entries
        return table

    def of(self, batch: Sequence[Decoding]) -> bool:
        """Whether they are the tails of this very batch."""
        if len(batch) != len(self.batch):
            return False
        return all(one is other for one, other in zip(batch, self.batch, strict=True))

    def grow(self, positions: Int32, slots: list[Int32]) -> bool:
        """Takes in each request's newest token; False when one has no room left."""
        ends = [end for _, end in pairwise(self.offsets.tolist())]
        for index, (position, at) in enumerate(zip(positions.tolist(), slots, strict=True)):
            block, slot = at[0].tolist()
            tail = self.tails[index]
            if tail[0] == block and tail[1] <= slot <= tail[2]:
                tail[2] = slot + 1
                continue
            if self.rows[index] + 1 == ends[index]:
                return False
            self.rows[index] += 1
            self.tails[index] = [block, slot, slot + 1, position, 0]
        return True

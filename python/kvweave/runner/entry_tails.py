"""The entries of a batch of requests that grow by one token a step, in one table with some room.

A new token either lengthens the last entry of each of its request's tables or begins a new one
behind it, and a window that moves on leaves at most one entry behind. So a table once made is kept
up by one or two rows a step for each table of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvweave.runner.decoding import Decoding
from kvweave.runner.tables import Int32

NO_ENTRY = (-1, 0, 0, 2**31 - 1, 0)
"""An entry outside the cache: it covers no token, and in order of position it comes last."""

SPARE = 32
"""Most entries that a table gets room for beyond those it has, so that tables are seldom made
anew; readers pass over them, so there must not be many."""

Window = tuple[int, int] | None
"""Window and sink of the heads of a table; None where they are full."""


class _Tail:
    """One table of one request as it grows: its entries at first, and then its last one alone."""

    def __init__(self, entries: Int32, newest: int, window: Window) -> None:
        self.window = window
        self.starts: list[int] = []
        self.oldest = 0
        if window is not None:
            after = entries[:, 3] + entries[:, 2] - entries[:, 1]
            seen = (after > newest - window[0] + 1) | (entries[:, 3] < window[1])
            entries = entries[seen]
            self.starts = entries[:, 3].tolist()
        self.entries = entries
        self.count = len(entries)
        self.last: list[int] = entries[-1].tolist()

    def grow(self, position: int, block: int, slot: int) -> None:
        """Takes in the newest token."""
        last = self.last
        if last[0] == block and last[1] <= slot <= last[2]:
            last[2] = slot + 1
            return
        self.count += 1
        self.last = [block, slot, slot + 1, position, 0]
        if self.window is not None:
            self.starts.append(position)

    def left_behind(self, newest: int) -> tuple[int, int] | None:
        """Index and position of the entry that the window leaves as it reaches the newest token.

        Each entry ends where the next begins, and the window moves by one: so there is at most one.
        Those of the sink stay, also where the request has only now grown past it.
        """
        if self.window is None:
            return None
        recent, sink = self.window
        while self.oldest + 1 < len(self.starts) and self.starts[self.oldest] < sink:
            self.oldest += 1
        index = self.oldest
        if index + 1 >= len(self.starts) or self.starts[index + 1] > newest - recent + 1:
            return None
        self.oldest += 1
        return index, self.starts[index]


class EntryTails:
    """The tables of a batch as they grow, and the room behind each.

    `windows`: of each table of a request. Table t of request b is number b · tables + t, and
    `offsets` i32 [B · tables + 1] says where each lies.
    """

    def __init__(
        self, batch: Sequence[Decoding], page_tokens: int, windows: Sequence[Window] = (None,)
    ) -> None:
        self.batch = list(batch)
        self.tables = len(windows)
        self.tails = [
            _Tail(s.request.entries(table), s.request.length - 1, window)
            for s in batch
            for table, window in enumerate(windows)
        ]
        spare = np.repeat([min(SPARE, s.remaining // page_tokens + 1) for s in batch], self.tables)
        sizes = [tail.count for tail in self.tails] + spare
        self.offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        self._starts, self._ends = self.offsets[:-1].tolist(), self.offsets[1:].tolist()
        # A table whose window moves on gives up rows at its front.
        self.moves = 1 if all(window is None for window in windows) else 2
        self._left: list[tuple[int, int] | None] = [None] * len(self.tails)

    def table(self, rows: int) -> Int32:
        """All entries i32 [rows, 5], with the room between tables left empty."""
        table = np.full((rows, 5), NO_ENTRY, np.int32)
        for start, tail in zip(self._starts, self.tails, strict=True):
            table[start : start + len(tail.entries)] = tail.entries
        return table

    def of(self, batch: Sequence[Decoding]) -> bool:
        """Whether they are the tails of this very batch."""
        if len(batch) != len(self.batch):
            return False
        return all(one is other for one, other in zip(batch, self.batch, strict=True))

    def grow(self, positions: Int32, slots: Int32) -> bool:
        """Takes in each request's newest token; False when a table has no room left.

        positions i32 [B], slots i32 [tables, B, 2].
        """
        places = slots.transpose(1, 0, 2).reshape(-1, 2).tolist()
        newest = np.repeat(positions, self.tables).tolist()
        for index, (tail, position) in enumerate(zip(self.tails, newest, strict=True)):
            tail.grow(position, *places[index])
            if self._starts[index] + tail.count > self._ends[index]:
                return False
            self._left[index] = tail.left_behind(position)
        return True

    def patch(self) -> Int32:
        """What the last step changed: rows (row, entry) i32 [B, tables, moves, 6].

        Row −1: nothing. An entry that was left behind covers no token any more, and keeps its
        place in the order of positions.
        """
        patch = np.full((len(self.tails), self.moves, 6), (-1, *NO_ENTRY), np.int32)
        for index, (start, tail) in enumerate(zip(self._starts, self.tails, strict=True)):
            patch[index, 0] = (start + tail.count - 1, *tail.last)
            left = self._left[index]
            if left is not None:
                patch[index, 1] = (start + left[0], -1, 0, 0, left[1], 0)
        return patch.reshape(len(self.batch), self.tables, self.moves, 6)

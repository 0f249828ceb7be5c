"""`ListedStep`: the requests of a decode step, as who chooses pages for them is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.tables import Int32


@dataclass(frozen=True)
class ListedStep:
    """The requests of a step, and where their entries are.

    Their `rows` [B], the positions of their first new tokens [B] and how long they are at their
    `ends` [B]; their tables lie at `spans` [B, T, 2]. `moved` [M]: places whose entries have
    changed, to `entries` [M, 5]. `growing` [B]: of each table the last entries that have any of the
    new tokens. `hosts` [B]: their pages that may lie in host memory, by head group. `newest` [B]:
    of a round that has ended, the positions of their newest tokens.
    """

    rows: Int32
    positions: Int32
    ends: Int64
    spans: Int32
    moved: Int64
    entries: Int32
    growing: Int64
    hosts: Sequence[Mapping[int, HostPages]] = ()
    newest: Int32 | None = None

    @property
    def last(self) -> Int32:
        """The positions of the newest tokens, where there is one of each or a round has ended."""
        return self.positions if self.newest is None else self.newest

    def left(self, lengths: Int32) -> ListedStep:
        """What a round leaves that has ended with requests of so many tokens [B]."""
        return replace(self, newest=lengths - 1)

    def table(self, some: Int64, group: int, array: Int32) -> Int64:
        """Where the entries [n, 2] of a head group's tables lie, of some, up to the newest tokens.

        `array` i32 [N, 5]: the entries as they are.
        """
        spans: Int64 = self.spans[some, group].astype(np.int64)
        if self.newest is not None:
            # What was taken back is listed until the next step lists others there.
            for span, newest in zip(spans, self.newest[some], strict=True):
                span[1] = span[0] + np.searchsorted(array[slice(*span), 3], newest, side="right")
        return spans

    def host(self, number: int, group: int) -> HostPages | None:
        """What may lie in host memory of one of them, of a head group."""
        return self.hosts[number].get(group) if self.hosts else None

    def full_entries(self, number: int, group: int, array: Int32, page_tokens: int) -> int:
        """Entries of a head group's table that end before the first new token's page, of one.

        What a round has said may still be taken back where an answer ends within it. `array` as for
        `table`. A page has several entries where segments are read in place, and a segment's may
        lie across the border of two.
        """
        before = int(self.positions[number]) // page_tokens * page_tokens
        begin, end = self.spans[number, group].tolist()
        # One ends where the next begins.
        return int(np.searchsorted(array[begin + 1 : end, 3], before, side="right"))

"""Rankings that take effect late: no step waits for pages that are on their way from the host.

Of a request whose first pages lie in host memory, a ranking takes effect step by step:

1. The step that ranks reads what was chosen before, and pages begun since.
2. The next ones read of the new choice what lay on the device when it was made: in one of the
   head's slots, or in a block of the request's own. The others are brought beside them. Where these
   have come over by the time that a layer is computed, its attention to them joins by its
   log-sum-exp (`merge_states`).
3. Every step that begins when all have come over reads all of the new choice at once.

In 2 and 3 pages begun since the ranking are read besides. Nobody waits, but for a ranking that
falls due while pages of the one before it are still on their way: these take a whole period then.
Where choices are read as a whole there is no 2: a request sits steps out until its pages are there,
while others take theirs (`sits_out`), and waits for them in a step that it is given all the same.
Pages that are brought take slots behind step 1, which read them: each in ascending order the first
that holds none of the new choice. So a page that was chosen lately lies in its slot until another
takes that.

A request has two lists of entries for each head. The ranking writes one while the other is read.
Behind its step the latter becomes what is read in 2: what is on its way lies first in it, and the
list of what is there begins behind that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave.runner.decode.host_slots import HostSlots
from kvweave.runner.decode.listed_step import ListedStep
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.tables import Int32, send_index

SIDES = 2
"""Lists of a request for each head."""

_STEADY, _RANKED, _PARTLY = range(3)
"""Of a row: nothing is late; the step under way ranks; steps read what is there of its choice."""


@dataclass(frozen=True, eq=False)
class LateRoom:
    """What lies on the device for so many lists, the last of which is nobody's.

    `numbers` i32 [lists, heads, K]: the pages that were chosen for a list, by their place in the
    request's table. `coming` i32 [lists, heads]: how many of a list's first entries are on their
    way. `arrived` i32 [lists]: 1 once they have come over, as the stream that brings them says.
    """

    numbers: torch.Tensor
    coming: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def made(chosen: torch.Tensor, pages: int, before: LateRoom | None, kept: int) -> LateRoom:
        """Room beside lists [lists, heads, W, 5] of so many pages, and the first `kept` of it."""
        lists, heads = chosen.shape[:2]
        sizes = (lists, heads, pages), (lists, heads), (lists,)
        parts = [chosen.new_zeros(size) for size in sizes]
        if before is not None:
            for part, old in zip(
                parts, (before.numbers, before.coming, before.arrived), strict=True
            ):
                part[:kept] = old[:kept]
        return LateRoom(*parts)

    def begin(self, lists: torch.Tensor) -> None:
        """Has lists i64 [B] that are chosen anew be read from their beginning."""
        self.coming.index_fill_(0, lists, 0)

    def waits_for(self, lists: torch.Tensor) -> torch.Tensor:
        """Of lists i64 [B] how many of their entries were on their way: i32 [B, heads]."""
        return self.coming.index_select(0, lists)

    def is_there(self, lists: torch.Tensor) -> torch.Tensor:
        """Of lists i64 [B] whether those have come over by now: i32 [B], 1 or 0."""
        return self.arrived.index_select(0, lists)

    def note(self, ranks: tuple[int, int], lists: torch.Tensor, chosen: torch.Tensor) -> None:
        """Keeps the pages i32 [B, heads, K] that some heads have chosen for lists i64 [B]."""
        self.numbers[:, ranks[0] : ranks[1]].index_copy_(0, lists, chosen)


class LatePages:
    """How far late rankings of one budget's requests have come, by row.

    `side` i64 [R]: which of its lists a row reads. Each step begins with `join`, says with `begin`
    who is ranked late in it, and has what they chose brought by `bring` while it is computed.
    """

    def __init__(self, slots: HostSlots) -> None:
        self.slots = slots
        self.side = np.zeros(0, np.int64)
        self._at = np.zeros(0, np.int8)
        # Of a row that was ranked: its newest token's position and its entries then.
        self._position, self._listed = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def fit(self, more: int) -> None:
        """Room for so many more rows."""
        none = np.zeros(more, np.int64)
        self.side = np.append(self.side, none)
        self._at = np.append(self._at, none.astype(np.int8))
        self._position = np.append(self._position, none)
        self._listed = np.append(self._listed, none)

    def forget(self, rows: Int32 | int) -> None:
        """Lets go of rankings that have not taken effect: the rows are ranked anew, or nobody's."""
        self._at[rows] = _STEADY

    def steady(self, rows: Int32) -> bool:
        """Whether the next step of rows reads what this one does."""
        return not self._at[rows].any()

    def join(self, step: ListedStep, overdue: npt.NDArray[np.bool_]) -> bool:
        """Goes on to what a step reads; whether any of it is still on its way.

        All of a choice that has come over by now. Those that are `overdue` [B], whose next ranking
        is due, wait for theirs, and so do all who should have sat this step out.
        """
        late = self._at[step.rows] == _PARTLY
        if not late.any():
            return False
        waits = late if self.slots.pool.whole else late & overdue
        self.slots.settle(step, np.flatnonzero(waits))
        there = late & self.slots.arrived(step, late)
        self.side[step.rows[there]] ^= 1
        self._at[step.rows[there]] = _STEADY
        return bool((late & ~there).any())

    def sits_out(self, row: int, host: HostPages | None) -> bool:
        """Whether a request should take no step yet, as it would wait for what it has chosen."""
        if not self.slots.pool.whole or self._at[row] != _PARTLY:
            return False
        return host is not None and not host.has_arrived()

    def begin(self, step: ListedStep, some: Int64, count: Int64) -> None:
        """Takes note of those whose ranking in a step is late, of so many entries each [n]."""
        rows = step.rows[some]
        self._at[rows] = _RANKED
        self._position[rows], self._listed[rows] = step.positions[some], count

    def ranked(self, step: ListedStep) -> Int64:
        """Those whose ranking in this step is late, and who take another step."""
        goes_on = step.positions + 1 < step.ends
        return np.flatnonzero((self._at[step.rows] == _RANKED) & goes_on)

    def lists(self, rows: Int32) -> tuple[Int64, Int64]:
        """The list that each of some rows reads, and its other one."""
        read = SIDES * rows.astype(np.int64) + self.side[rows]
        return read, read ^ 1

    def bring(
        self, step: ListedStep, some: Int64, before: Int32, chosen: torch.Tensor, room: LateRoom
    ) -> tuple[Int64, Int64]:
        """Behind a step, has what it chose for some of its requests be brought.

        `before` i32 [n]: how many of their first pages lay at home in it. chosen i32 [lists, heads,
        W, 5] are the entries of all lists. Returns at which position and of how many entries each
        was ranked [n].
        """
        rows = step.rows[some]
        read, written = (send_index(chosen.device, of).long() for of in self.lists(rows))
        numbers = room.numbers.index_select(0, written)
        pages = numbers.shape[2]
        entries = chosen[:, :, :pages].index_select(0, written)
        room.arrived.index_fill_(0, read, 0)
        coming, arrival = self.slots.room.bring_late(
            rows, before, numbers, entries, lambda: room.arrived.index_fill_(0, read, 1)
        )
        if (late := self.slots.pool.late) is not None:
            late.reads(room.arrived, read)
        self.slots.expect(step, some, arrival)
        first = coming.to(torch.int8).argsort(dim=2, descending=True, stable=True)
        there = entries.gather(2, first[..., None].expand_as(entries))
        of_lists = chosen[:, :, :pages]
        of_lists.index_copy_(0, written, entries)
        of_lists.index_copy_(0, read, there)
        room.coming.index_copy_(0, read, coming.sum(2, dtype=torch.int32))
        self._at[rows] = _PARTLY
        return self._position[rows], self._listed[rows]

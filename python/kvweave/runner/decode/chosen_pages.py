"""Which pages the top-K heads of a decode step read: what the host says (FlexiCache, section 3).

The host knows lengths and never a score. A top-K head keeps every token and reads the pages that
its query scores highest by their bounds, the first one and the newest always. What a head has
chosen stays until its next ranking; pages begun since are read besides.

Requests are ranked at their first step, every so many steps from then on, and when their tables
were listed anew. What is chosen lies as entries in the array of the requests' own, behind these: a
row for each request, in it a table for each head. So `attend_decode` reads a choice of pages as it
reads all of them, and a step says of each request where its heads' tables begin, how far apart they
are and how long: those of a request that has no more pages than it may read are all its own table.
What happens on the device is `ChosenTables`'.

Bounds are of the entries of a request's table, and kept while it decodes. An entry's are computed
when it is first ranked, from what then lies in its page, and again when it has become another. The
last entry, which grows, is always read and needs none. Whoever rewrites tokens of a request between
two steps has to have it forgotten.

Where a group has host memory, pages are spilled behind the step before a ranking: see `HostSlots`.
Where rankings of it are late, pages are spilled behind the step that ranks: see `LatePages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvweave.power_of_two import power_of_two
from kvweave.runner.decode.chosen_step import (
    APART,
    BROUGHT,
    DUE,
    DUE_BEGIN,
    DUE_END,
    FIRST,
    KEPT,
    LEFT_BEGIN,
    LEFT_END,
    LENGTH,
    NEWEST,
    NO_ENTRY,
    ChosenRoom,
    ChosenStep,
)
from kvweave.runner.decode.host_slots import HostSlots
from kvweave.runner.decode.kept_bounds import KeptBounds
from kvweave.runner.decode.kept_plan import KeptPlan
from kvweave.runner.decode.late_pages import SIDES, LatePages, LateRoom
from kvweave.runner.decode.listed_step import ListedStep
from kvweave.runner.decode.promised_bounds import BoundsPromise
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.decode.slot_room import Failures
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.page_budget import PageBudget
from kvweave.runner.kv.tables import Int32, send, send_index, within_runs

_NEVER = 2**31
_FEWEST_ROWS = 8
_FEWEST_SCORES = 64


class _Budget:
    """The rows of requests under one budget.

    Of each row: `ranked` i64 [R], the position of its newest token when it was ranked, −1 for
    never; `listed` i64 [R], its entries then; `lies` i64 [R, 2], the part of the array that its
    table has taken up. Of each entry of the array: `places` i64 [N] of its bounds, −1 for none;
    `known` bool [N], whether these are of what the entry is now; `told` i64 [N], the position that
    the device knows it at, −1 for none.
    """

    def __init__(self, budget: PageBudget, pages: torch.Tensor, pool: HostPool | None) -> None:
        self.budget = budget
        self.host = None if pool is None else HostSlots(pool)
        self.late: LatePages | None = None
        if self.host is not None and self.host.pool.late is not None:
            self.late = LatePages(self.host)
        self.sides = 1 if self.late is None else SIDES
        self.page_tokens = int(pages.shape[2])
        self.bounds = KeptBounds(budget, pages, pool)
        # Pages that are begun between two rankings; one that is late reads the choice before it.
        reads = budget.every - (self.late is None)
        self.since = -(-reads // self.page_tokens)
        self.since = min(self.since, len(pages) // budget.heads)
        self.width = budget.pages + self.since
        self.ranked = np.full(0, -1, np.int64)
        self.listed, self.lies = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        self.needs = np.zeros(0, np.int64)
        self.places, self.known = np.zeros(0, np.int64), np.zeros(0, bool)
        self.told = np.zeros(0, np.int64)
        self.first = 0
        self.room: ChosenRoom
        self._of_late: LateRoom | None = None
        self._kept: KeptPlan | None = None
        # Whether anything that the step under way reads is on its way.
        self.joins = False
        self._ranked = torch.zeros(0, 5, dtype=torch.int32, device=pages.device)

    def entries(self, rows: int) -> int:
        """Entries of the array that so many rows take, and the list that is nobody's."""
        return (self.sides * rows + 1) * self.budget.heads * self.width

    def fit(self, array: torch.Tensor, first: int, ranked: torch.Tensor, rows: int) -> None:
        """Takes its room in the array from `first` on, for so many rows; lists go with it.

        `ranked` i32 [N, 5] is for as many entries as requests may have.
        """
        known = self.sides * len(self.ranked)
        before = self.room.chosen[:known] if known else None
        more = rows - len(self.ranked)
        self.ranked = np.append(self.ranked, np.full(more, -1, np.int64))
        self.listed = np.append(self.listed, np.zeros(more, np.int64))
        self.needs = np.append(self.needs, np.zeros(more, np.int64))
        self.lies = np.concatenate((self.lies, np.zeros((more, 2), np.int64)))
        more = len(ranked) - len(self.places)
        self.places = np.append(self.places, np.full(more, -1, np.int64))
        self.told = np.append(self.told, np.full(more, -1, np.int64))
        self.known = np.append(self.known, np.zeros(more, bool))
        ranked[: len(self._ranked)] = self._ranked
        self._ranked = ranked
        self.first = first
        self._kept = None
        if self.host is not None:
            self.host.fit(rows)
        chosen = array[first : first + self.entries(rows)]
        chosen = chosen.view(-1, self.budget.heads, self.width, 5)
        if before is not None:
            chosen[:known] = before
        if self.late is not None:
            self.late.fit(rows - known // self.sides)
            self._of_late = LateRoom.made(chosen, self.budget.pages, self._of_late, known)
        self._lay(chosen)

    def _lay_anew(self, moved: bool) -> None:
        """What lies on the device for host memory may lie elsewhere now."""
        if moved:
            self._lay(self.room.chosen)

    def _lay(self, chosen: torch.Tensor) -> None:
        beside = self.bounds.scales, self.bounds.means
        scales, means = (None if part is None else part.flatten(0, 1) for part in beside)
        host = None if self.host is None else self.host.room
        bounds = self.bounds.values.flatten(0, 1)
        known = self.budget, chosen, bounds, self._ranked, scales, means, host, self._of_late
        self.room = ChosenRoom(*known)

    def make_room(self, lengths: Iterable[int]) -> None:
        """Has room for the bounds of requests of so many tokens each."""
        pages = [-(-tokens // self.page_tokens) for tokens in lengths]
        values = self.bounds.values
        self.bounds.make_room(sum(count for count in pages if count > self.budget.pages))
        if self.bounds.values is not values and len(self.ranked):
            self._lay(self.room.chosen)

    def forget(self, row: int) -> None:
        """Lets go of what a row has chosen, and of its bounds."""
        self.ranked[row], self.needs[row] = -1, 0
        self._let_go(int(self.lies[row, 0]), int(self.lies[row, 1]))
        self.lies[row] = 0
        if self.host is not None:
            self.host.forget(row)
        if self.late is not None:
            self.late.forget(row)

    def _let_go(self, begin: int, end: int) -> None:
        of_row = self.places[begin:end]
        self.bounds.give_back(of_row[of_row >= 0])
        of_row[:] = -1

    def step(self, step: ListedStep, array: Int32, nobody: int) -> tuple[Int32, int]:
        """What a step says of its requests, and how wide the scores are; 0 where none is ranked.

        Bounds are brought up to date. `array` i32 [N, 5]: the entries as they are.
        """
        rows, spans = step.rows, step.spans[:, self.budget.group].astype(np.int64)
        begin, count = spans[:, 0], spans[:, 1] - spans[:, 0]
        self.known[step.moved] = False
        if self._kept is not None and self._kept.holds(step, begin, count, self.known):
            self.joins = False
            return self._kept.grown(count, nobody), 0
        self._follow(rows, spans)
        age = step.positions - self.ranked[rows]
        self.joins = self.late is not None and self.late.join(step, age >= self.budget.every)
        many = count > self.budget.pages
        kept = many & (self.ranked[rows] >= 0) & self.known[begin]
        kept &= (age >= 0) & (age <= self.budget.every)
        since = count - self.listed[rows]
        kept &= (since >= 0) & (since <= self.since)
        due = many & ~(kept & (age < self.budget.every))
        # Who is ranked late goes on reading what was chosen before.
        kept &= ~due | self._is_late(step, kept & due)
        now = due & ~kept
        self._kept = None
        if due.any():
            left = -(-(step.ends - step.positions) // self.page_tokens)
            self.needs[rows[many]] = (count + left)[many]
            self._bound_all(rows[due], spans[due], (spans[:, 1] - step.growing)[due], array)
            if self.host is not None:
                self._lay_anew(self.host.follow_all(step, np.flatnonzero(now)))
        self.listed[rows[now]], self.ranked[rows[now]] = count[now], step.positions[now]
        self.ranked[rows[~many]] = -1
        if self.late is not None:
            self.late.forget(rows[now])
        width = _width(int(count.max())) if due.any() else 0
        newest = (begin + self.listed[rows] - 1)[:, None] + np.arange(self.since + 1)
        plan = self._plan(rows, spans, kept, due)
        there = kept[:, None] & (newest < spans[:, 1:])
        plan[:, NEWEST:] = np.where(there, newest, nobody)
        if self.late is not None:
            late = np.flatnonzero(kept & due)
            self.late.begin(step, late, count[late])
        if not width and (self.late is None or self.late.steady(rows)):
            until = np.where(kept, self.ranked[rows] + self.budget.every, _NEVER)
            most = np.where(kept, self.listed[rows] + self.since, self.budget.pages)
            least = np.where(kept, self.listed[rows], 0)
            self._kept = KeptPlan(rows, begin, count, kept, until, most, least, newest, plan)
        return plan, width

    def prepare(self, step: ListedStep, array: Int32) -> None:
        """Does of the next step what need not wait for it, while this one is computed.

        Of requests that it will rank bounds are brought up to date and pages spilled; it ranks them
        then whenever it comes. Pages of those that were ranked now begin to be copied, or what was
        chosen late to be brought.
        """
        if self.late is not None:
            self._bring_late(self.late, step, array)
        ranked, goes_on = self.ranked[step.rows], step.last + 1 < step.ends
        if self.host is not None:
            self.host.begin(step, np.flatnonzero((ranked >= step.positions) & goes_on), array)
        due = step.last + 1 - ranked >= self.budget.every
        if self.host is not None and self.late is not None and not self.host.pool.whole:
            # The device has their room as soon as they are ranked again: that is not waited for.
            # Of those that sit steps out no answer depends on when copies are done.
            due |= self.host.may_leave(step)
        soon = np.flatnonzero((ranked >= 0) & due & goes_on)
        if len(soon):
            self._prepare(step, soon, array)
        if self.host is not None:
            self.host.mirror(step, np.flatnonzero(goes_on), array)

    def _prepare(self, step: ListedStep, soon: Int64, array: Int32) -> None:
        """As `prepare`, for those of its requests that the next step ranks."""
        spans = step.table(soon, self.budget.group, array)
        self._follow(step.rows[soon], spans)
        # The newest entry grows no more where its page is full.
        grows = (step.last[soon] + 1) % self.page_tokens != 0
        self._bound_all(step.rows[soon], spans, spans[:, 1] - grows, array)
        if self.host is not None:
            if self.late is not None:
                # What these have chosen before is read once more.
                soon = soon[self.host.at_home(step, soon) == 0]
            self._lay_anew(self.host.spill(step, soon, array))
        self.ranked[step.rows[soon]] = -1
        self._kept = None

    def _is_late(self, step: ListedStep, some: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Whose ranking takes effect late, of some of a step that may go on as they are: bool [B].

        Those whose pages lie at home.
        """
        if self.late is None or self.host is None or not some.any():
            return np.zeros_like(some)
        return some & (self.host.at_home(step, np.arange(len(some))) > 0)

    def _bring_late(self, late: LatePages, step: ListedStep, array: Int32) -> None:
        """Has what a step chose late be brought; what has filled since is spilled before."""
        some = late.ranked(step)
        if not len(some) or self.host is None or self._of_late is None:
            return
        before = self.host.at_home(step, some)
        self._lay_anew(self.host.spill(step, some, array))
        known = step, some, before, self.room.chosen, self._of_late
        rows = step.rows[some]
        self.ranked[rows], self.listed[rows] = late.bring(*known)
        self._kept = None

    def _plan(
        self,
        rows: Int32,
        spans: Int64,
        kept: npt.NDArray[np.bool_],
        due: npt.NDArray[np.bool_],
    ) -> Int32:
        """The columns before NEWEST; those both `kept` and `due` are ranked late."""
        begin, end, listed = spans[:, 0], spans[:, 1], self.listed[rows]
        chosen, of_list = kept | due, self.budget.heads * self.width
        read, other = (rows, rows) if self.late is None else self.late.lists(rows)
        nobody = self.sides * len(self.ranked)
        plan = np.empty((len(rows), self.room.columns), np.int32)
        plan[:, FIRST] = np.where(chosen, self.first + read * of_list, begin)
        plan[:, APART] = np.where(chosen, self.width, 0)
        plan[:, LENGTH] = end - begin - np.where(chosen, listed - self.budget.pages, 0)
        plan[:, KEPT] = np.where(kept, read, nobody)
        plan[:, DUE] = np.where(due, np.where(kept, other, read), nobody)
        plan[:, BROUGHT] = np.where(due & ~kept, rows, len(self.ranked))
        plan[:, DUE_BEGIN : DUE_END + 1] = np.where(due[:, None], spans, 0)
        plan[:, LEFT_BEGIN] = np.where(chosen, begin, 0)
        plan[:, LEFT_END] = np.where(chosen, begin + listed, 0)
        return plan

    def _follow(self, rows: Int32, spans: Int64) -> None:
        """Lets go of the bounds of tables that lie elsewhere now."""
        lay = self.lies[rows]
        if np.array_equal(lay, spans):
            return
        for number in np.flatnonzero((lay[:, 0] != spans[:, 0]) & (lay[:, 1] > 0)).tolist():
            self._let_go(*lay[number].tolist())
            lay[number, 1] = 0
        lay[:, 0], lay[:, 1] = spans[:, 0], np.maximum(lay[:, 1], spans[:, 1])
        self.lies[rows] = lay

    def _bound_all(self, rows: Int32, spans: Int64, end: Int64, array: Int32) -> None:
        """As `_bound`; a request whose keys cannot be had of host memory fails alone."""
        if self.host is None:
            self._bound(spans, end, array)
        else:
            self.host.each(rows, lambda some: self._bound(spans[some], end[some], array))

    def _bound(self, spans: Int64, end: Int64, array: Int32) -> None:
        """Brings the bounds of entries of tables [n, 2] up to date, of each those before its `end`.

        That leaves out last ones, which new tokens lie in: what these score does not matter, they
        are read in any case.
        """
        other = _ranges(spans[:, 0], end)
        other = other[~self.known[other]]
        last = _ranges(end, spans[:, 1])
        last = last[self.told[last] != array[last, 3]]
        if not len(other) + len(last):
            return
        new = other[self.places[other] < 0]
        values = self.bounds.values
        self.places[new] = self.bounds.take(len(new), int(self.needs.sum()))
        if self.bounds.values is not values:
            self._lay(self.room.chosen)
        listed = np.concatenate((other, last))
        rows: Int32 = array[listed]
        self.told[listed] = rows[:, 3]
        rows[:, 0] = 0
        rows[: len(other), 0] = self.places[other] * self.budget.heads
        (sent,) = send(self._ranked.device, rows)
        at = send_index(self._ranked.device, listed).long()
        self._ranked.index_copy_(0, at, torch.as_tensor(sent))
        # Whose keys cannot be had is ranked in this step all the same, by anything.
        if len(other):
            self.bounds.compute(array[other], self.places[other])
        self.known[other] = True


def _ranges(begin: Int64, end: Int64) -> Int64:
    """The numbers from each begin to its end, behind one another."""
    sizes: Int64 = np.maximum(end - begin, 0)
    return within_runs(sizes) + np.repeat(begin, sizes)


def _width(entries: int) -> int:
    """Scores of a row, so that tables may grow a while before steps are captured anew."""
    width = max(_FEWEST_SCORES, power_of_two(entries))
    return width // 4 * 3 if max(_FEWEST_SCORES, entries) <= width // 4 * 3 else width


class ChosenPages:
    """What the top-K heads of requests that decode together have chosen, and their bounds.

    `rooms`: what lies on the device, by budget; others as soon as any of it lies elsewhere.
    """

    def __init__(self, heads: HeadReads, pages: torch.Tensor) -> None:
        self.rows = self.listed = 0
        self.rooms: tuple[ChosenRoom, ...] = ()
        self.groups = [_Budget(b, pages, heads.host.get(b.group)) for b in heads.budgets]
        self._array = np.zeros((0, 5), np.int32)
        self._promises: set[BoundsPromise] = set()

    def promise(self, tokens: int) -> BoundsPromise:
        """Takes room for the bounds of a request of up to so many tokens, until it is released.

        Beside that of all others which were promised some, and whoever else decodes.
        """
        made = BoundsPromise(tokens, self._promises)
        try:
            for group in self.groups:
                group.make_room(promise.tokens for promise in self._promises)
        except BaseException:
            made.release()
            raise
        return made

    def fit(self, array: torch.Tensor, listed: int, rows: int) -> torch.Tensor:
        """The array of entries with room for so many of requests, and what so many rows choose.

        What lies in it stays: the entries of requests first, one that is nobody's at the end.
        """
        if listed <= self.listed and rows <= self.rows:
            return array
        rows = max(_FEWEST_ROWS, self.rows, power_of_two(rows))
        size = listed + sum(group.entries(rows) for group in self.groups)
        made = array.new_tensor(NO_ENTRY).repeat(size + 1, 1)
        ranked = [made.new_zeros((listed, 5)) for _ in self.groups]
        kept = min(listed, len(array) - 1) if not self.rows else self.listed
        made[:kept] = array[:kept]
        first = listed
        for group, table in zip(self.groups, ranked, strict=True):
            group.fit(made, first, table, rows)
            first += group.entries(rows)
        more = listed - len(self._array)
        self._array = np.concatenate(
            (self._array, np.tile(np.asarray(NO_ENTRY, np.int32), (more, 1)))
        )
        self.rows, self.listed = rows, listed
        return made

    def forget(self, row: int) -> None:
        """Lets go of what a request's row has chosen."""
        for group in self.groups:
            if row < len(group.ranked):
                group.forget(row)

    def sits_out(self, row: int, hosts: Mapping[int, HostPages]) -> bool:
        """Whether a request should take no step yet: see `LatePages.sits_out`."""
        return any(
            group.late is not None
            and row < len(group.ranked)
            and group.late.sits_out(row, hosts.get(group.budget.group))
            for group in self.groups
        )

    def take_failures(self) -> Failures:
        """By row the requests whose pages could not be had of host memory since the last time."""
        failures: Failures = {}
        for group in self.groups:
            if group.host is not None and group.host.failures:
                failures.update(group.host.failures)
                group.host.failures.clear()
        return failures

    def prepare(self, step: ListedStep) -> bool:
        """Does of the next step what need not wait for it, while this one is computed.

        Whether any of what lies on the device lies elsewhere now.
        """
        before = [group.room for group in self.groups]
        for group in self.groups:
            group.prepare(step, self._array)
        return any(g.room is not room for g, room in zip(self.groups, before, strict=True))

    def entries_of(
        self, spans: Int32, hosts: Sequence[Mapping[int, HostPages]]
    ) -> tuple[Int32, Int64]:
        """The entries of tables at spans [B · T, 2] behind one another, and how many each has.

        Blocks of pages in host memory are −1 − their numbers there: see `WholeLayers`.
        """
        of_requests = spans.reshape(len(hosts), -1, 2)
        parts = []
        for host, tables in zip(hosts, of_requests.tolist(), strict=True):
            for number, (begin, end) in enumerate(tables):
                rows = self._array[begin:end].copy()
                if (pages := host.get(number)) is not None:
                    rows[: pages.count, 0] = -1 - pages.blocks()
                parts.append(rows)
        lengths = of_requests[:, :, 1] - of_requests[:, :, 0]
        return np.concatenate(parts), lengths.astype(np.int64)

    def note(self, moved: Int64, entries: Int32) -> None:
        """Takes note of entries that a step has changed in which nobody chooses pages."""
        self._array[moved] = entries
        for group in self.groups:
            group.known[moved] = False

    def step(self, step: ListedStep) -> ChosenStep:
        """What a step says of its requests. Bounds are brought up to date on the device."""
        self._array[step.moved] = step.entries
        size = self.listed + sum(group.entries(self.rows) for group in self.groups)
        made = [group.step(step, self._array, size) for group in self.groups]
        rooms = tuple(group.room for group in self.groups)
        if rooms != self.rooms:
            self.rooms = rooms
        plans, widths = zip(*made, strict=True)
        joins = tuple(group.joins and not group.budget.estimate for group in self.groups)
        return ChosenStep(self.rooms, plans, widths, joins)

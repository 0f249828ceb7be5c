"""Slots on the device for pages that lie in host memory (FlexiCache, sections 3.3 and 3.4).

A request whose pages were spilled has some slots for each head, in blocks of its own. When a head
is ranked, pages of its choice that a slot holds stay there, and the others are brought from the
host into slots that hold none of it: `recycle_pages` says which, and `move_pages` reads that on the
device. Between two rankings nothing moves. Attention reads what was chosen by entries that name
slots in place of the request's blocks.

A request is spilled just before it is ranked: nobody reads between two rankings what its table
lists. Pages since then lie in blocks of its own until the next one. When it is ranked first, all of
them do: they begin to be copied then, or at a later ranking, once the device has little room left.
Where pages are mirrored, each is copied behind the step that has filled it, also of requests that
are never spilled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.errors import TransferFailed
from kvweave.ops import Recycled
from kvweave.power_of_two import power_of_two
from kvweave.runner.decode.listed_step import ListedStep
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.decode.slot_room import Failures, SlotRoom
from kvweave.runner.kv.aside import Arrival
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.tables import Int32, send

_FEWEST_PAGES = 64


@dataclass(frozen=True, eq=False)
class HostRoom(SlotRoom):
    """As `SlotRoom`, of one head group whose pages lie in `pool`."""

    pool: HostPool

    @staticmethod
    def made(pool: HostPool, rows: int, pages: int, failures: Failures | None = None) -> HostRoom:
        """Room for so many rows of requests of up to so many pages, of which there is none yet."""

        def nothing(*sizes: int) -> torch.Tensor:
            return torch.full(sizes, -1, dtype=torch.int32, device=pool.arena.device)

        return HostRoom(
            pool,
            nothing(rows + 1, pool.budget.heads, pool.slots),
            nothing(rows + 1, pool.slots),
            nothing(rows + 1, pages),
            nothing(rows + 1).zero_(),
            {} if failures is None else failures,
        )

    def take(self, other: HostRoom) -> None:
        """Takes over the rows of a smaller one, but for its last, which is nobody's."""
        rows = len(other.spilled) - 1
        for mine, its in (
            (self.held, other.held),
            (self.slots, other.slots),
            (self.home[:, : other.home.shape[1]], other.home),
            (self.spilled, other.spilled),
        ):
            mine[:rows] = its[:rows]

    def bring_late(
        self,
        rows: Int32,
        before: Int32,
        chosen: torch.Tensor,
        entries: torch.Tensor,
        then: Callable[[], object],
    ) -> tuple[torch.Tensor, Arrival]:
        """As `bring`, of all heads of requests; what lay at home before comes over beside steps.

        before i32 [B]: how many of each request's first pages did when they were chosen. Those that
        have gone there since are in their slots when the current stream has passed. `then` is done
        behind the others, by whoever brings them. Returns which entries are still on their way,
        bool [B, heads, K], and when they will have come over.
        """
        heads, device = self.pool.budget.heads, self.held.device
        at_rows, known = send(device, rows, before)
        index = torch.as_tensor(at_rows).long()
        held = self.held.index_select(0, index)
        old, lay = held.clone(), torch.as_tensor(known)
        parts = (self.slots, self.home, self.spilled)
        slots, home, away = (part.index_select(0, index) for part in parts)
        coming, gone = (self._recycled(chosen, held, before) for before in (lay, away))
        self.held.index_copy_(0, index, held)
        here, there = self._sides(slots, home, (0, heads))
        failed = self.pool.fetch(gone.moves, gone.count, here, there, heads)
        brought = coming.moves, coming.count, here, there, heads
        arrival, others = self.pool.fetch_late(*brought, then)
        for number, error in {**failed, **others}.items():
            self.failures[int(rows[number])] = error
        at = gone.places.view(chosen.shape)
        self._name(slots, at, entries)
        there_before = old.gather(2, at.clamp_min(0).long()) == chosen
        return (at >= 0) & (chosen < lay[:, None, None]) & ~there_before, arrival

    def _recycled(self, chosen: torch.Tensor, held: torch.Tensor, away: torch.Tensor) -> Recycled:
        """Slots for pages of the first so many `away` [B] that are chosen; `held` says which."""
        # They ascend, so that those come first.
        some = (chosen >= 0) & (chosen < away[:, None, None])
        return ops.recycle_pages(
            chosen.flatten(0, 1),
            some.sum(-1, dtype=torch.int32).flatten(),
            held.view(-1, held.shape[-1]),
            limit=self.home.shape[1],
        )

    @staticmethod
    def _name(slots: torch.Tensor, at: torch.Tensor, entries: torch.Tensor) -> None:
        """Has entries [B, heads, K, 5] name the slots `at` [B, heads, K], where these are any."""
        slots = slots[:, None].expand(-1, at.shape[1], -1)
        named = slots.gather(2, at.clamp_min(0).long())
        entries[..., 0] = torch.where(at >= 0, named, entries[..., 0])


class HostSlots:
    """Whose pages lie in host memory of those that decode together, of one head group.

    `room`: what lies on the device; another one as soon as any of it lies elsewhere. `failures`:
    by row the requests whose pages could not be had of host memory.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.failures: Failures = {}
        self.room = HostRoom.made(pool, 0, _FEWEST_PAGES, self.failures)
        # Rows whose first pages have begun to be copied, until they lie at home.
        self._begun: set[int] = set()
        # Of each row: whose pages the device was told of, and how many.
        self._told: dict[int, tuple[KvRequest | None, int]] = {}

    def fit(self, rows: int) -> None:
        """Room for so many rows; what lies in it stays."""
        if rows >= len(self.room.spilled):
            self._grow(rows, self.room.home.shape[1])

    def _grow(self, rows: int, pages: int) -> None:
        before, self.room = self.room, HostRoom.made(self.pool, rows, pages, self.failures)
        self.room.take(before)

    def forget(self, row: int) -> None:
        """Lets go of a request's row: what its slots hold is nobody's."""
        self._told.pop(row, None)
        self._begun.discard(row)
        self.failures.pop(row, None)

    def each(self, rows: Int32, work: Callable[[slice], None]) -> None:
        """Does work for the requests of these rows together, else for each alone.

        It is given a part of them, and may be done again. Of whom it fails is one of `failures`.
        """
        try:
            work(slice(None))
        except TransferFailed:
            for number, row in enumerate(rows.tolist()):
                try:
                    work(slice(number, number + 1))
                except TransferFailed as error:
                    self.failures[row] = error

    def begin(self, step: ListedStep, some: Int64, array: Int32) -> None:
        """Has pages of some of a step's requests begin to be copied, which were ranked.

        `array` i32 [N, 5]: the entries as they are. Nothing is done while the device has room.
        """
        if len(some) and self.pool.is_pressed:
            for number, host in self._of(step, some):
                host.begin(self._full(step, number, array))
                if host.is_copying:
                    self._begun.add(int(step.rows[number]))

    def may_leave(self, step: ListedStep) -> npt.NDArray[np.bool_]:
        """Whose first pages have been copied, and lie on the device, which has little room: [B].

        Nobody waits.
        """
        there = np.zeros(len(step.rows), bool)
        if not self._begun or not self.pool.is_pressed:
            return there
        begun = np.flatnonzero(np.isin(step.rows, list(self._begun)))
        for number, host in self._of(step, begun):
            there[number] = host.is_copied
            if not host.is_copying:
                self._begun.discard(int(step.rows[number]))
        return there

    def spill(self, step: ListedStep, some: Int64, array: Int32) -> bool:
        """Has pages of some of a step's requests lie in host memory, which are ranked next.

        While the device has room only those of requests that have some there. As `follow_all`.
        `array` as for `begin`.
        """
        pressed = self.pool.is_pressed
        for number, host in self._of(step, some):
            if host.count or pressed:
                full = self._full(step, number, array)
                # What was not copied while there was room is not waited for now.
                host.begin(full)
                host.spill(full)
        return self.follow_all(step, some)

    def mirror(self, step: ListedStep, some: Int64, array: Int32) -> None:
        """Copies pages that a step has filled of some of its requests, where that is asked for.

        `array` as for `begin`.
        """
        if self.pool.mirrors:
            filled = some
            if step.newest is None:
                filled = some[step.positions[some] % self.pool.page_tokens == 0]
            for number, host in self._of(step, filled):
                host.mirror(self._full(step, number, array))

    def _full(self, step: ListedStep, number: int, array: Int32) -> int:
        return step.full_entries(number, self.pool.budget.group, array, self.pool.page_tokens)

    def at_home(self, step: ListedStep, some: Int64) -> Int32:
        """Of how many first entries of some of a step's requests pages lie at home, i32 [n]."""
        hosts = [step.host(number, self.pool.budget.group) for number in some.tolist()]
        return np.asarray([0 if host is None else host.count for host in hosts], np.int32)

    def expect(self, step: ListedStep, some: Int64, arrival: Arrival) -> None:
        """Takes note that pages of some of a step's requests are on their way into slots."""
        for _, host in self._of(step, some):
            host.expect(arrival)

    def arrived(self, step: ListedStep, of: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Of those of a step's requests that wait for pages, bool [B], whose have come over."""
        there = np.zeros_like(of)
        for number, host in self._of(step, np.flatnonzero(of)):
            there[number] = host.has_arrived()
        return there

    def settle(self, step: ListedStep, some: Int64) -> None:
        """Has nothing more be done before what some have chosen lies in slots."""
        for _, host in self._of(step, some):
            host.settle()

    def _of(self, step: ListedStep, some: Int64) -> Iterator[tuple[int, HostPages]]:
        for number in some.tolist():
            host = step.host(number, self.pool.budget.group)
            if host is not None:
                yield number, host

    def follow_all(self, step: ListedStep, some: Int64) -> bool:
        """Tells the device where pages of some of a step's requests lie; whether `room` is new."""
        before = self.room
        for number in some.tolist():
            self.follow(int(step.rows[number]), step.host(number, self.pool.budget.group))
        return self.room is not before

    def follow(self, row: int, host: HostPages | None) -> None:
        """Tells the device where the pages of a request lie that is ranked next.

        None for one whose pages all stay.
        """
        if host is not None:
            # Others may be brought into its slots now.
            host.settle()
        home, count = (None, 0) if host is None else (host.home, host.count)
        before = self._told.get(row)
        if before == (home, count):
            return
        if count > self.room.home.shape[1]:
            self._grow(len(self.room.spilled) - 1, power_of_two(count))
        # Whoever was here before, or has been brought back since, has other slots.
        goes_on = before is not None and before[0] is home and before[1] > 0
        self._tell(row, host, before[1] if goes_on and before is not None else 0)
        self._told[row] = home, count

    def _tell(self, row: int, host: HostPages | None, known: int) -> None:
        room = self.room
        if not known:
            room.held[row].fill_(-1)
        if host is None or not host.count:
            room.spilled[row] = 0
            return
        slots = host.slots[: self.pool.slots]
        blocks, count = host.blocks()[known:], np.asarray([host.count], np.int32)
        sent = map(torch.as_tensor, send(room.spilled.device, slots, blocks, count))
        places: tuple[torch.Tensor, ...] = (
            room.slots[row],
            room.home[row, known : host.count],
            room.spilled[row : row + 1],
        )
        for place, new in zip(places, sent, strict=True):
            place.copy_(new)

"""A worker's pages in the host's memory, and slots on its device for what is chosen of them."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvweave.adapters.vllm.virtual_pages.far_requests import NOBODY, FarChanges
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory
from kvweave.ops import RowPages, Table
from kvweave.runner.decode.slot_room import Failures, SlotRoom
from kvweave.runner.kv.carry_pages import carry_pages
from kvweave.runner.kv.host_arena import HostArena
from kvweave.runner.kv.tables import send
from kvweave.runner.kv.transfers import MAY_PASS, Transfers

_log = logging.getLogger("vllm.kvweave.host_memory")
_PROCESSORS = 8
"""How much of a GPU copies pages to the host: nothing else runs meanwhile."""


def host_arena(
    layout: PageLayout, blocks: int, page: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> HostArena:
    """So many blocks of the host's memory, all of it taken at once, and pinned for a GPU.

    `page`: tokens and numbers of a head's key. Where the driver pins nothing, or not all, that is
    said in the log: the host then copies what a GPU would read itself.

    Errors: `OutOfMemory` for what the host does not have.
    """
    sizes = (blocks * layout.bound_rows, 2, *page)
    made = HostArena(sizes, dtype, device)
    every = np.arange(blocks, dtype=np.int32) * layout.bound_rows
    made.reserve(every, layout.bound_rows)
    if waits_for_host(made):
        _log.warning(
            "host_bytes: expected %d bytes that the driver pins, got pageable memory: the host "
            "copies pages, steps wait for it, and decode steps are not captured in graphs",
            made.reserved,
        )
    return made


def waits_for_host(arena: HostArena) -> bool:
    """Whether the host copies what a GPU would read itself: nothing of it can be captured."""
    return arena.device.type == "cuda" and not arena.pinned


class _Home:
    """The host's pages of a table, which the device reads and writes where they lie."""

    def __init__(
        self, pages: torch.Tensor, arena: torch.Tensor, host: HostArena, transfers: Transfers
    ) -> None:
        self.pages, self.arena, self.transfers = pages, arena, transfers
        self.by_launch = host.pinned
        self.pinned = not waits_for_host(host)

    def at(self, blocks: Table, ranks: int, first: int = 0) -> RowPages:
        """Pages by the numbers that rows give them, of heads from a rank on."""
        return RowPages(self.pages[first:], blocks, ranks)

    def fetch(
        self, moves: Table, count: Table, slots: RowPages, home: RowPages, heads: int
    ) -> Failures:
        """Brings pages into slots; whose could not be brought, by seat, each tried by itself.

        What a GPU reads itself it is only told to: a launch that is refused ends the step, as any
        other's.
        """

        def carry(some: Table, number: Table) -> None:
            carry_pages(some, number, slots, home, "fetch", pinned=self.pinned)

        try:
            carry(moves, count)
        except MAY_PASS:
            if self.by_launch:
                raise
        else:
            return {}
        known = torch.as_tensor(moves)[: int(count[0])].cpu().numpy()
        device = self.arena.device
        return self.transfers.make_each("host memory", carry, known, known[:, 0] // heads, device)


class FarMemory:
    """Blocks of the host's memory, each of all pages that heads which choose have of a page.

    For so many `seats` of requests, of up to so many `pages` each. `seat_of` i32 [virtual pages]:
    whose newest page each is; the last seat is nobody's. `chosen` i32 [seats + 1, G, K], of each
    layer in which some head chooses: what was chosen last, when the request wrote its page number
    `chosen_at`, −1 before. `heads`: how many such layers there are, and G.

    A transfer that fails is made again. Where that fails too its request fails alone: `take_failed`
    says which, and what the step computes for it is nothing.
    """

    def __init__(
        self, memory: PageMemory, host: HostArena, seats: int, pages: int, heads: tuple[int, int]
    ) -> None:
        """`host`: of `host_arena`."""
        layout, device = memory.layout, memory.arena.device
        self.memory, self.host, self.nobody = memory, host, seats
        self.block_pages = layout.bound_rows
        self.transfers, self._failures = Transfers(), Failures()
        # By seat of a request with pages at home, a virtual page by which the scheduler knows it.
        self._own: dict[int, int] = {}

        def room(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self.seat_of, self.counts = room(memory.pages), room(seats + 1)
        self.chosen_at = room(seats + 1)
        layers, of_layer = heads
        most = max(layout.budgets)
        self.chosen = [room(seats + 1, of_layer, most) for _ in range(layers)]
        # A block at home has the pages of all tables, so that one list does for all.
        self.home = room(seats + 1, pages)
        self.rooms = {
            table: SlotRoom(
                self._at_home(layout.bound_row(table)),
                room(seats + 1, layout.block_pages, layout.slots),
                memory.slots_of(table),
                self.home,
                self.counts,
                self._failures,
            )
            for table in layout.choosing
        }
        self.forget()

    def forget(self) -> None:
        """Has nobody have anything here: at the beginning, and when the device has slept."""
        held = [room.held for room in self.rooms.values()]
        for tensor in (self.chosen_at, *self.chosen, *held):
            tensor.fill_(-1)
        for tensor in (self.counts, self.home):
            tensor.zero_()
        self.seat_of.fill_(self.nobody)
        self._failures.clear()

    def _at_home(self, row: int) -> _Home:
        return _Home(self.host.pages[row:], self.memory.arena, self.host, self.transfers)

    def copy(self, changes: FarChanges) -> None:
        """Copies pages to the host, while tables still say where these are.

        Whose could not be copied fails: its blocks are others' from this step on.
        """
        if not len(changes.copies):
            return
        layout, count = self.memory.layout, len(changes.copies)
        pages, blocks = self._sent(changes.copies.T)
        pairs = layout.block_pages * count
        numbers = np.arange(pairs, dtype=np.int32)
        moves = np.stack((numbers // count, numbers % count, numbers % count), 1)
        seat_of = {int(block): int(seat) for seat, _, block in changes.homes}
        owners = np.array([seat_of[int(block)] for _, block in changes.copies], np.int32)
        sent = send(self.counts.device, moves, np.asarray([pairs], np.int32))
        for table, room in self.rooms.items():
            here = self.memory.tables[table].index_select(0, pages.long())[None]
            slots = RowPages(self.memory.arena, here, layout.block_pages)
            home = room.pool.at((blocks * self.block_pages)[None], layout.block_pages)
            carry = partial(self._spill, slots, home)
            try:
                carry(*sent)
            except MAY_PASS:
                each = owners[moves[:, 1]]
                failed = self.transfers.make_each("spill", carry, moves, each, self.counts.device)
                self._failures.update(failed)

    def _spill(self, slots: RowPages, home: RowPages, moves: Table, count: Table) -> None:
        pinned = not waits_for_host(self.host)
        carry_pages(moves, count, slots, home, "spill", pinned=pinned, processors=_PROCESSORS)

    def take_failed(self) -> set[int]:
        """Virtual pages of requests whose transfers failed in this step, one of each."""
        failed = {self._own.get(seat, 0) for seat in self._failures} - {0}
        self._failures.clear()
        return failed

    def apply(self, changes: FarChanges) -> None:
        """Brings up to date whose pages lie where."""
        if len(changes.begun):
            (begun,) = self._sent(changes.begun[None])
            self.chosen_at[begun.long()] = -1
            for room in self.rooms.values():
                room.held[begun.long()] = -1
        if len(changes.homes):
            seat, number, block = self._sent(changes.homes.T)
            self.home[seat.long(), number.long()] = block * self.block_pages
        if len(changes.counts):
            seat, count, _ = self._sent(changes.counts.T)
            self.counts[seat.long()] = count
            self._own.update((int(seat), int(page)) for seat, _, page in changes.counts)
        if len(changes.newest):
            page, seat = self._sent(changes.newest.T)
            self.seat_of[page.long()] = torch.where(seat == NOBODY, self.nobody, seat)

    def _sent(self, columns: npt.NDArray[np.int32]) -> torch.Tensor:
        """Columns of changes on the device."""
        (there,) = send(self.counts.device, np.ascontiguousarray(columns))
        return torch.as_tensor(there)

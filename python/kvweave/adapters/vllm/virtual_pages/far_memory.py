"""A worker's pages in the host's memory, and slots on its device for what is chosen of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.virtual_pages.far_requests import NOBODY, FarChanges
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory
from kvweave.ops import RowPages, Table
from kvweave.runner.decode.slot_room import Failures, SlotRoom
from kvweave.runner.kv.host_arena import HostArena
from kvweave.runner.kv.tables import send

_PROCESSORS = 8
"""How much of a GPU copies pages to the host: nothing else runs meanwhile."""


class _Home:
    """The host's pages of a table, which the device reads and writes where they lie."""

    def __init__(self, pages: torch.Tensor, arena: torch.Tensor) -> None:
        self.pages, self.arena = pages, arena

    def at(self, blocks: Table, ranks: int, first: int = 0) -> RowPages:
        """Pages by the numbers that rows give them, of heads from a rank on."""
        return RowPages(self.pages[first:], blocks, ranks)

    def fetch(
        self, moves: Table, count: Table, slots: RowPages, home: RowPages, heads: int
    ) -> Failures:
        """Brings pages into slots; a launch that is refused ends the step, as any other's."""
        ops.move_pages(moves, count, slots, home, way="fetch")
        return {}


class FarMemory:
    """`blocks` of the host's memory, each of all pages that heads which choose have of a page.

    For so many `seats` of requests, of up to so many `pages` each. `seat_of` i32 [virtual pages]:
    whose newest page each is; the last seat is nobody's. `chosen` i32 [seats + 1, G, K], of each
    layer in which some head chooses: what was chosen last, when the request wrote its page number
    `chosen_at`, −1 before. `heads`: how many such layers there are, and G. All memory is taken, and
    pinned where a GPU is to read it, at once.

    Errors: `OutOfMemory` for what the host does not have, `Unsupported` where a driver pins none.
    """

    def __init__(
        self, memory: PageMemory, blocks: int, seats: int, pages: int, heads: tuple[int, int]
    ) -> None:
        layout, device = memory.layout, memory.arena.device
        self.memory, self.nobody = memory, seats
        self.block_pages = layout.bound_rows
        sizes = (blocks * self.block_pages, *memory.arena.shape[1:])
        self.host = HostArena(sizes, memory.arena.dtype, device)
        every = np.arange(blocks, dtype=np.int32) * self.block_pages
        self.host.reserve(every, self.block_pages)
        readable = device.type == "cpu" or self.host.pinned
        require("host_bytes", readable, "memory that the driver pins", "none")

        def filled(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self.seat_of = filled(seats, memory.pages)
        self.counts = filled(0, seats + 1)
        self.chosen_at = filled(-1, seats + 1)
        layers, of_layer = heads
        most = max(layout.budgets)
        self.chosen = [filled(-1, seats + 1, of_layer, most) for _ in range(layers)]
        # A block at home has the pages of all tables, so that one list does for all.
        self.home = filled(0, seats + 1, pages)
        self.rooms = {
            table: SlotRoom(
                _Home(self.host.pages[layout.bound_row(table) :], memory.arena),
                filled(-1, seats + 1, layout.block_pages, layout.slots),
                memory.slots_of(table),
                self.home,
                self.counts,
            )
            for table in layout.choosing
        }

    def copy(self, changes: FarChanges) -> None:
        """Copies pages to the host, while tables still say where these are."""
        if not len(changes.copies):
            return
        layout, count = self.memory.layout, len(changes.copies)
        pages, blocks = self._sent(changes.copies.T)
        pairs = layout.block_pages * count
        numbers = torch.arange(pairs, dtype=torch.int32, device=pages.device)
        moves = torch.stack((numbers // count, numbers % count, numbers % count), 1)
        total = torch.full_like(numbers[:1], pairs)
        for table, room in self.rooms.items():
            here = self.memory.tables[table].index_select(0, pages.long())[None]
            slots = RowPages(self.memory.arena, here, layout.block_pages)
            home = room.pool.at((blocks * self.block_pages)[None], layout.block_pages)
            ops.move_pages(moves, total, slots, home, way="spill", processors=_PROCESSORS)

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
            seat, count = self._sent(changes.counts.T)
            self.counts[seat.long()] = count
        if len(changes.newest):
            page, seat = self._sent(changes.newest.T)
            self.seat_of[page.long()] = torch.where(seat == NOBODY, self.nobody, seat)

    def _sent(self, columns: npt.NDArray[np.int32]) -> torch.Tensor:
        """Columns of changes on the device."""
        (there,) = send(self.counts.device, np.ascontiguousarray(columns))
        return torch.as_tensor(there)

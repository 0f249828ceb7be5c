"""A worker's pages in the host's memory, and slots on its device for what is chosen of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.virtual_pages.far_requests import NOBODY, FarChanges
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory
from kvweave.ops import RowPages, Table
from kvweave.runner.decode.slot_room import Failures, SlotRoom
from kvweave.runner.kv.aside import Arrival, Aside
from kvweave.runner.kv.host_arena import HostArena
from kvweave.runner.kv.tables import send

_PROCESSORS, _PROCESSORS_BESIDE = 8, 2
"""How much of a GPU copies pages to the host where nothing else runs, and beside a step."""


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


@dataclass(frozen=True)
class _Copies:
    """Moves i32 [M, 3], their count [1], and where blocks are `here`, by table, and at home."""

    moves: torch.Tensor
    count: torch.Tensor
    here: dict[int, torch.Tensor]
    home: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.moves, self.count, *self.here.values(), self.home]


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
        self._aside, self._ahead = Aside(device), Arrival()
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
        if len(changes.homes):
            # Blocks at home and on the device are others' from now on.
            self._ahead.wait()
        if len(changes.copies):
            self._carry(self._listed(changes.copies), _PROCESSORS)

    def copy_ahead(self, changes: FarChanges) -> None:
        """Copies pages that stay, beside the step."""
        if len(changes.ahead):
            listed = self._listed(changes.ahead)
            self._ahead = self._aside.do(lambda: self._carry(listed, _PROCESSORS_BESIDE))
            self._aside.reads(*listed.tensors())

    def _listed(self, copies: npt.NDArray[np.int32]) -> _Copies:
        """Pages and blocks at home as `move_pages` wants them, as tables are now."""
        layout, count = self.memory.layout, len(copies)
        pages, blocks = self._sent(copies.T)
        pairs = layout.block_pages * count
        numbers = torch.arange(pairs, dtype=torch.int32, device=pages.device)
        moves = torch.stack((numbers // count, numbers % count, numbers % count), 1)
        at = {
            table: self.memory.tables[table].index_select(0, pages.long())[None]
            for table in self.rooms
        }
        total = torch.full_like(numbers[:1], pairs)
        return _Copies(moves, total, at, (blocks * self.block_pages)[None])

    def _carry(self, copies: _Copies, processors: int) -> None:
        ranks = self.memory.layout.block_pages
        for table, here in copies.here.items():
            slots = RowPages(self.memory.arena, here, ranks)
            home = self.rooms[table].pool.at(copies.home, ranks)
            moves = copies.moves, copies.count
            ops.move_pages(*moves, slots, home, way="spill", processors=processors)

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

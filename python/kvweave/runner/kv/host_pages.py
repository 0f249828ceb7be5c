"""The pages of one request that lie in the host's memory while it decodes, of one head group.

What is spilled are the pages that the first entries of the request's table list, full ones, and
never the newest. In their place the request holds blocks of the device as slots, into which its
heads bring what they choose: see `HostSlots`. The first pages are many: they are copied while
decoding goes on, and lie here once all of them have come over. Host memory that is full spills
nothing: pages stay on the device then, and decoding goes on. So they do where a copy to the host
fails for good.

Segments that are read where they lie have entries in pages of others. These are copied as they lie
there, and read here at the same distance from their positions: the request lets go of the pages,
and who else reads or keeps them still has them.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvweave.cache import KvRequest
from kvweave.errors import OutOfMemory, PoolFull, TransferFailed
from kvweave.runner.kv.aside import Arrival
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.tables import Int32

_STAYS = (PoolFull, OutOfMemory, TransferFailed)
"""Why pages are not spilled; the next ranking tries again."""


class HostPages:
    """Pages of one head group of a request: those of the first `count` entries lie in `pool`.

    `home` holds their blocks there, none while there are none. `slots` i32 [S]: where the slots on
    the device begin.
    """

    def __init__(self, pool: HostPool, request: KvRequest) -> None:
        self.pool = pool
        self.request = request
        self.count = 0
        self.home: KvRequest | None = None
        self.slots: Int32 = np.zeros(0, np.int32)
        # Of entries whose pages have been copied, or are being, where that is: `_coming` then says
        # when all are there. Entries of one page have one block.
        self._at: Int32 = np.zeros(0, np.int32)
        # Blocks of `home` that are taken by them.
        self._copied = 0
        self._coming: Arrival | None = None
        # When what was last chosen lies in the slots, where a step has not waited for it yet.
        self._arriving: Arrival | None = None

    def begin(self, entries: int) -> None:
        """Copies the pages of first entries beside whatever else the device does: see `spill`.

        All of them have their KV. Nothing is done where that would not take less of the device,
        where there is no room, or where it has been done before.
        """
        if len(self._at) or not self._frees(entries):
            return
        try:
            self._coming = self._copy(entries, aside=True)
        except _STAYS:
            self._leave_home()

    @property
    def is_copying(self) -> bool:
        """Whether first pages have begun to come over, and still lie on the device."""
        return self._coming is not None and not self.count

    @property
    def is_copied(self) -> bool:
        """Whether all that have begun to come over are there. Nobody waits."""
        return self._coming is not None and not self.count and self._coming.is_there()

    def _frees(self, entries: int) -> bool:
        """Whether the first entries take more pages of the device than their slots would."""
        slots = self.pool.slots
        if entries <= slots:
            return False
        rows = blocks_of(self.request, self.pool.budget.group)[:entries]
        return len(np.unique(rows)) > slots

    def spill(self, entries: int) -> None:
        """Has the pages of first entries lie here, if that takes less of the device.

        All of them have their KV. What finds no room stays where it is, and so does everything
        while the first ones are on their way.
        """
        if not self._leaves(entries):
            return
        if self._coming is not None:
            if not self.count and not self._coming.is_there():
                return
            # Of pages that were mirrored since, the newest may still be on their way.
            self._coming.wait()
            self._coming = None
        entries = self._there(entries)
        if self._leaves(entries) and self._let_go(entries):
            self.count = entries
        elif not self.count:
            self._leave_home()

    def spill_full(self) -> bool:
        """Has all full pages lie here, whatever is on its way; whether any has left the device.

        For whoever finds no room there: the current stream waits for what is being copied.
        """
        self.settle()
        before, page = self.count, self.pool.page_tokens
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        begins = self.request.entries(self.pool.budget.group)[:, 3]
        newest = (self.request.length - 1) // page * page
        # An entry ends where the next begins.
        self.spill(int(np.searchsorted(begins[1:], newest, side="right")))
        return self.count > before

    def _leaves(self, entries: int) -> bool:
        """Whether anything is to be spilled up to so many entries."""
        return entries > self.count if self.count else self._frees(entries)

    def _let_go(self, entries: int) -> bool:
        """Gives back the first entries' blocks of the device for slots; whether there were any.

        Not before they lie here: others may write what is given back.
        """
        blocks = np.ascontiguousarray(self._at[self.count : entries])
        try:
            self.slots = self.request.spill(self.pool.budget.group, blocks, self.pool.slots)
        except PoolFull:
            return False
        return True

    def _there(self, entries: int) -> int:
        """Of how many first entries the pages lie here, once others have been copied."""
        if entries > len(self._at):
            # Where these find no room the others may go all the same.
            with suppress(*_STAYS):
                self._copy(entries)
        return min(entries, len(self._at))

    def mirror(self, entries: int) -> None:
        """Copies what of first entries was not copied before, beside whatever else goes on.

        Also where nothing will be spilled. What finds no room is copied when it is spilled.
        """
        if entries <= len(self._at):
            return
        try:
            self._coming = self._copy(entries, aside=True)
        except _STAYS:
            if not len(self._at):
                self._leave_home()

    def _copy(self, entries: int, aside: bool = False) -> Arrival | None:
        """Copies the pages of entries up to so many that were not copied before, each once.

        # Errors
        `PoolFull` without room for them here, `OutOfMemory` where the host has no memory for that;
        `TransferFailed`.
        """
        rows = blocks_of(self.request, self.pool.budget.group)[len(self._at) : entries]
        here, of_entry = _distinct(rows)
        blocks = self._booked(len(here))
        self.pool.reserve(blocks)
        arrival = self.pool.copy_aside(here, blocks) if aside else None
        if not aside:
            self.pool.carry_blocks(here, blocks, "spill")
        self.pool.transfers.copied += len(blocks)
        self._copied += len(blocks)
        self._at = np.append(self._at, blocks[of_entry])
        return arrival

    def expect(self, arrival: Arrival) -> None:
        """Takes note that pages are on their way into the slots."""
        self._arriving = arrival

    def has_arrived(self) -> bool:
        """Whether nothing is on its way into the slots any more. Nobody waits."""
        if self._arriving is None or self._arriving.is_there():
            self._arriving = None
            return True
        return False

    def settle(self) -> None:
        """Has the current stream do nothing more before what is on its way lies in its slots.

        Nobody else may be given the slots before, and nothing else be brought into them.
        """
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def bring_back(self) -> None:
        """Has all pages lie on the device again, where whatever reads all of them finds them.

        # Errors
        `PoolFull` without room; nothing has changed then. Whatever else happens on the way, as
        `TransferFailed`, the request is released: of what it had on the device there is nothing.
        """
        if not self.count:
            self._leave_home()
            return
        self.settle()
        group = self.pool.budget.group
        home, first = np.unique(self.blocks(), return_index=True)
        self.request.bring_back(group)
        try:
            here = blocks_of(self.request, group)[first]
            self.pool.carry_blocks(here, home, "fetch")
        except BaseException:
            self.request.release()
            raise
        finally:
            self._leave_home()

    def forget_copies(self) -> None:
        """Lets go of copies of what lies on the device, where it is to be written anew."""
        if not self.count:
            self._leave_home()

    def blocks(self) -> Int32:
        """Where the pages of the first `count` entries lie in the pool, i32 [count]."""
        return self._at[: self.count]

    def _booked(self, pages: int) -> Int32:
        """Blocks of the pool for so many pages more than were copied, i32 [pages].

        # Errors
        `PoolFull` without room for all of them.
        """
        cache, wanted = self.pool.cache, self._copied + pages
        # More than are copied may be there, of a time that the device refused.
        held = 0 if self.home is None else self.home.length // cache.shape.page_tokens
        room = np.zeros(max(0, wanted - held) * cache.shape.page_tokens, np.int32)
        if self.home is None:
            self.home = cache.admit(room, reuse="none")
        elif len(room):
            self.home.append(room)
        return blocks_of(self.home)[self._copied : wanted]

    def _leave_home(self) -> None:
        self.settle()
        self.count = self._copied = 0
        self._at = self._at[:0]
        self.slots = np.zeros(0, np.int32)
        if self._coming is not None:
            # Others may be given the blocks: they copy behind this.
            self.pool.abandon(self._coming)
            self._coming = None
        if self.home is not None:
            self.home.release()
            self.home = None

    def release(self) -> None:
        """Gives the pool's blocks back; safe to call twice. The request's own go with it."""
        self._leave_home()


def blocks_of(request: KvRequest, table: int = 0) -> Int32:
    """The blocks that a table of a request lists, i32 [N]."""
    return np.ascontiguousarray(request.entries(table)[:, 0])


def _distinct(rows: Int32) -> tuple[Int32, npt.NDArray[np.intp]]:
    """Those of rows [N] that are not equal, in the order in which they come, and which each is."""
    _, first, which = np.unique(rows, return_index=True, return_inverse=True)
    order = first.argsort()
    return rows[first[order]], order.argsort()[which]

"""The pages of one request that lie in the host's memory while it decodes, of one head group.

What is spilled are the first pages of the request's table, full ones, and never the newest. In
their place the request holds blocks of the device as slots, into which its heads bring what they
choose: see `HostSlots`. The first pages are many: they are copied while decoding goes on, and lie
here once all of them have come over. Host memory that is full spills nothing: pages stay on the
device then, and decoding goes on. So they do where a copy to the host fails for good.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from kvweave.cache import KvRequest
from kvweave.errors import OutOfMemory, PoolFull, TransferFailed
from kvweave.runner.kv.aside import Arrival
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.tables import Int32

_STAYS = (PoolFull, OutOfMemory, TransferFailed)
"""Why pages are not spilled; the next ranking tries again."""


class HostPages:
    """Pages of one head group of a request: the first `count` of its table lie in `pool`.

    `home` holds their blocks there, none while there are none. `slots` i32 [S]: where the slots on
    the device begin.
    """

    def __init__(self, pool: HostPool, request: KvRequest) -> None:
        self.pool = pool
        self.request = request
        self.count = 0
        self.home: KvRequest | None = None
        self.slots: Int32 = np.zeros(0, np.int32)
        # Pages that have been copied, or are being: `_coming` then says when all are there.
        self._copied = 0
        self._coming: Arrival | None = None
        # When what was last chosen lies in the slots, where a step has not waited for it yet.
        self._arriving: Arrival | None = None

    def begin(self, pages: int) -> None:
        """Copies the first pages beside whatever else the device does: see `spill`.

        All of them have their KV. Nothing is done where that would not take less of the device,
        where there is no room, or where it has been done before.
        """
        if self._copied or pages <= self.pool.slots:
            return
        try:
            self._coming = self._copy(pages, aside=True)
        except _STAYS:
            self._leave_home()

    def spill(self, pages: int) -> None:
        """Has the first pages lie here, if that takes less of the device and there is room.

        All of them have their KV. What finds no room stays where it is, and so does everything
        while the first ones are on their way.
        """
        if pages <= (self.count or self.pool.slots):
            return
        if self._coming is not None:
            if not self.count and not self._coming.is_there():
                return
            # Of pages that were mirrored since, the newest may still be on their way.
            self._coming.wait()
            self._coming = None
        pages = self._there(pages)
        if pages > (self.count or self.pool.slots) and self._let_go(pages):
            self.count = pages
        elif not self.count:
            self._leave_home()

    def _let_go(self, pages: int) -> bool:
        """Gives back the first pages' blocks of the device for slots; whether there were any.

        Not before they lie here: others may write what is given back.
        """
        blocks = self._rows()[self.count : pages]
        try:
            self.slots = self.request.spill(self.pool.budget.group, blocks, self.pool.slots)
        except PoolFull:
            return False
        return True

    def _there(self, pages: int) -> int:
        """How many of the first pages lie here, once those that did not have been copied."""
        if pages > self._copied:
            # Where these find no room the others may go all the same.
            with suppress(*_STAYS):
                self._copy(pages)
        return min(pages, self._copied)

    def mirror(self, pages: int) -> None:
        """Copies what of the first pages was not copied before, beside whatever else goes on.

        Also where nothing will be spilled. What finds no room is copied when it is spilled.
        """
        if pages <= self._copied:
            return
        try:
            self._coming = self._copy(pages, aside=True)
        except _STAYS:
            if not self._copied:
                self._leave_home()

    def _copy(self, pages: int, aside: bool = False) -> Arrival | None:
        """Copies the pages up to so many that were not copied before.

        # Errors
        `PoolFull` without room for them here, `OutOfMemory` where the host has no memory for that;
        `TransferFailed`.
        """
        blocks = self._booked(pages)[self._copied :]
        self.pool.reserve(blocks)
        here = blocks_of(self.request, self.pool.budget.group)[self._copied : pages]
        arrival = self.pool.copy_aside(here, blocks) if aside else None
        if not aside:
            self.pool.carry_blocks(here, blocks, "spill")
        self.pool.transfers.copied += len(blocks)
        self._copied = pages
        return arrival

    def expect(self, arrival: Arrival) -> None:
        """Takes note that pages are on their way into the slots."""
        self._arriving = arrival

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
        home = self.blocks()
        self.request.bring_back(group)
        try:
            here = blocks_of(self.request, group)[: self.count]
            self.pool.carry_blocks(here, home, "fetch")
        except BaseException:
            self.request.release()
            raise
        finally:
            self._leave_home()

    def blocks(self) -> Int32:
        """Where the pages lie in the pool, i32 [count]."""
        return self._rows()[: self.count]

    def _rows(self) -> Int32:
        return np.zeros(0, np.int32) if self.home is None else blocks_of(self.home)

    def _booked(self, pages: int) -> Int32:
        """Blocks of the pool for so many pages, i32 [pages].

        # Errors
        `PoolFull` without room for all of them.
        """
        cache = self.pool.cache
        tokens = self.request.tokens[: pages * cache.shape.page_tokens]
        if self.home is None:
            self.home = cache.admit(tokens, reuse="none")
        elif len(tokens) > self.home.length:
            # More than are spilled may be there, of a time that the device refused.
            self.home.append(tokens[self.home.length :])
        return self._rows()[:pages]

    def _leave_home(self) -> None:
        self.settle()
        self.count = self._copied = 0
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

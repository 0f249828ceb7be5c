"""Host memory for pages that heads which choose seldom read (FlexiCache, section 3.3).

A head group whose heads are ranked once in a while has a pool of it: a cache of its own counts its
blocks, which have the group's pages of `page_tokens` tokens each, and one arena is their bytes. A
group that is ranked at every step has none: its pages would travel in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvweave.arguments import whole
from kvweave.cache import KvCache, KvShape
from kvweave.errors import InvalidArgument, TransferFailed
from kvweave.ops import RowPages, Table
from kvweave.runner.kv.aside import Arrival, Aside
from kvweave.runner.kv.beside_host import FREE_SHARE, HostMemory
from kvweave.runner.kv.block_pages import carry_blocks
from kvweave.runner.kv.carry_pages import Way, carry_pages
from kvweave.runner.kv.copy_engine import NEVER, WAYS, measured
from kvweave.runner.kv.host_arena import AHEAD_BYTES, HostArena
from kvweave.runner.kv.page_budget import PageBudget, budgets_of
from kvweave.runner.kv.tables import Int32
from kvweave.runner.kv.transfers import MAY_PASS, Transfers
from kvweave.spare_slots import slots_for


@dataclass(frozen=True)
class HostPool:
    """The host memory of one head group: `cache` counts its blocks, which lie at `home`.

    Both `home.pages` and the device's `arena` are [pages, 2, P, D]. On the CPU the device is the
    other arena. `scales` u8 [pages, 2], on the device, of pages that are kept as fp8 here: see
    `RowPages`. `mirrors`: whether pages are copied here as they fill, those that are not spilled
    too. `device` counts the pages of the arena; while less than `free_share` of them are free
    requests are spilled. `aside` makes copies that decoding does not wait for. `late` brings pages
    that a ranking has chosen, where rankings take effect late; None where a step waits for these.
    `whole`: whether its request sits steps out until all of them have come. `engine_bytes`: blocks
    of so many bytes are carried by a GPU's copy engine, each way, as was measured at first.
    Whatever the host itself asks for is tried again where it fails: `transfers` counts that.
    """

    budget: PageBudget
    cache: KvCache
    home: HostArena
    arena: torch.Tensor
    aside: Aside
    device: KvCache
    free_share: float
    scales: torch.Tensor | None = None
    mirrors: bool = False
    late: Aside | None = None
    whole: bool = False
    transfers: Transfers = field(default_factory=Transfers)
    engine_bytes: Mapping[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, NEVER))

    @property
    def pages(self) -> torch.Tensor:
        """All pages here, [pages, 2, P, D]."""
        return self.home.pages

    def at(self, blocks: Table, ranks: int, first: int = 0) -> RowPages:
        """Pages here by the numbers that rows give them: see `RowPages`.

        `first`: the rank of the first row's pages in a block.
        """
        scales = None if self.scales is None else self.scales[first:]
        return RowPages(self.pages[first:], blocks, ranks, scales)

    @property
    def pinned(self) -> bool:
        """Whether the device, a GPU, reads pages where they lie."""
        return self.home.pinned

    @property
    def waits(self) -> bool:
        """Whether the host copies what a GPU would read: a step waits for that."""
        return self.arena.is_cuda and not self.pinned

    @property
    def is_pressed(self) -> bool:
        """Whether the device has few pages left that nobody holds, so that requests are spilled.

        What is cached and held by nobody counts as free: it goes when its room is wanted.
        """
        stats = self.device.stats()
        held = sum(group["held"] * group["block_pages"] for group in stats["groups"])
        total = int(stats["arena_pages"])
        return bool(total - held < self.free_share * total)

    @property
    def slots(self) -> int:
        """Pages of a head that have room on the device once the others lie here."""
        return slots_for(self.budget.pages)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return int(self.arena.shape[2])

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.budget.heads * self.cache.shape.page_bytes

    def stats(self) -> dict[str, Any]:
        """Counts of blocks as `KvCache.stats` has them, `block_bytes`, and `held_bytes` of them.

        `copied_bytes` have come here so far. `reserved_bytes` are memory by now, `pinned` if a GPU
        reads it. `retried`: times that a
        transfer was tried again; `failed`: transfers that were given up.
        """
        counts, made = self.cache.stats(), self.transfers
        held = {"block_bytes": self.block_bytes, "held_bytes": counts["held"] * self.block_bytes}
        held["copied_bytes"] = made.copied * self.block_bytes
        of_memory = {"reserved_bytes": self.home.reserved, "pinned": self.pinned}
        return {**counts, **held, **of_memory, "retried": made.retried, "failed": made.failed}

    def reserve(self, blocks: Int32) -> None:
        """Sees to memory for blocks [N], which somebody has been given.

        # Errors
        `OutOfMemory` where the host has none.
        """
        self.home.reserve(blocks, self.budget.heads)

    def contents(self, blocks: Int32, ranks: range | None = None) -> torch.Tensor:
        """The pages of blocks [N] on the device, of some heads by their ranks or all.

        They are [N · heads, 2, P, D].

        # Errors
        `TransferFailed`.
        """
        some, arena = range(self.budget.heads) if ranks is None else ranks, self.arena
        sizes = (len(blocks) * len(some), *arena.shape[1:])
        room = torch.empty(sizes, dtype=arena.dtype, device=arena.device)
        here = len(some) * np.arange(len(blocks), dtype=np.int32)
        self.carry_blocks(here, blocks, "fetch", room, some)
        return room

    def copy_aside(self, here: Int32, home: Int32) -> Arrival:
        """Copies whole blocks [N] of the device, where they are `here`, beside its other work.

        # Errors
        `TransferFailed`, where it could not even be begun.
        """
        return self.aside.do(lambda: self.carry_blocks(here, home, "spill"))

    def abandon(self, arrival: Arrival) -> None:
        """Says of a copy on its way that nobody wants it: its blocks are others' from now on."""
        self.aside.abandoned = arrival

    def carry_blocks(
        self,
        here: Int32,
        home: Int32,
        way: Way,
        room: torch.Tensor | None = None,
        ranks: range | None = None,
    ) -> None:
        """Carries blocks [N] between the device, where they are `here`, and here at home.

        `room`: other pages of the device than those of the arena, and `ranks` of the heads in a
        block that are carried, whose pages follow each other there; all of them in the arena.

        # Errors
        `TransferFailed`; what was to be carried lies where it was, and some of it here too.
        """
        self.aside.abandoned.wait()
        what = "host memory" if way == "fetch" else "spill"
        arena = self.arena if room is None else room
        heads = range(self.budget.heads) if ranks is None else ranks
        self.transfers.make(what, lambda: self._carry_blocks(here, home, way, arena, heads))

    def _carry_blocks(
        self, here: Int32, home: Int32, way: Way, arena: torch.Tensor, ranks: range
    ) -> None:
        rows = np.arange(len(ranks), dtype=np.int32)
        carry_blocks(
            (arena, rows, here),
            (self.pages, rows + ranks.start, home),
            way,
            self.carry,
            engine_bytes=self.engine_bytes[way],
            scales=self.scales,
        )

    def fetch(
        self, moves: Table, count: Table, slots: RowPages, home: RowPages, heads: int
    ) -> dict[int, TransferFailed]:
        """Brings what requests have chosen into slots; each its own where that fails together.

        moves i32 [M, 3] are of rows, `heads` of each request; says by its number whose pages could
        not be brought. Where the device reads the host's memory itself, here it is only told to:
        it says nothing of single pages, and a launch that it refuses raises as any other.
        """
        try:
            self.carry(moves, count, slots, home, "fetch")
        except MAY_PASS:
            if self.pinned:
                raise
        else:
            return {}

        def carry(some: Table, number: Table) -> None:
            self.carry(some, number, slots, home, "fetch")

        known = torch.as_tensor(moves)[: int(count[0])].cpu().numpy()
        owners = known[:, 0] // heads
        return self.transfers.make_each("host memory", carry, known, owners, self.arena.device)

    def fetch_late(
        self,
        moves: torch.Tensor,
        count: torch.Tensor,
        slots: RowPages,
        home: RowPages,
        heads: int,
        then: Callable[[], object],
    ) -> tuple[Arrival, dict[int, TransferFailed]]:
        """As `fetch`, beside steps that read none of the slots; says too when all have come over.

        It begins behind all that the current stream has been asked to do by now, and ends with
        `then`.
        """
        assert self.late is not None
        failed = dict[int, TransferFailed]()

        def bring() -> None:
            failed.update(self.fetch(moves, count, slots, home, heads))
            then()

        arrival = self.late.do(bring)
        self.late.reads(moves, count, *map(torch.as_tensor, (slots.blocks, home.blocks)))
        return arrival, failed

    def carry(
        self,
        moves: Table,
        count: Table,
        slots: RowPages,
        home: RowPages,
        way: Way,
        *,
        processors: int = 2,
    ) -> None:
        """As `ops.move_pages`, also where the device does not read the host's memory."""
        known = moves, count, slots, home
        carry_pages(*known, way, pinned=self.pinned, processors=processors)


def make_host_pools(
    cache: KvCache, arena: torch.Tensor, asked: HostMemory
) -> Mapping[int, HostPool]:
    """The pools of a cache's head groups, by their numbers, of as many bytes together as is asked.

    None where none are. Each has a share by its heads, and takes memory of it as it needs that.

    # Errors
    `InvalidArgument` for heads of which none is ranked less often than at every step, and for bytes
    that hold no block of one of the groups; `OutOfMemory` for what the host cannot hold.
    """
    if asked.size is None:
        return {}
    host_bytes = whole("host_bytes", asked.size, 1)
    budgets = [budget for budget in budgets_of(cache) if budget.every > 1]
    if not budgets:
        raise InvalidArgument(
            "host_bytes: expected a head map with top_k heads that are not ranked at every step, "
            "got none"
        )
    heads = sum(budget.heads for budget in budgets)
    # The null block and one more of each.
    least = 2 * heads * _shape(cache.shape, heads, asked).page_bytes
    if host_bytes < least:
        raise InvalidArgument(f"host_bytes: expected at least {least}, got {host_bytes}")
    ahead = asked.ahead
    if ahead is None:
        ahead = AHEAD_BYTES if arena.is_cuda else 0

    def of_heads(budget: PageBudget) -> HostMemory:
        size, early = (of * budget.heads // heads for of in (host_bytes, ahead))
        return replace(asked, size=size, ahead=early)

    return {b.group: _made(b, cache, arena, of_heads(b)) for b in budgets}


def _shape(of: KvShape, heads: int, asked: HostMemory) -> KvShape:
    """That of pages of so many heads in host memory."""
    dtype = of.dtype if asked.dtype is None else "fp8_e4m3"
    return KvShape(1, heads, of.head_dim, of.page_tokens, dtype)


def _made(budget: PageBudget, device: KvCache, arena: torch.Tensor, asked: HostMemory) -> HostPool:
    cache = KvCache(_shape(device.shape, budget.heads, asked), arena_bytes=asked.size, memory=False)
    sizes = (cache.stats()["arena_pages"], *arena.shape[1:])
    dtype = arena.dtype if asked.dtype is None else torch.float8_e4m3fn
    scales = None
    if asked.dtype is not None:
        scales = torch.zeros((sizes[0], 2), dtype=torch.uint8, device=arena.device)
    home = HostArena(sizes, dtype, arena.device, asked.ahead or 0)
    engine_bytes: Mapping[Way, int] = dict.fromkeys(WAYS, NEVER)
    if home.pinned and scales is None:
        engine_bytes = measured(arena, home.first)
    return HostPool(
        budget,
        cache,
        home,
        arena,
        Aside(arena.device),
        device,
        FREE_SHARE if asked.free_share is None else asked.free_share,
        scales,
        mirrors=asked.copies == "mirror",
        late=Aside(arena.device) if asked.arrivals in ("late", "whole") else None,
        whole=asked.arrivals == "whole",
        engine_bytes=engine_bytes,
    )

"""Pages that are chosen, brought from elsewhere into slots on the device (FlexiCache, section 3.4).

Nothing here waits or looks at a number that lies on the device, so that a captured step may do it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvweave import ops
from kvweave.errors import TransferFailed
from kvweave.ops import Recycled, RowPages, Table

Failures = dict[int, TransferFailed]
"""By row of a request, what failed of it alone."""


class HomePages(Protocol):
    """Where pages lie at home, beside the `arena` of the device that slots are pages of."""

    @property
    def arena(self) -> torch.Tensor:
        """Pages of the device, [pages, 2, P, D]."""

    def at(self, blocks: Table, ranks: int, first: int = 0) -> RowPages:
        """Pages at home by the numbers that rows give them: see `RowPages`.

        `first`: the rank of the first row's pages in a block.
        """

    def fetch(
        self, moves: Table, count: Table, slots: RowPages, home: RowPages, heads: int
    ) -> Failures:
        """Brings pages into slots, as `ops.move_pages`; whose could not be brought, by number.

        moves i32 [M, 3] are of rows, `heads` of each request.
        """


@dataclass(frozen=True)
class RoomRows:
    """What a room has of the rows i64 [B] of some requests: see `SlotRoom`."""

    rows: torch.Tensor
    slots: torch.Tensor
    home: torch.Tensor
    spilled: torch.Tensor


@dataclass(frozen=True, eq=False)
class SlotRoom:
    """What lies on the device for R rows of requests and one that is nobody's, of some heads.

    `held` i32 [R + 1, heads, S]: the page that each slot of a head holds, −1 for none. `slots` i32
    [R + 1, S]: where they begin in the arena. `home` i32 [R + 1, W]: where pages begin at home.
    `spilled` i32 [R + 1]: how many of a request lie there, its first ones. `failures`: by row why
    what was chosen of a request could not be brought; what the row reads is spoiled then.
    """

    pool: HomePages
    held: torch.Tensor
    slots: torch.Tensor
    home: torch.Tensor
    spilled: torch.Tensor
    failures: Failures = field(default_factory=dict)

    def of(self, rows: torch.Tensor) -> RoomRows:
        """What lies here of rows i64 [B], the last one for those who have chosen nothing."""
        kept = (self.slots, self.home, self.spilled)
        return RoomRows(rows, *(part.index_select(0, rows) for part in kept))

    def bring(
        self,
        ranks: tuple[int, int],
        some: RoomRows,
        chosen: torch.Tensor,
        entries: torch.Tensor,
    ) -> None:
        """Brings what some heads of B requests have chosen into slots, and has entries name these.

        `ranks`: those of the heads' pages, from and to. `some`: the requests' rows. chosen i32
        [B, heads, K]: pages, −1 behind them. entries i32 [B, heads, K, 5] are of these, and changed
        in place.
        """
        heads = ranks[1] - ranks[0]
        of_heads = self.held[:, ranks[0] : ranks[1]]
        held = of_heads.index_select(0, some.rows)
        recycled = self._recycled(chosen, held, some.spilled)
        of_heads.index_copy_(0, some.rows, held)
        here, there = self._sides(some, ranks)
        failed = self.pool.fetch(recycled.moves, recycled.count, here, there, heads)
        self.failures.update({int(some.rows[number]): error for number, error in failed.items()})
        self._name(some, recycled.places.view(chosen.shape), entries)

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

    def _sides(self, some: RoomRows, ranks: tuple[int, int]) -> tuple[RowPages, RowPages]:
        """The slots and the pages at home of some heads of requests."""
        heads = ranks[1] - ranks[0]
        # Seen from the first head's page, it is the first.
        here = RowPages(self.pool.arena[ranks[0] :], some.slots, heads)
        return here, self.pool.at(some.home, heads, ranks[0])

    def _name(self, some: RoomRows, at: torch.Tensor, entries: torch.Tensor) -> None:
        """Has entries [B, heads, K, 5] name the slots `at` [B, heads, K], where these are any."""
        slots = some.slots[:, None].expand(-1, at.shape[1], -1)
        named = slots.gather(2, at.clamp_min(0).long())
        entries[..., 0] = torch.where(at >= 0, named, entries[..., 0])

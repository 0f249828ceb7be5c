"""Pages that are chosen, brought from elsewhere into slots on the device (FlexiCache, section 3.4).

Nothing here waits or looks at a number that lies on the device, so that a captured step may do it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvweave import ops
from kvweave.errors import TransferFailed
from kvweave.ops import RowPages, SeatedHeads, Table, Workspace

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

    def bring(
        self,
        rows: SeatedHeads,
        chosen: torch.Tensor,
        entries: torch.Tensor,
        *,
        by_seat: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        """Brings what some heads of B requests have chosen into slots, and has entries name these.

        As `ops.recycle_seats`, the requests' seats being rows of this room.
        """
        recycled = ops.recycle_seats(
            chosen,
            entries,
            ops.Seats(self.held, self.slots, self.spilled),
            rows,
            limit=self.home.shape[1],
            by_seat=by_seat,
            workspace=workspace,
        )
        heads = len(rows.heads)
        ranks = rows.rank, rows.rank + heads
        here, there = self._sides(self.slots, self.home, ranks)
        failed = self.pool.fetch(recycled.moves, recycled.count, here, there, heads)
        self.failures.update(failed)

    def _sides(
        self, slots: torch.Tensor, home: torch.Tensor, ranks: tuple[int, int]
    ) -> tuple[RowPages, RowPages]:
        """The slots and the pages at home of some heads, of requests by their rows."""
        heads = ranks[1] - ranks[0]
        # Seen from the first head's page, it is the first.
        here = RowPages(self.pool.arena[ranks[0] :], slots, heads)
        return here, self.pool.at(home, heads, ranks[0])

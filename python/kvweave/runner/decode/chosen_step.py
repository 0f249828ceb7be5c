"""What a decode step says of the pages that its requests' heads choose, and what it says it about.

See `ChosenPages`, which makes it, and `ChosenTables`, which reads it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvweave.runner.decode.host_slots import HostRoom
from kvweave.runner.decode.late_pages import SIDES, LateRoom
from kvweave.runner.kv.page_budget import PageBudget
from kvweave.runner.kv.tables import Int32

NO_ENTRY = (-1, 0, 0, 2**31 - 1, 0)
"""An entry outside the cache: it covers no token."""

FIRST, APART, LENGTH, KEPT, DUE, BROUGHT, DUE_BEGIN, DUE_END, LEFT_BEGIN, LEFT_END, NEWEST = range(
    11
)
"""Columns of a request in a step, see `ChosenStep`."""


@dataclass(frozen=True, eq=False)
class ChosenRoom:
    """What lies on the device for the requests and heads of one budget.

    `chosen` i32 [lists + 1, heads, W, 5]: of each list and head the entries that were chosen, then
    those begun since. Of R rows each has one list, or two where rankings are late. It is a part of
    the array of all entries; the last list is nobody's. `bounds` [places · heads, vectors, D] and
    `scales` [places · heads]: see `KeptBounds`. `ranked` i32 [N, 5]: the entries of requests as
    `score_pages` wants them, with the row of their bounds in place of a block. `means`
    [places · heads, 2, D], beside bounds, of a budget that estimates. `host`: what brings pages
    from host memory, where the group has any, and `late` beside it what rankings leave.
    """

    budget: PageBudget
    chosen: torch.Tensor
    bounds: torch.Tensor
    ranked: torch.Tensor
    scales: torch.Tensor | None = None
    means: torch.Tensor | None = None
    host: HostRoom | None = None
    late: LateRoom | None = None

    @property
    def columns(self) -> int:
        """Numbers that a step says of a request."""
        return NEWEST + self.chosen.shape[2] - self.budget.pages + 1

    def nobody(self, entries: int) -> Int32:
        """What a step says where there is no request: of so many entries the last is nobody's."""
        row = np.full(self.columns, entries - 1, np.int32)
        row[:NEWEST] = 0
        row[[KEPT, DUE]] = len(self.chosen) - 1
        row[BROUGHT] = (len(self.chosen) - 1) // (1 if self.late is None else SIDES)
        return row


@dataclass(frozen=True)
class ChosenStep:
    """What a step says of its requests, by budget.

    `plans` i32 [B, columns]: the heads' tables begin at entry FIRST, each APART from the one before
    and LENGTH long. The entries at the places from NEWEST on go behind what list KEPT has of a
    choice, the first of them in place of the last. A request that is ranked has its entries from
    DUE_BEGIN to DUE_END, and what it chooses goes to list DUE; the step brings that into the slots
    of row BROUGHT, which is nobody's where it does not. One that reads a choice had the entries
    from LEFT_BEGIN to LEFT_END when it was made: those not read are left out. `widths`: the most
    entries that any of them may have, 0 where nobody is ranked. `joins`: whether pages that were
    chosen are on their way, which are read where they have come over; never those of a budget that
    estimates what it does not read.
    """

    rooms: tuple[ChosenRoom, ...]
    plans: tuple[Int32, ...]
    widths: tuple[int, ...]
    joins: tuple[bool, ...]

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """What of it a captured step goes by beside numbers."""
        return self.widths, self.joins

    def once_more(self, entries: int) -> ChosenStep:
        """The same tables again, of so many entries: what was chosen is read, and nobody ranked."""
        if not any(self.widths):
            return self
        plans = []
        for room, plan in zip(self.rooms, self.plans, strict=True):
            idle = np.tile(room.nobody(entries), (len(plan), 1))
            for part in (slice(LENGTH + 1), slice(LEFT_BEGIN, LEFT_END + 1)):
                idle[:, part] = plan[:, part]
            # Who was not ranked has what he reads from the first time.
            plans.append(idle)
        return ChosenStep(self.rooms, tuple(plans), (0,) * len(plans), (False,) * len(plans))

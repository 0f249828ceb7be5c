"""What the heads of a step choose of pages that lie in the host's memory, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvweave import ops
from kvweave.adapters.vllm.backend.step_tables import StepBatch
from kvweave.adapters.vllm.virtual_pages.far_memory import FarMemory
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout


@dataclass(frozen=True)
class HeadRun:
    """Heads of a layer whose pages lie side by side in a table's blocks, from `rank` on.

    `heads` i32 [n] on the device: their numbers in the layer.
    """

    table: int
    rank: int
    heads: torch.Tensor

    def on(self, device: torch.device) -> HeadRun:
        """The same, its heads' numbers on a device."""
        return replace(self, heads=self.heads.to(device))


def runs_of_layer(layout: PageLayout, layer: int, rank: int) -> list[HeadRun]:
    """The heads of a rank's layer that choose."""
    found: dict[int, list[tuple[int, int]]] = {}
    for head, (table, page, _, _) in enumerate(layout.head_rows(layer, rank).tolist()):
        if table in layout.choosing:
            found.setdefault(table, []).append((page, head))
    # A layer's heads of a class are given pages one after another.
    return [
        HeadRun(table, pages[0][0], torch.tensor([head for _, head in pages], dtype=torch.int32))
        for table, pages in found.items()
    ]


@dataclass
class FarChoice:
    """Keeps what the requests of a batch chose, and brings what of it lies at home.

    `runs`: of each layer in which some head chooses. Who a request is says the page that it writes.
    Where choices are paced, a request chooses anew when it begins a page: until the next one its
    newest pages are the same.
    """

    memory: FarMemory
    runs: Sequence[Sequence[HeadRun]]
    batch: StepBatch
    _seats: torch.Tensor = field(init=False)
    _again: torch.Tensor | None = field(init=False, default=None)

    def begin_step(self, chooses: torch.Tensor) -> torch.Tensor:
        """Finds the seats of the requests that choose, and which of these do so anew."""
        batch, memory = self.batch, self.memory
        layout = memory.memory.layout
        number = (batch.lengths - 1).clamp_min(0) // layout.page_tokens
        newest = batch.blocks.gather(1, number[:, None].long())[:, 0]
        seats = memory.seat_of.index_select(0, newest.long())
        self._seats = torch.where(chooses & (batch.lengths > 0), seats, memory.nobody)
        if not layout.paced:
            return chooses
        at = self._seats.long()
        goes_on = memory.chosen_at.index_select(0, at) == number
        self._again = chooses & goes_on & (self._seats != memory.nobody)
        memory.chosen_at.index_copy_(0, at, number.int())
        return chooses & ~self._again

    def kept(self, layer: int) -> ops.KeptPages | None:
        """As `top_k.choice.FarPages`."""
        if self._again is None:
            return None
        return ops.KeptPages(self.memory.chosen[layer], self._seats, self._again)

    def bring(
        self, layer: int, chosen: torch.Tensor, entries: torch.Tensor, workspace: ops.Workspace
    ) -> None:
        """As `top_k.choice.FarPages`."""
        paced = self._again is not None
        pages = self.memory.chosen[layer] if paced else chosen
        for run in self.runs[layer]:
            rows = ops.SeatedHeads(self._seats, run.heads, run.rank)
            room = self.memory.rooms[run.table]
            room.bring(rows, pages, entries, by_seat=paced, workspace=workspace)

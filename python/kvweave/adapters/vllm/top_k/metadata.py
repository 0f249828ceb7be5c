"""What the layers of a step read whose heads may choose pages: requests that decode, and others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionMetadata

from kvweave.adapters.vllm.backend.metadata import PagedMetadata, QkvObserver
from kvweave.adapters.vllm.backend.step_tables import StepBatch
from kvweave.adapters.vllm.top_k.choice import StepChoice


@dataclass
class ChoosingMetadata(AttentionMetadata):
    """Tables of one step of R rows, of which those of `deciding` requests come first.

    `slots` [R, 2]: where all rows are written. `deciding`: requests of one row, and what they
    choose among; `reading`: the others, which read all. `batch`: what vLLM said of the step;
    `observer` as `PagedMetadata` has it.
    """

    rows: int
    slots: torch.Tensor
    deciding: tuple[PagedMetadata, StepChoice] | None
    reading: PagedMetadata | None
    batch: StepBatch
    observer: QkvObserver | None = None
    arena: None = None
    filled: torch.Tensor | None = None

    def begin_step(self, page_tokens: int) -> None:
        """Does once for all layers what they do with slots and lengths, on the device.

        In a step that is captured it is captured with them: it is to be done whenever layers run.
        """
        if self.deciding is not None:
            self.deciding[1].begin_step()
        self.filled = filled_pages(self.slots, page_tokens)


def filled_pages(slots: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """The blocks whose last slot is among those of a step's rows i32 [R, 2], for `PageBounds`.

    i32 [N, 3]: on the host those alone, on a device a row for each, block −1 where it is not.
    """
    last = slots[:, 1] == page_tokens - 1
    filled = slots.new_zeros((len(slots), 3))
    filled[:, 0] = torch.where(last, slots[:, 0], -1)
    filled[:, 2] = page_tokens
    return filled[last] if filled.device.type == "cpu" else filled

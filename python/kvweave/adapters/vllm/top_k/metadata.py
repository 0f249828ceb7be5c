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
        last = self.slots[:, 1] == page_tokens - 1
        blocks = self.slots[:, 0]
        filled = self.slots.new_zeros((self.rows, 3))
        filled[:, 0] = torch.where(last, blocks, -1)
        filled[:, 2] = page_tokens
        # On the host all that is listed must be there.
        self.filled = filled[last] if filled.device.type == "cpu" else filled

"""Where the requests of a step lie: rows of the batch, and pages of vLLM."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvweave.adapters.vllm.backend.metadata import PagedMetadata


class Batch:
    """A step's B requests and R rows, some tables of it on the host: one transfer.

    `pages` [pages, 2, P, D] are any layer's.
    """

    def __init__(self, metadata: PagedMetadata, pages: torch.Tensor, kv_heads: int) -> None:
        self.metadata = metadata
        self.page_tokens = int(pages.shape[2])
        self.kv_heads = kv_heads
        offsets, entries = metadata.row_offsets, metadata.entries.offsets
        count = len(offsets) - 1
        firsts = metadata.slots.index_select(0, offsets[:count].long().clamp(max=metadata.rows - 1))
        flat = torch.cat([offsets, entries, firsts.flatten()]).cpu().numpy()
        self.row_offsets = flat[: count + 1].astype(np.int64)
        self.entry_offsets = flat[count + 1 : 2 * count + 2].astype(np.int64)
        block, slot = flat[2 * count + 2 :].reshape(count, 2).astype(np.int64).T
        self.first_slots = block // kv_heads * self.page_tokens + slot

    def find(self, first_slot: int) -> int | None:
        """The request whose first row is written to a slot of vLLM's numbering."""
        (found,) = np.nonzero(self.first_slots == first_slot)
        return int(found[0]) if len(found) else None

    def entries(self, request: int) -> torch.Tensor:
        """Entries [N, 5] of a request: one a block, all blocks from its first token on."""
        first, end = self.entry_offsets[request : request + 2]
        return self.metadata.entries.rows[int(first) : int(end)]

    def blocks(self, request: int) -> torch.Tensor:
        """The page of the first head, i32 [N], of each page of a request's tokens."""
        return self.entries(request)[:, 0]

    def narrowed(self, index: torch.Tensor, counts: list[int]) -> PagedMetadata:
        """Tables of some rows of the batch, `counts` of each request."""
        tables = self.metadata
        if len(index) == tables.rows:
            return tables
        offsets = torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32))
        return replace(
            tables,
            rows=len(index),
            decode=False,
            positions=tables.positions.index_select(0, index),
            slots=tables.slots.index_select(0, index),
            row_offsets=offsets.to(tables.row_offsets.device),
            runs=None,
        )

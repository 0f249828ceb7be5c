"""Where the requests of a step lie: rows of the batch, and pages of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import Entries, StepBatch
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers, HeadPart
from kvweave.adapters.vllm.top_k.metadata import ChoosingMetadata
from kvweave.device_memory import sent

Metadata = PagedMetadata | ChoosingMetadata


class ClassTables:
    """A step's tables of one class of heads, and where it keeps the tokens of requests."""

    def __init__(self, part: HeadPart, metadata: Metadata) -> None:
        assert metadata.batch is not None, "a step's tables come of what vLLM says of it"
        self.metadata = metadata
        self.batch: StepBatch = metadata.batch
        self.page_tokens, self.block_pages = part.page_tokens, part.block_pages
        self.span = part.attends.span
        self._blocks: dict[int, torch.Tensor] = {}
        self._entries: dict[tuple[int, int, int], Entries] = {}

    @property
    def deciding(self) -> int:
        """How many requests of one row, at the head of the batch, may choose what they read."""
        tables = self.metadata
        if isinstance(tables, PagedMetadata) or tables.deciding is None:
            return 0
        return tables.deciding[0].rows

    def blocks(self, request: int) -> torch.Tensor:
        """The page of the first head, i32 [N], of each page of a request's tokens.

        Of no use where a window has left the tokens of a page.
        """
        if request not in self._blocks:
            self._blocks[request] = self.batch.blocks[request] * self.block_pages
        return self._blocks[request]

    def entries(self, request: int, row: int, tokens: int) -> Entries:
        """Those of a request's first `tokens`, one a page: what rows from `row` on see."""
        key = request, row, tokens
        if key not in self._entries:
            self._entries[key] = self._listed(*key)
        return self._entries[key]

    def _listed(self, request: int, row: int, tokens: int) -> Entries:
        size, count = self.page_tokens, -(-tokens // self.page_tokens)
        seen = np.arange(count, dtype=np.int64)
        window, sink = self.span
        if window is not None:
            first = max(row - window + 1, 0) // size
            seen = seen[(seen < -(-sink // size)) | (seen >= first)]
        rows = np.zeros((len(seen), 5), np.int32)
        rows[:, 2], rows[:, 3] = np.minimum(tokens - seen * size, size), seen * size
        blocks = self.blocks(request)
        entries = sent(rows, blocks.device)
        entries[:, 0] = blocks.index_select(0, sent(seen, blocks.device))
        return Entries(entries, sent(np.array([0, len(rows)], np.int32), blocks.device))

    def narrowed(self, index: torch.Tensor, counts: list[int]) -> Metadata:
        """Tables of some rows of the batch, `counts` of each request.

        Of requests that may choose there are all or none.
        """
        tables = self.metadata
        if len(index) == tables.rows:
            return tables
        if isinstance(tables, PagedMetadata):
            return _narrowed(tables, index, counts)
        alone = self.deciding
        kept, reading = sum(counts[:alone]), None
        if tables.reading is not None and len(index) > kept:
            reading = _narrowed(tables.reading, index[kept:] - alone, counts[alone:])
        if reading is not None and not kept:
            return reading
        slots = tables.slots.index_select(0, index)
        deciding = tables.deciding if kept else None
        return ChoosingMetadata(len(index), slots, deciding, reading, self.batch)


class Batch:
    """A step's B requests and R rows, some tables of it on the host: one transfer.

    `classes`: the tables of each class of heads.
    """

    def __init__(self, layers: AttentionLayers, metadata: Mapping[str, Any]) -> None:
        self.classes = [ClassTables(part, metadata[part.name]) for part in layers.classes]
        batch = self.classes[0].batch
        self.rows = batch.rows
        first = batch.row_offsets[:-1].long().clamp(max=batch.rows - 1)
        offsets, slots = batch.row_offsets.long(), batch.slot_mapping.index_select(0, first)
        flat: npt.NDArray[np.int64] = torch.cat((offsets, slots)).cpu().numpy()
        self.row_offsets, self.first_slots = np.split(flat, [len(offsets)])

    def find(self, first_slot: int) -> int | None:
        """The request whose first row is written to a slot of vLLM's numbering."""
        (found,) = np.nonzero(self.first_slots == first_slot)
        return int(found[0]) if len(found) else None

    def may_choose(self, request: int) -> bool:
        """Whether a request of one row is among those that may choose what they read."""
        return request < self.classes[0].deciding

    def entries(self, request: int, row: int, tokens: int) -> list[Entries]:
        """Entries of a request in each class, see `ClassTables`."""
        return [tables.entries(request, row, tokens) for tables in self.classes]

    def narrowed(self, index: torch.Tensor, counts: list[int]) -> list[Metadata]:
        """Tables of some rows in each class, see `ClassTables`."""
        return [tables.narrowed(index, counts) for tables in self.classes]


def _narrowed(tables: PagedMetadata, index: torch.Tensor, counts: list[int]) -> PagedMetadata:
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    return replace(
        tables,
        rows=len(index),
        decode=False,
        positions=tables.positions.index_select(0, index),
        slots=tables.slots.index_select(0, index),
        row_offsets=sent(offsets, tables.row_offsets.device),
        runs=None,
    )

"""Once a step: the tables of virtual pages that all layers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from kvweave import ops
from kvweave.adapters.vllm.backend.attention_span import AttentionSpan
from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import (
    Entries,
    KeptTables,
    StepBatch,
    StepLayout,
)
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory


@dataclass(kw_only=True)
class VirtualMetadata(PagedMetadata):
    """Tables of one step, slots [tables, R, 2]; without numbers until the first layer runs.

    The changes of a step reach a worker after its metadata is built, so only then is it known
    where pages lie. Where a decode step is captured, looking them up is part of what is captured:
    vLLM's tables and those of places keep their addresses.
    """

    layout: StepLayout
    batch: StepBatch
    columns: list[int]
    looked_up: bool = False

    def look_up(self, memory: PageMemory) -> None:
        """Finds the blocks, the changes of the step having come."""
        if self.looked_up:
            return
        room = ops.StepTables(self.positions, self.slots, *self.entries)
        tables = self.layout.fill(room, self.batch, self.columns, memory.tables)
        self.entries = Entries.of(tables)
        self.looked_up = True


class VirtualMetadataBuilder(AttentionMetadataBuilder[VirtualMetadata]):
    """Makes `VirtualMetadata` of vLLM's own description of a batch."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = None

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        more_entries: int = 0,
    ) -> None:
        """`more_entries`: room behind those of the requests of captured steps."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layout = kv_cache_spec.layout
        spans = [layout.spans[number] for number in layout.tables]
        # Bounds are of all pages.
        spans += [AttentionSpan()] * (layout.step_tables - len(spans))
        self.layout = StepLayout(layout.page_tokens, spans, virtual=True)
        self.workspace = ops.Workspace(device)
        self.kept = KeptTables.of_engine(self.layout, device, vllm_config, more_entries)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> VirtualMetadata:
        """Room for the tables of a step; nothing on the device is waited for."""
        return self.tables_of(StepBatch.of(common_attn_metadata))

    def tables_of(self, batch: StepBatch, more: int = 0) -> VirtualMetadata:
        """Room for the tables of a batch, or of some of its requests, and `more` entries behind.

        Of one decode step at a time: there, what is behind is kept too.
        """
        if batch.decode and self.kept is not None:
            columns, room = self.kept.columns, self.kept.room_of(batch.requests)
        else:
            columns = self.layout.columns(batch.longest, batch.most_rows)
            room = self.layout.room(self.device, batch.requests, batch.rows, columns, more)
        return VirtualMetadata(
            batch.rows,
            batch.decode,
            room.positions,
            batch.row_offsets,
            room.slots,
            Entries(room.entries, room.offsets),
            self.workspace,
            layout=self.layout,
            batch=batch,
            columns=columns,
        )

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
from kvweave.adapters.vllm.builder import PagedMetadata
from kvweave.adapters.vllm.tables import Entries, positions_of
from kvweave.adapters.vllm.virtual_pages.memory import PageMemory
from kvweave.adapters.vllm.virtual_pages.tables import entries_of, look_up, look_up_slots, slots_of


@dataclass
class VirtualMetadata(PagedMetadata):
    """Tables of one step, slots [tables, R, 2]; by flat place until the first layer runs."""

    looked_up: bool = False

    def look_up(self, memory: PageMemory) -> None:
        """Finds the blocks, the changes of the step having come."""
        if self.looked_up:
            return
        rows = look_up(self.entries.rows, memory.tables)
        self.entries = Entries(rows, self.entries.offsets)
        self.slots = look_up_slots(self.slots, memory.tables)
        self.looked_up = True


class VirtualMetadataBuilder(AttentionMetadataBuilder[VirtualMetadata]):
    """Makes `VirtualMetadata` of vLLM's own description of a batch."""

    # Looking up belongs to a step, not to what is captured once for many.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layout = kv_cache_spec.layout
        self.workspace = ops.Workspace(device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> VirtualMetadata:
        """Tables of a step; nothing on the device is waited for."""
        batch = common_attn_metadata
        decode = batch.max_query_len == 1
        rows = batch.num_reqs if decode else int(batch.query_start_loc_cpu[batch.num_reqs])
        row_offsets = batch.query_start_loc[: batch.num_reqs + 1]
        lengths = batch.seq_lens[: batch.num_reqs]
        pages = int(self.vllm_config.cache_config.num_gpu_blocks)
        entries = entries_of(
            self.layout,
            batch.block_table_tensor[: batch.num_reqs],
            lengths,
            lengths - row_offsets.diff(),
            virtual_pages=pages,
            longest=batch.max_seq_len,
            most_rows=batch.max_query_len,
        )
        if self.device.type == "cpu":
            entries = Entries(entries.rows[: int(entries.offsets[-1])], entries.offsets)
        positions = positions_of(row_offsets, lengths, rows)
        slots = slots_of(self.layout, batch.slot_mapping[:rows], virtual_pages=pages)
        return VirtualMetadata(rows, decode, positions, row_offsets, slots, entries, self.workspace)

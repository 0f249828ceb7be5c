"""Once a step: the tables that all layers read, and what requests that decode choose among."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from kvweave.adapters.vllm.backend.builder import PagedMetadataBuilder
from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import StepBatch
from kvweave.adapters.vllm.top_k.choice import RankedHeads, StepChoice
from kvweave.adapters.vllm.top_k.metadata import ChoosingMetadata
from kvweave.adapters.vllm.top_k.single_rows import SingleRows, split


class ChoosingMetadataBuilder(AttentionMetadataBuilder[ChoosingMetadata]):
    """Makes `ChoosingMetadata` of vLLM's own description of a batch."""

    _cudagraph_support: ClassVar[Any] = PagedMetadataBuilder._cudagraph_support
    # vLLM then has requests of one row before the others.
    reorder_batch_threshold: int | None = 1
    # What makes the tables of a batch, with room for choices behind them.
    _tables: ClassVar[Any] = PagedMetadataBuilder

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        known = vllm_config.compilation_config.static_forward_context
        requests = vllm_config.scheduler_config.max_num_seqs
        self.singles = SingleRows(device, requests)
        self.heads = self._ranked_heads([known[name] for name in layer_names], requests)
        more = self.heads.room(requests)
        self.plain: Any = self._tables(kv_cache_spec, layer_names, vllm_config, device, more)

    def _ranked_heads(self, layers: list[Any], requests: int) -> RankedHeads:
        """The heads of these layers that choose, for up to so many requests."""
        return RankedHeads(layers[0].budgets, self.device, requests)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ChoosingMetadata:
        """Tables of a step; nothing on the device is waited for."""
        common, batch = common_attn_metadata, StepBatch.of(common_attn_metadata)
        single, others = split(batch, common.query_start_loc_cpu, common.is_prefilling)
        deciding = None if single is None else self._deciding(single, common.is_prefilling)
        reading = None if others is None else self.plain.tables_of(others)
        return self._made(batch, deciding, reading)

    def _made(
        self,
        batch: StepBatch,
        deciding: tuple[PagedMetadata, StepChoice] | None,
        reading: PagedMetadata | None,
    ) -> ChoosingMetadata:
        """What the layers read, of both parts of a batch."""
        slots = [] if deciding is None else [deciding[0].slots]
        slots += [] if reading is None else [reading.slots]
        whole = slots[0] if len(slots) == 1 else torch.cat(slots)
        return ChoosingMetadata(batch.rows, whole, deciding, reading, batch)

    def _deciding(
        self, batch: StepBatch, prefilling: torch.Tensor | None
    ) -> tuple[PagedMetadata, StepChoice]:
        """The tables of requests of one row, and what they choose among."""
        tables = self.plain.tables_of(batch)
        chooses = self.singles.deciding(batch.requests, prefilling)
        return tables, self._choice(batch, tables, chooses)

    def _choice(self, batch: StepBatch, tables: PagedMetadata, chooses: torch.Tensor) -> StepChoice:
        kept, rows = self.plain.kept, tables.entries.rows
        if kept is not None:
            offsets, width = tables.entries.offsets, kept.columns[0]
            return StepChoice(self.heads, kept.entries, offsets, kept.room, chooses, width)
        (width,) = self.plain.layout.columns(batch.longest, 1)
        room = rows.new_empty((self.heads.room(batch.requests), 5))
        entries = torch.cat((rows, room))
        return StepChoice(self.heads, entries, tables.entries.offsets, len(rows), chooses, width)

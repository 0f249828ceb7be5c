"""Once a step and cache group: the tables that all layers of the group read."""

from __future__ import annotations

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
from kvweave.adapters.vllm.backend.cache_specs import attention_span_of
from kvweave.adapters.vllm.backend.dense_prefill import DensePrefill, Runs
from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import Entries, KeptTables, StepBatch, StepLayout
from kvweave.adapters.vllm.start_line import log_start


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Makes `PagedMetadata` of vLLM's own description of a batch.

    On a GPU decode steps may be captured: their tables keep their addresses, and only numbers
    change between replays.
    """

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
        # Models of ours have said it before; once a process it is said.
        log_start(vllm_config)
        span = attention_span_of(kv_cache_spec)
        page_tokens, heads = int(kv_cache_spec.block_size), int(kv_cache_spec.num_kv_heads)
        self.layout = StepLayout(page_tokens, (span,), block_pages=heads)
        self.workspace = ops.Workspace(device)
        self.kept = KeptTables.of_engine(self.layout, device, vllm_config, more_entries)
        head_size, dtype = int(kv_cache_spec.head_size), vllm_config.model_config.dtype
        self.dense = span == AttentionSpan() and DensePrefill.is_there(head_size, dtype)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedMetadata:
        """Tables of a step; nothing on the device is waited for."""
        return self.tables_of(StepBatch.of(common_attn_metadata))

    def tables_of(self, batch: StepBatch) -> PagedMetadata:
        """Tables of a batch, or of some of its requests; of one decode step at a time."""
        kept = self.kept
        # With chunked local attention two rows on both sides of a chunk's edge are two requests, so
        # there may be more of them than an engine has.
        if batch.decode and kept is not None and batch.requests <= kept.requests:
            tables = kept.fill(batch)
        else:
            columns = self.layout.columns(batch.longest, batch.most_rows)
            room = self.layout.room(self.device, batch.requests, batch.rows, columns)
            tables = self.layout.fill(room, batch, columns)
        metadata = PagedMetadata(
            batch.rows,
            batch.decode,
            tables.positions,
            batch.row_offsets,
            tables.slots,
            Entries.of(tables),
            self.workspace,
            batch=batch,
        )
        if self.dense and not batch.decode:
            metadata.runs = Runs(batch.blocks, batch.lengths, batch.most_rows, batch.longest)
        return metadata

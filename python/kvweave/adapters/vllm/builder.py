"""Once a step and cache group: the tables that all layers of the group read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from kvweave import ops
from kvweave.adapters.vllm import specs
from kvweave.adapters.vllm.dense_prefill import DensePrefill, Runs
from kvweave.adapters.vllm.tables import Entries, KeptTables, Span, StepBatch, StepLayout


@dataclass
class PagedMetadata(AttentionMetadata):
    """Tables of one step: B requests, R rows (tokens that are computed), as `kvweave.ops` has them.

    `decode`: every request has one row. Rows of the batch beyond R are padding. `tap`, if any,
    is given the queries [R, H, D], keys and values [R, G, D] of a layer before they are written,
    and may say that only some of the rows are. `writes`: whether they are written, or are there
    already. `arena`: the pages of all layers, where KV is not in the tensors that vLLM allocated.
    `runs`: the same once more for a dense kernel, where rows are runs that see every key and such a
    kernel is there.
    """

    rows: int
    decode: bool
    positions: torch.Tensor
    row_offsets: torch.Tensor
    slots: torch.Tensor
    entries: Entries
    workspace: ops.Workspace
    tap: Tap | None = None
    writes: bool = True
    arena: torch.Tensor | None = None
    runs: Runs | None = None


@dataclass
class Fewer:
    """Rows of a step that are written and attend, i64 `index`, with the tables of these alone."""

    index: torch.Tensor
    metadata: PagedMetadata


Tap: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Fewer | None]


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
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        span = specs.span_of(kv_cache_spec)
        page_tokens, heads = int(kv_cache_spec.block_size), int(kv_cache_spec.num_kv_heads)
        self.layout = StepLayout(page_tokens, (span,), block_pages=heads)
        self.workspace = ops.Workspace(device)
        self._kept: KeptTables | None = None
        if device.type != "cpu":
            self._kept = KeptTables(
                self.layout,
                device,
                requests=vllm_config.scheduler_config.max_num_seqs,
                longest=vllm_config.model_config.max_model_len,
            )
        head_size, dtype = int(kv_cache_spec.head_size), vllm_config.model_config.dtype
        self.dense = span == Span() and DensePrefill.is_there(head_size, dtype)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedMetadata:
        """Tables of a step; nothing on the device is waited for."""
        batch = StepBatch.of(common_attn_metadata)
        if batch.decode and self._kept is not None:
            tables = self._kept.fill(batch)
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
        )
        if self.dense and not batch.decode:
            metadata.runs = Runs(batch.blocks, batch.lengths, batch.most_rows, batch.longest)
        return metadata

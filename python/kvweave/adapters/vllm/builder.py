"""Once a step and cache group: the tables that all layers of the group read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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
from kvweave.adapters.vllm.tables import Entries, Span, entries_of, positions_of, slots_of


@dataclass
class PagedMetadata(AttentionMetadata):
    """Tables of one step: B requests, R rows (tokens that are computed), as `kvweave.ops` has them.

    `decode`: every request has one row. Rows of the batch beyond R are padding. `tap`, if any,
    is given the queries [R, H, D] of a layer. `arena`: the pages of all layers, where KV is not
    in the tensors that vLLM allocated. `runs`: the same once more for a dense kernel, where rows
    are runs that see every key and such a kernel is there.
    """

    rows: int
    decode: bool
    positions: torch.Tensor
    row_offsets: torch.Tensor
    slots: torch.Tensor
    entries: Entries
    workspace: ops.Workspace
    tap: list[torch.Tensor] | None = None
    arena: torch.Tensor | None = None
    runs: Runs | None = None


class _Kept:
    """Tables at addresses that do not change, for graphs that were captured with them."""

    def __init__(self, device: torch.device, **shapes: tuple[int, ...]) -> None:
        self._tables = {
            name: torch.zeros(shape, dtype=torch.int32, device=device)
            for name, shape in shapes.items()
        }

    def put(self, name: str, table: torch.Tensor) -> torch.Tensor:
        """The kept table's first rows, now with these numbers."""
        return self._tables[name][: len(table)].copy_(table)


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
        self.span = specs.span_of(kv_cache_spec)
        self.page_tokens = int(kv_cache_spec.block_size)
        self.heads = int(kv_cache_spec.num_kv_heads)
        self.workspace = ops.Workspace(device)
        self._kept = None if device.type == "cpu" else self._kept_tables(vllm_config, device)
        head_size, dtype = int(kv_cache_spec.head_size), vllm_config.model_config.dtype
        self.dense = self.span == Span() and DensePrefill.is_there(head_size, dtype)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedMetadata:
        """Tables of a step; nothing on the device is waited for."""
        batch = common_attn_metadata
        decode = batch.max_query_len == 1
        rows = batch.num_reqs if decode else int(batch.query_start_loc_cpu[batch.num_reqs])
        row_offsets = batch.query_start_loc[: batch.num_reqs + 1]
        lengths = batch.seq_lens[: batch.num_reqs]
        longest = batch.max_seq_len
        if decode and self._kept is not None:
            # The number of columns is part of what is captured.
            longest = self.vllm_config.model_config.max_model_len
        entries = entries_of(
            batch.block_table_tensor[: batch.num_reqs],
            lengths,
            lengths - row_offsets.diff(),
            page_tokens=self.page_tokens,
            heads=self.heads,
            columns=self.span.columns(self.page_tokens, longest, batch.max_query_len),
            span=self.span,
        )
        positions = positions_of(row_offsets, lengths, rows)
        slots = slots_of(batch.slot_mapping[:rows], self.page_tokens, self.heads)
        if self._kept is None:
            # On the host tables are as long as they say.
            entries = Entries(entries.rows[: int(entries.offsets[-1])], entries.offsets)
        elif decode:
            put = self._kept.put
            positions, slots = put("positions", positions), put("slots", slots)
            rows_of, offsets = put("entries", entries.rows), put("offsets", entries.offsets)
            entries = Entries(rows_of, offsets)
        tables = PagedMetadata(rows, decode, positions, row_offsets, slots, entries, self.workspace)
        if self.dense and not decode:
            blocks = batch.block_table_tensor[: batch.num_reqs]
            tables.runs = Runs(blocks, lengths, batch.max_query_len, batch.max_seq_len)
        return tables

    def _kept_tables(self, config: VllmConfig, device: torch.device) -> _Kept:
        requests = config.scheduler_config.max_num_seqs
        columns = self.span.columns(self.page_tokens, config.model_config.max_model_len, 1)
        return _Kept(
            device,
            positions=(requests,),
            slots=(requests, 2),
            entries=(requests * columns, 5),
            offsets=(requests + 1,),
        )

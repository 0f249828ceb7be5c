"""Attention of a layer on vLLM's own KV tensors, through the ragged ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from kvweave import ops
from kvweave.adapters.vllm.backend.attention_span import AttentionSpan
from kvweave.adapters.vllm.backend.decoder_layers import layer_number
from kvweave.adapters.vllm.backend.dense_prefill import DensePrefill
from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import first
from kvweave.adapters.vllm.require import require


class PagedAttention(AttentionImpl[PagedMetadata]):
    """H query heads over G KV heads of size D; with a window, the first `sink` keys are seen too.

    `sinks` [H]: of each query head the logit of a key that has no value (GPT-OSS), which takes its
    share of every row.

    Errors: `Unsupported` for what the ops have no form of: attention that is not a decoder's,
    ALiBi, KV that is stored in another dtype, context parallelism.
    """

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sink: int = 0,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        require("attention", attn_type == AttentionType.DECODER, "a decoder's", attn_type)
        require("alibi_slopes", alibi_slopes is None, "none", "some")
        dtypes = ("auto", "float16", "bfloat16")
        require("kv_cache_dtype", kv_cache_dtype in dtypes, "auto", kv_cache_dtype)
        given = sorted(name for name, value in others.items() if value is not None)
        require("arguments of attention", not given, "none besides", ", ".join(given))
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.span = AttentionSpan(sliding_window, sink if sliding_window is not None else 0)
        self.window: int | None = sliding_window
        self.reach: ops.Reach | None = None
        if sliding_window is not None and sink:
            self.see([(sliding_window, sink)] * self.num_kv_heads)
        # Where heads write, if not each to its own page of a block.
        self.written: ops.Reach | None = None
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None
        self.sinks = sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # Which of a block's pages are theirs, and which of the heads of their layer these are.
        self.first_page, self.first_head, self.layer_heads = 0, 0, self.num_kv_heads
        self.dense = DensePrefill(self.scale, self.softcap, self.num_kv_heads)
        # No key of vLLM moves from where it was rotated: frequencies are never read.
        self.rope = ops.RopeTable(np.zeros((1, head_size // 2), np.float32))

    def see(self, windows: Sequence[tuple[int, int]]) -> None:
        """Has each head see the latest tokens and the first of its own, of what is listed."""
        seen = [[0, head, *window] for head, window in enumerate(windows)]
        self.window, self.reach = None, ops.Reach(1, np.array(seen, np.int32))

    def own_pages_of(
        self, block_pages: int, first_page: int, *, first_head: int, layer_heads: int
    ) -> None:
        """Has some of a layer's heads lie in blocks that they share with other layers' heads.

        A block has `block_pages` pages, and these heads are behind `first_page` of them; among the
        `layer_heads` of their layer they are behind `first_head`. To vLLM that is sharing keys and
        values, which here nobody does.
        """
        self.kv_sharing_target_layer_name = None
        self.first_page, self.dense.block_pages = first_page, block_pages
        self.first_head, self.layer_heads = first_head, layer_heads

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes new keys and values, then attends: query [R, H, D], key and value [R, G, D].

        kv_cache [blocks, G, P, 2·D], what vLLM allocated, unless the metadata names an arena;
        where layers share blocks G are all of theirs.
        Without metadata (memory is being profiled) the output is zero.
        """
        scaled = output_scale is not None or output_block_scale is not None
        require("output", not scaled, "no quantization", "a scale")
        if attn_metadata is None:
            return output.zero_()
        tables, rows = attn_metadata, attn_metadata.rows
        pages = self.pages_of_step(layer, kv_cache, tables)
        q, out = first(query, rows), first(output, rows)
        k, v = key, value
        if self.kv_sharing_target_layer_name is None:
            k, v = first(key, rows), first(value, rows)
        subset = None if tables.observer is None else tables.observer(q, k, v)
        if subset is None:
            self._attend(layer, q, k, v, pages, tables, out)
            return output
        q, k, v, some = (x.index_select(0, subset.index) for x in (q, k, v, out))
        self._attend(layer, q, k, v, pages, subset.metadata[layer.layer_name], some)
        out.zero_().index_copy_(0, subset.index, some)
        return output

    def _attend(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: torch.Tensor,
        tables: PagedMetadata,
        out: torch.Tensor,
    ) -> None:
        """Writes keys and values [R, G, D] of a step's rows and attends into [R, H, D]."""
        if self.kv_sharing_target_layer_name is None and tables.writes:
            ops.write_pages(pages, 0, k, v, tables.slots, reach=self.written)
        self.read(q, pages, tables, out)

    def read(
        self, q: torch.Tensor, pages: torch.Tensor, tables: PagedMetadata, out: torch.Tensor
    ) -> None:
        """Attends queries [R, H, D] to what is written, into [R, H, D]."""
        # A layer with a window may share its tables with others that have none.
        sees_all = self.window is None and self.reach is None and self.sinks is None
        if tables.runs is not None and sees_all:
            self.dense.attend(q, pages, tables.row_offsets, tables.runs, out)
            return
        attend: Any = ops.attend_decode
        split = {}
        if not tables.decode:
            attend, split = ops.attend_prefill, {"row_offsets": tables.row_offsets}
        _, lse = attend(
            q,
            tables.positions,
            tables.entries.rows,
            self.paged(pages),
            entry_offsets=tables.entries.offsets,
            out=out,
            workspace=tables.workspace,
            **split,
        )
        if self.sinks is not None:
            # Of exp(lse) + exp(sink) the sink's share goes to no value. What is left stays in f32,
            # so that the product is rounded and not its factor too.
            out.mul_(torch.sigmoid(lse - self.sinks.float())[..., None])

    def paged(self, pages: torch.Tensor) -> ops.PagedKv:
        """A layer's pages, as its heads read them."""
        return ops.PagedKv(
            pages,
            0,
            self.num_kv_heads,
            self.scale,
            self.rope,
            self.window,
            self.softcap,
            self.reach,
        )

    def paged_head(self, pages: torch.Tensor, head: int) -> ops.PagedKv:
        """One head's pages, as it reads them."""
        paged = self.paged(pages)
        reach = self.reach
        if reach is not None:
            rows = reach.heads[head : head + 1].copy()
            rows[:, 1] = 0
            reach = ops.Reach(reach.tables, rows)
        # Seen from its first page, a head is the first.
        return replace(paged, cache=pages[head:], kv_heads=1, reach=reach)

    def pages_of_step(
        self, layer: Any, kv_cache: torch.Tensor, tables: PagedMetadata
    ) -> torch.Tensor:
        """The pages that a step's tables number, from those of this layer on."""
        if tables.arena is None:
            return pages_of(kv_cache)[self.first_page :]
        # Blocks of the arena hold all layers; seen from here, this one's pages come first.
        number = layer_number(layer)
        return tables.arena[number * self.layer_heads + self.first_head :]


def pages_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """A layer's tensor of vLLM, [blocks, G, P, 2·D], as our pages [blocks · G, 2, P, D].

    Only we read and write it, so within the P · 2·D elements of a head, K comes first, then V.
    """
    if kv_cache.dim() != 4 or not kv_cache.is_contiguous():
        got = f"shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()}"
        require("kv_cache", False, "a contiguous tensor [blocks, G, P, 2·D]", got)
    _, _, page_tokens, width = kv_cache.shape
    return kv_cache.view(-1, 2, page_tokens, width // 2)

"""Attention of a layer through virtual pages."""

from __future__ import annotations

from typing import Any

import torch

from kvweave import ops
from kvweave.adapters.vllm.backend.attention import PagedAttention
from kvweave.adapters.vllm.virtual_pages.builder import VirtualMetadata


class VirtualAttention(PagedAttention):
    """Heads with tables, pages and windows of their own: `reach` says which.

    The layer has `memory`, a `PageMemory`, once vLLM has allocated it.
    """

    def __init__(self, *given: Any, reach: ops.Reach, **named: Any) -> None:
        super().__init__(*given, **named)
        self.reach = self.written = reach

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: VirtualMetadata | None,
        *others: Any,
        **named: Any,
    ) -> torch.Tensor:
        """As `PagedAttention.forward`; zero, too, while there is no memory but what is profiled."""
        metadata = None if layer.memory is None else attn_metadata
        return super().forward(layer, query, key, value, kv_cache, metadata, *others, **named)

    def pages_of_step(
        self, layer: Any, kv_cache: torch.Tensor, tables: VirtualMetadata
    ) -> torch.Tensor:
        """The arena of all layers; the step's tables now name its blocks."""
        tables.look_up(layer.memory)
        arena: torch.Tensor = layer.memory.arena
        return arena

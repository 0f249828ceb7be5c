"""Attention of a layer through virtual pages whose heads choose pages in decode steps."""

from __future__ import annotations

from typing import Any

import torch

from kvweave import ops
from kvweave.adapters.vllm.top_k.attention import ChoosingAttention
from kvweave.adapters.vllm.virtual_pages.attention import VirtualAttention
from kvweave.adapters.vllm.virtual_pages.choosing_builder import VirtualChoosingMetadata


class VirtualChoosingAttention(VirtualAttention, ChoosingAttention):
    """Rows of requests that decode read chosen pages, wherever these lie; all others read all."""

    def pages_of_step(
        self, layer: Any, kv_cache: torch.Tensor, tables: VirtualChoosingMetadata
    ) -> torch.Tensor:
        """The arena of all layers; the step's tables now name its blocks."""
        tables.look_up(layer.memory, layer.far)
        arena: torch.Tensor = layer.memory.arena
        return arena

    def _bounds_of(self, layer: Any) -> torch.Tensor:
        """The bounds of all virtual pages and layers."""
        bounds: torch.Tensor = layer.memory.bounds
        return bounds

    def _bound_filled(
        self, layer: Any, pages: torch.Tensor, tables: VirtualChoosingMetadata
    ) -> None:
        """Writes the bounds of the layer's pages of virtual pages that have been filled."""
        memory, every = layer.memory, self._bounds_of(layer)
        for run in layer.runs:
            rows = every[memory.layout.bound_row(run.table) + run.rank :]
            bounds = ops.PageBounds(rows, tables.filled_of[run.table], tables.bound_rows)
            ops.bound_pages(pages[run.rank :], bounds, pages=len(run.heads))

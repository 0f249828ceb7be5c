"""Attention of a layer whose heads choose pages in decode steps."""

from __future__ import annotations

from typing import Any

import torch

from kvweave import ops
from kvweave.adapters.vllm.backend.attention import PagedAttention
from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.top_k.metadata import ChoosingMetadata


class ChoosingAttention(PagedAttention):
    """Rows of requests that decode read chosen pages, all others read all.

    The layer has `ranked`, its number among those in which some head chooses, and then `bounds`, a
    `BoundsCache`; None in a layer whose heads read all.
    """

    def _attend(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: torch.Tensor,
        tables: ChoosingMetadata | PagedMetadata,
        out: torch.Tensor,
    ) -> None:
        """As `PagedAttention`; bounds of pages that fill up are written too.

        Under plain tables nobody decodes, and who filled pages has them bounded afterwards.
        """
        if isinstance(tables, PagedMetadata):
            super()._attend(layer, q, k, v, pages, tables, out)
            return
        # A request may find blocks that another one fills in this very step: all is written first.
        ops.write_pages(pages, 0, k, v, tables.slots, reach=self.written)
        if layer.ranked is not None:
            self._bound(layer, pages, tables)
        count = 0
        if tables.deciding is not None:
            one, _ = tables.deciding
            count = one.rows
            if layer.ranked is None:
                self.read(q[:count], pages, one, out[:count])
            else:
                self._read_chosen(layer, q[:count], pages, tables, out[:count])
        if tables.reading is not None:
            self.read(q[count:], pages, tables.reading, out[count:])

    def _bound(self, layer: Any, pages: torch.Tensor, tables: ChoosingMetadata) -> None:
        """Writes the bounds of pages whose last slot has been written."""
        if layer.ranked == 0 or tables.filled is None:
            tables.begin_step(pages.shape[2])
        self._bound_filled(layer, pages, tables)

    def _bound_filled(self, layer: Any, pages: torch.Tensor, tables: ChoosingMetadata) -> None:
        """Writes the bounds of the layer's pages of blocks that are `tables.filled`."""
        assert tables.filled is not None
        bounds = ops.PageBounds(self._bounds_of(layer), tables.filled)
        ops.bound_pages(pages, bounds, pages=self.num_kv_heads)

    def _bounds_of(self, layer: Any) -> torch.Tensor:
        """The bounds of all pages that the layer's heads choose among."""
        bounds: torch.Tensor = layer.bounds.values()
        return bounds

    def _read_chosen(
        self,
        layer: Any,
        q: torch.Tensor,
        pages: torch.Tensor,
        tables: ChoosingMetadata,
        out: torch.Tensor,
    ) -> None:
        assert tables.deciding is not None
        one, choice = tables.deciding
        paged = self.paged(pages)
        offsets = choice.rank(layer.ranked, q, self._bounds_of(layer), paged, one.workspace)
        ops.attend_decode(
            q,
            one.positions,
            choice.entries,
            choice.read_by(layer.ranked, paged),
            entry_offsets=offsets,
            out=out,
            workspace=one.workspace,
        )

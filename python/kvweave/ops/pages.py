"""Ops that write pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave import _native
from kvweave._native import RopeTable
from kvweave.ops.dispatch import (
    Backend,
    Pages,
    Table,
    cuda_device,
    on_device,
    refuse_gradients,
    stream_of,
)


@dataclass(frozen=True)
class PageBounds:
    """Least, greatest and mean key of pages, which decode steps choose pages by.

    `values` f32 [pages, 3, D], contiguous: a row for each page of the cache (FlexiCache scores
    pages by min and max, MosaicKV by the mean, section 5.1). `held` i32 [N, 3], rows (block,
    begin, end): slots [begin, end) of the block hold tokens after the call. The bounds of these
    blocks' pages in the layer are computed anew from what then lies in these slots; others stay as
    they are. So a page filled over several calls, or written again, is right whenever it is named.
    Every block at most once, never the null block, at least one slot. NaN in an element of any of
    the keys makes its bounds NaN.
    """

    values: torch.Tensor
    held: Table


def write_pages(
    cache: Pages,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: Table,
    *,
    bounds: PageBounds | None = None,
    backend: Backend = None,
) -> None:
    """Scatters new keys and values of one layer into pages, and updates bounds of pages.

    k, v [R, G, D], of the cache's dtype; rows and heads may be strided. slots i32 [R, 2], all
    different, never the null block.
    """
    refuse_gradients(k, v)
    device = cuda_device("cache", cache, backend)
    if device is None:
        named = None if bounds is None else (bounds.values, bounds.held)
        _native.write_pages(cache, layer, k, v, slots, named, backend == "reference")
        return
    held = {} if bounds is None else {"held": bounds.held}
    tables = on_device(device, slots=slots, **held)
    there = None if bounds is None else (bounds.values, tables["held"])
    _native.write_pages_cuda(cache, layer, k, v, tables["slots"], there, stream_of(device))


def copy_rerotate(
    cache: Pages, copies: Table, rope: RopeTable, *, kv_heads: int, backend: Backend = None
) -> None:
    """Copies tokens of every layer and head between blocks: K rotated by delta, V as it is.

    copies i32 [C, 6]; no block is both read and written, no slot written twice. `rope` has the
    inverse frequencies of all L layers. Moving a key by delta positions turns pair i by
    `delta · inv_freq[i]` (Δ-RoPE: SparseX, section 3); delta 0 copies bits.

    On CUDA one launch does all layers.
    """
    device = cuda_device("cache", cache, backend)
    if device is None:
        _native.copy_rerotate(cache, copies, rope, kv_heads, backend == "reference")
        return
    tables = on_device(device, copies=copies)
    _native.copy_rerotate_cuda(cache, tables["copies"], rope, kv_heads, stream_of(device))

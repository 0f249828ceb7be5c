"""Ops that write pages."""

from __future__ import annotations

import torch

from kvweave import _native
from kvweave._native import RopeTable
from kvweave.ops.dispatch import (
    Backend,
    Pages,
    Table,
    cuda_device,
    on_device,
    refuse_cuda,
    refuse_gradients,
    stream_of,
)


def write_pages(
    cache: Pages,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: Table,
    *,
    backend: Backend = None,
) -> None:
    """Scatters new keys and values of one layer into pages.

    k, v [R, G, D], of the cache's dtype; rows and heads may be strided. slots i32 [R, 2], all
    different, never the null block.
    """
    refuse_gradients(k, v)
    refuse_cuda("write_pages", "cache", cache, backend)
    _native.write_pages(cache, layer, k, v, slots, backend == "reference")


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

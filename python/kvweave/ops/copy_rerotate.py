"""Tokens copied to other places, their keys rotated."""

from __future__ import annotations

from kvweave import _native
from kvweave._native import RopeTable
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Backend, Pages, Table, cuda_device, on_device, stream_of


@needs_memory("copy_rerotate")
def copy_rerotate(
    cache: Pages,
    copies: Table,
    rope: RopeTable,
    *,
    kv_heads: int,
    layers: Table | None = None,
    source: Pages | None = None,
    backend: Backend = None,
) -> None:
    """Copies tokens of all pages of blocks to others: K rotated by delta, V as it is.

    copies i32 [C, 6]; no slot is written twice. Blocks are read in the cache itself, where none is
    both read and written, or in `source`: another arena [pages, 2, P', D] of its dtype and device
    and apart from it, whose pages may be of another size. `rope` has the inverse frequencies of all
    L layers. Moving a key by delta positions turns pair i by `delta · inv_freq[i]` (Δ-RoPE:
    SparseX, section 3); delta 0 copies bits.

    A block has L · kv_heads pages, layer by layer, or, with `layers` i32 [pages], those of a head
    group: page r has the keys of layer `layers[r]`, which occurs at most `kv_heads` times.

    In a float8_e4m3fn cache a rotated key is rounded to e4m3 once more: a relative error of up to
    2^-4 an element, and ±448 where the turn takes an element beyond. Scales do not matter here.
    Reading in place (`share`) rounds nothing.

    On CUDA one launch does all layers.
    """
    device = cuda_device("cache", cache, backend)
    if device is None:
        _native.copy_rerotate(cache, source, copies, rope, kv_heads, layers, backend == "reference")
        return
    of_pages = {} if layers is None else {"layers": layers}
    there = on_device(device, copies=copies, **of_pages)
    given = (cache, source, there["copies"], rope, kv_heads, there.get("layers"))
    _native.copy_rerotate_cuda(*given, stream_of(device))

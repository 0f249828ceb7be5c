"""New keys and values into pages, and the bounds of what is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.dlpack import from_dlpack

from kvweave import _native
from kvweave._native import Reach
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import (
    Backend,
    Pages,
    Table,
    cuda_device,
    expect_tensors,
    on_device,
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
    the keys makes its bounds NaN. On CUDA `values` of a cache of 16 bits may also be [pages, 2, D]
    of its dtype: the least and the greatest alone, which are exact, as `score_pages` takes them.

    In fp8 `values` are float8_e4m3fn with `scales` uint8 [pages]: a number x̂ stands for
    2^(scale − 127) · x̂. [pages, 2, D] are the least rounded down and the greatest rounded up, so
    that a page's score by them is no less than by exact ones; [pages, 1, D] the mean, rounded to
    the nearest. The scale of a page is the least power of two, of 2^−126 to 2^119, of which 448 is
    no less than its finite elements. What no number is on the right side of, infinities among them,
    becomes NaN. On CUDA head dims are then at most 256.

    `rows` i32 [N]: where bounds lie elsewhere than pages, of each held block the row that stands
    for its number; those of different rows do not overlap. A block may then be held several times.
    """

    values: torch.Tensor
    held: Table
    rows: Table | None = None
    scales: torch.Tensor | None = None


@needs_memory("write_pages")
def write_pages(
    cache: Pages,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: Table,
    *,
    reach: Reach | None = None,
    bounds: PageBounds | None = None,
    kv_scales: tuple[float, float] | None = None,
    backend: Backend = None,
) -> None:
    """Scatters new keys and values of one layer into pages, and updates bounds of pages.

    k, v [R, G, D], of the cache's dtype; rows and heads may be strided. slots i32 [R, 2], all
    different, never the null block: row r goes to block and slot `slots[r]`, head g to the block's
    page `layer · G + g`.

    With a `reach`, heads have tables and pages of their own: slots i32 [tables, R, 2], and head g
    of row r goes to `slots[table_g, r]`, page `rank_g`; `layer` then counts for nothing. Block −1
    says that the table does not keep the token, which is then not written (RedKnot, section 4.3:
    a local head keeps its sink and window). Pages of different heads must not overlap. `bounds`
    beside a reach are `Unsupported`.

    Into a float8_e4m3fn cache, k and v are f32, bf16 or f16 and are divided by `kv_scales` (key,
    value): the quotient is rounded once, to the nearest and the even one of two; what is too large,
    infinities included, becomes ±448, and NaN stays NaN. Bounds are those of the stored keys times
    their scale.
    """
    expect_tensors(k=k, v=v)
    _write(cache, layer, (k, v), slots, reach, bounds, kv_scales, backend)


def _write(
    cache: Pages,
    layer: int,
    rows: tuple[torch.Tensor, torch.Tensor],
    slots: Table,
    reach: Reach | None,
    bounds: PageBounds | None,
    kv_scales: tuple[float, float] | None,
    backend: Backend,
) -> None:
    device = cuda_device("cache", cache, backend)
    k, v = rows
    if device is None:
        named = None
        if bounds is not None:
            named = (bounds.values, bounds.held, bounds.rows, bounds.scales)
        reference = backend == "reference"
        _native.write_pages(cache, layer, k, v, slots, reach, named, kv_scales, reference)
        return
    of_bounds = {} if bounds is None else {"held": bounds.held, "rows": bounds.rows}
    known = {name: table for name, table in of_bounds.items() if table is not None}
    tables = on_device(device, slots=slots, **known)
    there = None
    if bounds is not None:
        there = (bounds.values, tables["held"], tables.get("rows"), bounds.scales)
    given = (cache, layer, k, v, tables["slots"], reach, there, kv_scales)
    _native.write_pages_cuda(*given, stream_of(device))


@needs_memory("bound_pages")
def bound_pages(
    cache: Pages,
    bounds: PageBounds,
    *,
    pages: int,
    kv_scales: tuple[float, float] | None = None,
    backend: Backend = None,
) -> None:
    """Bounds of blocks that are written already, of all their pages at once.

    A block has `pages` pages, of all layers and KV heads, or of those of a head group: the bounds
    of its page r are row block + r of `bounds.values`, where `score_pages` looks for them with a
    `reach` too, or with `bounds.rows` those of the block + r. So one call after a step or a prefill
    brings up to date what all layers wrote. On CUDA this is one launch; with `held` there it may be
    captured, and rows of block 0 or −1 say
    that nothing was filled.
    """
    arena = cache if isinstance(cache, torch.Tensor) else from_dlpack(cache)
    # An fp8 cache takes rows of other dtypes.
    dtype = torch.float32 if arena.element_size() == 1 else arena.dtype
    none = torch.empty((0, pages, arena.shape[-1]), dtype=dtype, device=arena.device)
    nowhere = torch.empty((0, 2), dtype=torch.int32, device=arena.device)
    _write(cache, 0, (none, none), nowhere, None, bounds, kv_scales, backend)

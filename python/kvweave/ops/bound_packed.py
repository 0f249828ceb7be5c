"""Bounds of packed blocks, by which a decode step chooses what it reads of them."""

from __future__ import annotations

import torch

from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Table, expect_tensors, invalid, numbers_of

_WORKING_BYTES = 1 << 27
"""Of keys in f64 at a time."""


@needs_memory("bound_packed")
def bound_packed(
    cache: torch.Tensor, bounds: torch.Tensor, packs: Table, *, pages: int, page_tokens: int = 64
) -> None:
    """Bounds of packed blocks, from the exact keys that `pack_pages` packs (MosaicKV, section 5.1).

    cache [·, 2, P', D] f32, bf16 or f16, and packs i32 [N, 2 + P / P'], of packed blocks of
    `page_tokens` P, as for `pack_pages`. bounds f32 [packed pages, 3, D]: row block + r becomes the
    least, greatest and mean key of page r's tokens, where `score_pages` with `BoundedPages` of P
    tokens looks for it. The numbers of packed blocks are those of pages here too, so the pages that
    `select_pages` then selects are read by `attend_packed` from what `gather_entries` makes of
    them. NaN in an element of any of the keys makes its bounds NaN.

    Rows of a table on CUDA that point outside either side are skipped: what they would say goes to
    page 0, which is the null block's.
    """
    expect_tensors(cache=cache, bounds=bounds)
    if cache.ndim != 4 or page_tokens % cache.shape[2] != 0:
        raise invalid("cache", f"pages of a divisor of {page_tokens} tokens", str(cache.shape))
    wanted = (len(bounds), 3, cache.shape[3]) if bounds.ndim else ()
    if bounds.dtype != torch.float32 or tuple(bounds.shape) != wanted:
        got = f"{bounds.dtype} {list(bounds.shape)}"
        raise invalid("bounds", f"float32 [pages, 3, {cache.shape[3]}]", got)
    width = 2 + page_tokens // cache.shape[2]
    rows = _rows(packs, width)
    sound = _sound(rows, cache, bounds, pages, page_tokens)
    if not rows.is_cuda and not bool(sound.all()):
        row = rows[~sound][0].tolist()
        expected = "a packed block, 1 to P tokens and their blocks, all with all their pages"
        raise invalid("packs", expected, str(row))
    rows = torch.where(sound[:, None], rows, 0).to(cache.device)
    most = max(1, _WORKING_BYTES // (8 * max(pages * page_tokens * cache.shape[3], 1)))
    for first in range(0, len(rows), most):
        _bound(cache, bounds, rows[first : first + most], pages, page_tokens)


def _rows(packs: Table, width: int) -> torch.Tensor:
    if not isinstance(packs, torch.Tensor):
        numbers_of("packs", packs)
        packs = torch.from_numpy(packs)
    if packs.dtype != torch.int32 or packs.ndim != 2 or packs.shape[1] != width:
        got = f"{packs.dtype} {list(packs.shape)}"
        raise invalid("packs", f"int32 [N, {width}]", got)
    return packs.long()


def _sound(
    rows: torch.Tensor, cache: torch.Tensor, bounds: torch.Tensor, pages: int, page_tokens: int
) -> torch.Tensor:
    """Which rows point inside, of the blocks that have tokens."""
    block, tokens, sources = rows[:, 0], rows[:, 1], rows[:, 2:]
    first = cache.shape[2] * torch.arange(sources.shape[1], device=rows.device)
    inside = (sources > 0) & (sources + pages <= len(cache))
    return (
        (block > 0)
        & (block + pages <= len(bounds))
        & (tokens > 0)
        & (tokens <= page_tokens)
        & (inside | (first >= tokens[:, None])).all(1)
    )


def _bound(
    cache: torch.Tensor, bounds: torch.Tensor, rows: torch.Tensor, pages: int, page_tokens: int
) -> None:
    ranks = torch.arange(pages, device=rows.device)
    slots = torch.arange(page_tokens, device=rows.device)
    held = slots < rows[:, 1, None]
    # Blocks behind the last token may be any number.
    sources = torch.where(held[:, :: cache.shape[2]], rows[:, 2:], 0)
    keys = cache[:, 0][sources[:, None] + ranks[:, None]].flatten(2, 3).double()
    held = held[:, None, :, None]
    found = (
        keys.masked_fill(~held, torch.inf).amin(2),
        keys.masked_fill(~held, -torch.inf).amax(2),
        keys.masked_fill(~held, 0.0).sum(2) / rows[:, 1, None, None],
    )
    pages_of = torch.where(rows[:, 0, None] > 0, rows[:, 0, None] + ranks, 0)
    bounds[pages_of] = torch.stack(found, 2).float()

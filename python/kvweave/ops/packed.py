"""Packed pages: keys and values in few bits, and attention that reads them as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave import _native
from kvweave._native import PackedFormat, Reach, RopeTable
from kvweave.device_memory import needs_memory
from kvweave.ops.attention import launch, results
from kvweave.ops.dispatch import (
    Backend,
    Pages,
    Table,
    cuda_device,
    expect_tensors,
    invalid,
    on_device,
    stream_of,
)
from kvweave.ops.reading import Reading
from kvweave.ops.workspace import Workspace


@dataclass(frozen=True)
class PackedPages:
    """Packed pages of one format: `data` u8 [pages, format.page_bytes], contiguous.

    As in the arena, a block is as many pages as it has (layer, KV head) pairs, its number that of
    its first page, and block 0 the null block.
    """

    data: torch.Tensor
    format: PackedFormat

    @staticmethod
    def zeros(pages: int, format: PackedFormat, device: torch.device | str = "cpu") -> PackedPages:
        """So many pages of zeros."""
        shape = (pages, format.page_bytes)
        return PackedPages(torch.zeros(shape, dtype=torch.uint8, device=device), format)


@dataclass(frozen=True)
class PackedKv:
    """One layer's keys and values in packed pages, and how rows read them: as `PagedKv` says it.

    Positions of rows and entries count tokens as over exact pages, so what is packed and what is
    exact (the sink, the newest tokens) can be attended apart and put together by `merge_states`.
    """

    pages: PackedPages
    layer: int
    kv_heads: int
    scale: float
    rope: RopeTable
    window: int | None = None
    softcap: float | None = None
    reach: Reach | None = None


@needs_memory("pack_pages")
def pack_pages(
    cache: Pages, packed: PackedPages, packs: Table, *, pages: int, backend: Backend = None
) -> None:
    """Packs blocks of exact pages into blocks of packed ones.

    cache [·, 2, P', D] f32, bf16 or f16, where P' divides the P tokens of a packed page. packs i32
    [N, 2 + P / P'], rows (packed block, tokens, block, block, …): all `pages` pages of a packed
    block take the first `tokens` of 1 to P tokens of these blocks' pages; blocks behind the last
    token count for nothing. Never the null block, and no packed page twice.

    An INT4 page has steps of its own for each channel of its keys and each token's values (KIVI,
    section 3): a zero, at most the least of the numbers, and a scale, so that a number is at most
    half a scale from what its code stands for. What is all the same comes back exactly where the
    format's scales can be that number. A number that is NaN or infinite, or a range beyond what
    scales hold, makes NaN of all that shares its steps: the channel in this page, or the token's
    values.

    All versions write the same bytes. On CUDA this is one launch, and rows of a table there that
    point outside either side are skipped.
    """
    _convert("pack", cache, packed, packs, pages, backend)


@needs_memory("unpack_pages")
def unpack_pages(
    packed: PackedPages, cache: Pages, packs: Table, *, pages: int, backend: Backend = None
) -> None:
    """Writes what packed pages stand for into exact ones, each number rounded once.

    `packs` and `pages` as for `pack_pages`, whose way back this is. Slots behind `tokens` stay as
    they are; no exact page is written twice. Into f32 pages this is what `attend_packed` reads.
    """
    _convert("unpack", cache, packed, packs, pages, backend)


@needs_memory("attend_packed")
def attend_packed(
    q: torch.Tensor,
    positions: Table,
    entries: Table,
    kv: PackedKv,
    *,
    entry_offsets: Table,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row per request over packed pages, as they are: a decode step.

    The result of `attend_decode` over what the pages stand for. q [B, H, D] f32, bf16 or f16,
    positions i32 [B], entries i32 [N, 5] of packed blocks, entry_offsets i32 [B + 1], or
    [B · tables + 1] with a `reach`. Returns out [B, H, D] and lse f32 [B, H]; a row that sees no
    key gets 0 and −∞.

    On CUDA q has the dtype of the format's scales and D is 64 or 128, else `Unsupported`. Scales
    are multiplied into queries and weights there, which rounds these once more to q's dtype
    (MosaicKV, section 5.3, moves its rotation likewise).
    """
    expect_tensors(q=q)
    if not isinstance(kv, PackedKv):
        raise invalid("kv", "a PackedKv", type(kv).__name__)
    pages = _pages_of(kv.pages)
    call = Reading(
        q,
        positions,
        entries,
        pages.data,
        kv.layer,
        kv.kv_heads,
        kv.scale,
        kv.rope,
        kv.window,
        kv.softcap,
        kv.reach,
    )
    device = cuda_device("packed pages", pages.data, backend)
    out, lse = results(q, out)
    if device is None:
        reference = backend == "reference"
        _native.attend_packed(call, pages.format, entry_offsets, out, lse, reference)
        return out, lse
    tables = on_device(device, positions=positions, entries=entries, entry_offsets=entry_offsets)
    call, spans, stream = call.placed(tables), tables["entry_offsets"], stream_of(device)
    into = (out, lse)
    launch(
        workspace or Workspace(device),
        lambda space: _native.attend_packed_cuda(call, pages.format, spans, into, space, stream),
    )
    return out, lse


def _pages_of(pages: PackedPages) -> PackedPages:
    if not isinstance(pages, PackedPages):
        raise invalid("packed pages", "PackedPages", f"an object of type {type(pages).__name__}")
    expect_tensors(data=pages.data)
    return pages


def _convert(
    way: str, cache: Pages, packed: PackedPages, packs: Table, pages: int, backend: Backend
) -> None:
    held = _pages_of(packed)
    device = cuda_device("packed pages", held.data, backend)
    given = (cache, held.data, held.format)
    if device is None:
        run = _native.pack_pages if way == "pack" else _native.unpack_pages
        run(*given, packs, pages, backend == "reference")
        return
    table = on_device(device, packs=packs)["packs"]
    put = _native.pack_pages_cuda if way == "pack" else _native.unpack_pages_cuda
    put(*given, table, pages, stream_of(device))

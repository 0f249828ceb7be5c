"""Exact pages packed, and packed ones unpacked."""

from __future__ import annotations

from kvweave import _native
from kvweave.arguments import flag
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Backend, Pages, Table, cuda_device, on_device, stream_of
from kvweave.ops.packed_kv import PackedPages, expect_packed


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

    A top-r page holds vectors of its block's basis (MosaicKV, sections 4.2 and 5.1): x less the
    mean, along each direction; of the groups the r / g of most energy, of equal ones the first. A
    vector with a number that is NaN or infinite, or beyond what numbers and scales hold, is NaN,
    all of it, and no other is.

    A page of planes holds steps along the directions of its block's basis, to the nearest code of
    the bits that the basis gives each; what lies further out becomes the outermost code. A vector
    that is not finite is NaN. INT8 pages are INT4 ones with codes to 255.

    All versions write the same bytes. On CUDA this is one launch; rows of a table there that point
    outside either side are skipped, and those whose block has no basis. Bases there are not looked
    at before the kernel does: a page whose bits are no planes, or too many, is skipped.
    """
    held = expect_packed(packed)
    device = cuda_device("packed pages", held.data, backend)
    given = (cache, held.data, held.format)
    if device is None:
        _native.pack_pages(*given, packs, pages, held.native_bases, backend == "reference")
        return
    table = on_device(device, packs=packs)["packs"]
    _native.pack_pages_cuda(*given, table, pages, held.bases_on(device), stream_of(device))


@needs_memory("unpack_pages")
def unpack_pages(
    packed: PackedPages,
    cache: Pages,
    packs: Table,
    *,
    pages: int,
    in_basis: bool = False,
    in_order: bool = True,
    backend: Backend = None,
) -> None:
    """Writes what packed pages stand for into exact ones, each number rounded once.

    `packs` and `pages` as for `pack_pages`, whose way back this is. Slots behind `tokens` stay as
    they are; no exact page is written twice. Into f32 pages this is what `attend_packed` reads.

    `in_basis`: of top-r pages and planes what vectors have along the directions of their basis, of
    planes counted in steps, and 0 behind the last direction. So rows can be turned into the basis
    instead of keys and values out of it (MosaicKV, section 5.3). A vector that is NaN is so there.

    `in_order` False: of top-r pages and planes sums may run in another order. On a GPU tensor cores
    then fill pages of 16 bits, with 16 significant bits of each direction: a number loses less by
    that than by being rounded. On a host, and for what they do not take, nothing changes.

    # Errors
    `InvalidArgument` for what does not belong together, `in_basis` beside pages that have none.
    """
    held = expect_packed(packed)
    device = cuda_device("packed pages", held.data, backend)
    given, turned = (cache, held.data, held.format), flag("in_basis", in_basis)
    ordered = flag("in_order", in_order)
    if device is None:
        bases, by_definition = held.native_bases, backend == "reference"
        _native.unpack_pages(*given, packs, pages, bases, turned, by_definition)
        return
    table = on_device(device, packs=packs)["packs"]
    there, stream = held.bases_on(device), stream_of(device)
    _native.unpack_pages_cuda(*given, table, pages, there, turned, ordered, stream)

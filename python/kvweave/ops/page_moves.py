"""Pages between the slots that rows have on a device and where all their pages lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
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
from kvweave.ops.workspace import Workspace


@dataclass(frozen=True)
class Recycled:
    """Where the selected pages of R rows are, and which of them have to be brought there.

    `places` i32 [R, K]: the slot of each selected page, −1 behind them. `moves` i32 [M, 3], of
    which the first `count` i32 [1] count, the others being any numbers: (row, page, slot) by row
    and then by page, for `move_pages`. `refused` i32 [R]: 1 for a row that was left as it was.
    """

    places: torch.Tensor
    moves: torch.Tensor
    count: torch.Tensor
    refused: torch.Tensor


@dataclass(frozen=True)
class RowPages:
    """Pages of an arena by the numbers that rows give them.

    `data` [pages, …], contiguous, of any dtype that ops take. `blocks` i32 [N, W]: number n of row
    r is page blocks[r // ranks, n] + r % ranks of the arena. So rows that are the heads of a
    request, in the order of their ranks, share its row of blocks, and with `ranks` 1 each row has
    its own. A block below 0 is nowhere.
    """

    data: Pages
    blocks: Table
    ranks: int = 1


@needs_memory("recycle_pages")
def recycle_pages(
    pages: Table,
    selected: Table,
    slots: torch.Tensor,
    *,
    limit: int,
    pinned: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: Backend = None,
) -> Recycled:
    """Brings the pages that each of R rows selected into the slots that it has on a device.

    pages i32 [R, K] and selected i32 [R] are `select_pages`' results: in each row so many numbers
    below `limit`, ascending. slots i32 [R, S], written in place: the page that each slot of a row
    holds, −1 for none, no page twice. pinned u8 or bool [R, S]: slots that keep what they hold.

    A selected page that a slot holds stays there. Each of the others, in ascending order, takes
    the first slot that is left, which is one that is not pinned and holds no selected page, and is
    a move (FlexiCache, section 3.4, reuses blocks of evicted pages so). What the slot held is
    forgotten: whoever has no other copy of it saves it before.

    Selected pages and slots pinned to others are together at most S. A row for which this or
    anything else said here does not hold is `InvalidArgument`, and nothing was written. On CUDA
    slots are not looked at by the host, nor is a selection there: such a row is left as it is, has
    no places and no moves, and is `refused`.

    On CUDA this is one launch of up to 65535 pages and slots a row. `workspace`, on the device, is
    kept by a caller whose calls follow each other on one stream; else each call makes its own.
    """
    expect_tensors(slots=slots)
    device = cuda_device("slots", slots, backend)
    if pinned is not None:
        expect_tensors(pinned=pinned)
        pinned = pinned.view(torch.uint8) if pinned.dtype == torch.bool else pinned
    rows, width = slots.shape if slots.ndim == 2 else (0, 0)
    most = _columns("pages", pages)
    results = Recycled(
        places=slots.new_empty((rows, most), dtype=torch.int32),
        moves=slots.new_empty((rows * min(most, width), 3), dtype=torch.int32),
        count=slots.new_empty(1, dtype=torch.int32),
        refused=slots.new_empty(rows, dtype=torch.int32),
    )
    room = (slots, pinned)
    written = (results.places, results.moves, results.count, results.refused)
    if device is None:
        # Nobody is to find there what memory held before.
        results.moves.fill_(-1)
        chosen = (pages, selected)
        _native.recycle_pages(chosen, limit, room, written, backend == "reference")
        return results
    tables = on_device(device, pages=pages, selected=selected)
    listed, stream = (tables["pages"], tables["selected"]), stream_of(device)
    space = workspace or Workspace(device)
    counters = None if space.held is None else space.held[1]
    given = (listed, limit, room, written)
    needs = _native.recycle_pages_cuda(*given, counters, stream)
    if needs is not None:
        _native.recycle_pages_cuda(*given, space.numbers(0, needs)[1], stream)
    return results


@needs_memory("move_pages")
def move_pages(
    moves: Table,
    count: Table,
    slots: RowPages,
    home: RowPages,
    *,
    way: Literal["fetch", "spill"],
    processors: int = 2,
    backend: Backend = None,
) -> None:
    """Carries whole pages between the slots of rows and where all pages of the rows lie.

    moves i32 [M, 3], rows (row, page, slot), of which the first count i32 [1] count, as
    `recycle_pages` makes them. `slots` says where slots of rows lie, `home` where their pages do.
    "fetch" reads from home and writes slots, "spill" reads slots and writes to home. Both have
    pages of as many bytes, which are moved as they are; no page is written by two moves.

    On CUDA slots lie on the device, and so does home or it lies in pinned memory of the host. This
    is one launch on the current stream, which fills about so many `processors` and reads
    moves and count there: so it can follow `recycle_pages` in a captured graph, and what computes
    meanwhile runs on another stream. The host sees pages of home once the stream has passed. Pages
    are multiples of 16 bytes and begin on such boundaries, else `Unsupported`. Tables are checked
    where all four come from the host. On the device a move that points outside a table or an arena
    is skipped, and a count beyond M is M.
    """
    for name, side in (("slots", slots), ("home", home)):
        if not isinstance(side, RowPages):
            raise invalid(name, "RowPages", type(side).__name__)
        if isinstance(side.data, torch.Tensor):
            expect_tensors(**{name: side.data})
    device = cuda_device("slots", slots.data, backend)
    if device is None:
        of_slots, of_home = ((side.data, side.blocks, side.ranks) for side in (slots, home))
        _native.move_pages((moves, count), of_slots, of_home, way, backend == "reference")
        return
    tables = on_device(
        device, moves=moves, count=count, slot_blocks=slots.blocks, home_blocks=home.blocks
    )
    _native.move_pages_cuda(
        (tables["moves"], tables["count"]),
        (slots.data, tables["slot_blocks"], slots.ranks),
        (home.data, tables["home_blocks"], home.ranks),
        way,
        processors,
        stream_of(device),
    )


def _columns(what: str, table: Any) -> int:
    """The columns of a table, whatever the op itself will say of it."""
    if getattr(table, "ndim", None) is None:
        raise invalid(what, "a tensor", f"an object of type {type(table).__name__}")
    return int(table.shape[1]) if table.ndim == 2 else 0

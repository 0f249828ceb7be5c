"""Pages between the slots that rows have on a device and where all their pages lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
from kvweave.ops.move_fp8_pages import move_fp8_pages


@dataclass(frozen=True)
class RowPages:
    """Pages of an arena by the numbers that rows give them.

    `data` [pages, …], contiguous, of any dtype that ops take. `blocks` i32 [N, W]: number n of row
    r is page blocks[r // ranks, n] + r % ranks of the arena. So rows that are the heads of a
    request, in the order of their ranks, share its row of blocks, and with `ranks` 1 each row has
    its own. A block below 0 is nowhere.

    `scales` u8 [pages, 2], contiguous, makes float8_e4m3fn `data` [pages, 2, …] of other dtypes'
    numbers: of a page the keys are 2^(scales[page, 0] − 127) times theirs, the values
    2^(scales[page, 1] − 127) times, as in OCP's microscaling formats.
    """

    data: Pages
    blocks: Table
    ranks: int = 1
    scales: Pages | None = None


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

    With `scales` home has pages of as many float8_e4m3fn numbers as slots, which are of f32, bf16
    or f16. "spill" rounds: a page's keys are divided by the least power of two with which the
    greatest of their finite magnitudes rounds to 448 or less, and its values likewise, each
    quotient is rounded once, to the nearest and the even one of two; what is too large, infinities
    included, becomes ±448 and NaN stays NaN. "fetch" widens, exactly: what has come back and is
    spilled again has the same bits at home. On CUDA scales lie on the device, and keys of a page
    are multiples of 16 numbers, else `Unsupported`.

    On CUDA slots lie on the device, and so does home or it lies in pinned memory of the host: its
    first page and all that moves name, which is for the caller to see to. This is one launch on the
    current stream, which fills about so many `processors` and reads moves and count there: so it
    can follow `recycle_pages` in a captured graph, and what computes meanwhile runs on another
    stream. The host sees pages of home once the stream has passed. Pages are multiples of 16 bytes
    and begin on such boundaries, else `Unsupported`. Tables are checked where all four come from
    the host. On the device a move that points outside a table or an arena is skipped, and a count
    beyond M is M.

    With 0 `processors` the device's copy engine carries the pages: for moves that the host knows
    and pages that follow each other on both sides, a MiB and more, as each run takes the driver
    some µs. Tables are then read on the host at once, and pages may be of any size.
    """
    _expect_sides(slots, home)
    device, reference = cuda_device("slots", slots.data, backend), backend == "reference"
    of_slots, of_home = ((side.data, side.blocks, side.ranks) for side in (slots, home))
    if home.scales is not None:
        move_fp8_pages(
            (moves, count),
            of_slots,
            of_home,
            home.scales,
            way,
            device=device,
            processors=processors,
            reference=reference,
        )
        return
    if device is None:
        _native.move_pages((moves, count), of_slots, of_home, way, reference)
        return
    if processors == 0:
        _native.copy_pages_cuda((moves, count), of_slots, of_home, way, stream_of(device))
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


def _expect_sides(slots: RowPages, home: RowPages) -> None:
    """Refuses what is not pages, and scales where slots lie."""
    for name, side in (("slots", slots), ("home", home)):
        if not isinstance(side, RowPages):
            raise invalid(name, "RowPages", type(side).__name__)
        if isinstance(side.data, torch.Tensor):
            expect_tensors(**{name: side.data})
    if slots.scales is not None:
        raise invalid("scales", "those of home alone", "some of slots")

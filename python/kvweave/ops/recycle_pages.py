"""Selected pages into the slots that rows have on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import (
    Backend,
    Table,
    cuda_device,
    expect_tensors,
    invalid,
    on_device,
    stream_of,
)
from kvweave.ops.workspace import Workspace, launch


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

    @staticmethod
    def room(rows: int, most: int, width: int, device: torch.device) -> Recycled:
        """Room for what R rows of S = `width` slots say of K = `most` pages."""
        shapes = (rows, most), (rows * min(most, width), 3), (1,), (rows,)
        return Recycled(*(torch.empty(of, dtype=torch.int32, device=device) for of in shapes))

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order that kernels are told of them."""
        return self.places, self.moves, self.count, self.refused


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
    results = Recycled.room(rows, most, width, slots.device)
    room, written = (slots, pinned), results.parts
    if device is None:
        # Nobody is to find there what memory held before.
        results.moves.fill_(-1)
        chosen = (pages, selected)
        _native.recycle_pages(chosen, limit, room, written, backend == "reference")
        return results
    tables = on_device(device, pages=pages, selected=selected)
    listed, stream = (tables["pages"], tables["selected"]), stream_of(device)
    launch(
        workspace or Workspace(device),
        lambda space: _native.recycle_pages_cuda(listed, limit, room, written, space, stream),
    )
    return results


def _columns(what: str, table: Any) -> int:
    """The columns of a table, whatever the op itself will say of it."""
    if getattr(table, "ndim", None) is None:
        raise invalid(what, "a tensor", f"an object of type {type(table).__name__}")
    return int(table.shape[1]) if table.ndim == 2 else 0

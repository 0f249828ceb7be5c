"""Pages carried between a device and the host's memory, by whichever of the two can."""

from __future__ import annotations

from typing import Literal

import torch

from kvweave import ops
from kvweave.ops import RowPages, Table

Way = Literal["fetch", "spill"]

_PAGES_AT_ONCE = 4096
"""Pages that are copied at once where the host does it."""


def carry_pages(
    moves: Table,
    count: Table,
    slots: RowPages,
    home: RowPages,
    way: Way,
    *,
    pinned: bool,
    processors: int = 2,
) -> None:
    """As `ops.move_pages`, by the device if it may read the host's memory, else by the host."""
    if pinned or not torch.as_tensor(slots.data).is_cuda:
        ops.move_pages(moves, count, slots, home, way=way, processors=processors)
    else:
        carry_by_host(moves, count, slots, home, way)


def carry_by_host(moves: Table, count: Table, slots: RowPages, home: RowPages, way: Way) -> None:
    """As `ops.move_pages`, between a device and memory that is not pinned: waits for the device."""
    steps = torch.as_tensor(moves)[: int(count[0])].cpu().long()
    row, page, slot = steps.unbind(1)

    def places(side: RowPages, number: torch.Tensor) -> torch.Tensor:
        blocks = torch.as_tensor(side.blocks).cpu()
        return blocks[row // side.ranks, number] + row % side.ranks

    here, there = places(slots, slot), places(home, page)
    arena, memory = slots.data, home.data
    assert isinstance(arena, torch.Tensor)
    assert isinstance(memory, torch.Tensor)
    for start in range(0, len(steps), _PAGES_AT_ONCE):
        some = slice(start, start + _PAGES_AT_ONCE)
        at = here[some].to(arena.device)
        if home.scales is not None:
            _carry_rounded(arena, at, home, there[some], way)
        elif way == "fetch":
            arena.index_copy_(0, at, memory[there[some]].to(arena.device))
        else:
            memory.index_copy_(0, there[some], arena.index_select(0, at).cpu())


def _carry_rounded(
    arena: torch.Tensor, at: torch.Tensor, home: RowPages, there: torch.Tensor, way: Way
) -> None:
    """As `carry_by_host` for pages that are kept as fp8: the device rounds and widens them."""
    memory, scales = home.data, home.scales
    assert isinstance(memory, torch.Tensor)
    assert isinstance(scales, torch.Tensor)
    numbers = torch.arange(len(at), dtype=torch.int32, device=arena.device)[None]
    moves = torch.stack((0 * numbers[0], numbers[0], numbers[0]), 1)
    number = there.to(scales.device)
    # There is no taking of fp8 by an index everywhere: bytes are the same.
    kept = memory.view(torch.uint8)
    staged = torch.empty((len(at), *memory.shape[1:]), dtype=memory.dtype, device=arena.device)
    of_staged = scales.index_select(0, number)
    if way == "fetch":
        staged.view(torch.uint8).copy_(kept.index_select(0, there))
    beside = RowPages(staged, numbers, 1, of_staged)
    count = torch.full_like(numbers[0, :1], len(at))
    ops.move_pages(moves, count, RowPages(arena, at.int()[None]), beside, way=way)
    if way == "spill":
        kept.index_copy_(0, there, staged.view(torch.uint8).cpu())
        scales.index_copy_(0, number, of_staged)

"""Pages of the same heads of many blocks, carried in as few pieces as they lie in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch

from kvweave.ops import RowPages, Table
from kvweave.runner.kv.carry_pages import Way
from kvweave.runner.kv.tables import Int32, send

Side: TypeAlias = tuple[torch.Tensor, Int32, Int32]
"""An arena [pages, …], the pages [R] of some heads in a block, the first pages [N] of blocks."""


class Carry(Protocol):
    """As `carry_pages` between a device and memory of which is known whether it is pinned."""

    def __call__(
        self,
        moves: Table,
        count: Table,
        slots: RowPages,
        home: RowPages,
        way: Way,
        *,
        processors: int = 2,
    ) -> None:
        """As `ops.move_pages`."""


def carry_blocks(
    on_device: Side,
    at_home: Side,
    way: Way,
    carry: Carry,
    *,
    engine_bytes: int,
    scales: torch.Tensor | None = None,
) -> None:
    """Carries R pages of each of N blocks between a device and where they are kept.

    A GPU's copy engine carries blocks whose pages follow each other on both sides, where those are
    `engine_bytes` and more, and its processors the others: see `copy_engine`. Who has no memory
    that a GPU reaches asks for no such size. `scales` as `RowPages` has them, at home.
    """
    if not len(on_device[1]) or not len(on_device[2]):
        return
    follow = all((np.diff(pages) == 1).all() for _, pages, _ in (on_device, at_home))
    nbytes = on_device[0][0].nbytes * (len(on_device[1]) if follow else 1)
    by_engine = scales is None and nbytes >= engine_bytes
    joined = _pages_together(on_device, at_home) if follow and scales is None else 1
    slots, home = (_joined(side, joined) for side in (on_device, at_home))
    heads, blocks = len(slots[1]), len(slots[2])
    # Block by block, so that neighbours are one copy.
    moves = np.empty((heads * blocks, 3), np.int32)
    moves[:, 0] = np.tile(np.arange(heads, dtype=np.int32), blocks)
    moves[:, 1] = moves[:, 2] = np.repeat(np.arange(blocks, dtype=np.int32), heads)
    known = moves, np.asarray([len(moves)], np.int32), _table(slots, follow), _table(home, follow)
    tables: Sequence[Table] = known if by_engine else send(on_device[0].device, *known)
    here = _rows(slots, tables[2], follow)
    there = _rows(home, tables[3], follow, scales)
    carry(tables[0], tables[1], here, there, way, processors=0 if by_engine else 2)


def _pages_together(on_device: Side, at_home: Side) -> int:
    """How many pages that follow each other begin at a multiple of their count on both sides."""
    found = len(on_device[1])
    for _, pages, blocks in (on_device, at_home):
        found = math.gcd(found, int(pages[0]), int(np.gcd.reduce(blocks)))
    return found


def _joined(side: Side, together: int) -> Side:
    """The same where so many pages that follow each other are one."""
    arena, pages, blocks = side
    if together == 1:
        return side
    whole = len(arena) // together
    joined = arena[: whole * together].view(whole, -1)
    return joined, pages[::together] // together, blocks // together


def _table(side: Side, follow: bool) -> Int32:
    """Blocks as `_rows` wants them, i32 [1, N], or where each head's pages lie, i32 [R, N]."""
    _, pages, blocks = side
    return np.ascontiguousarray(blocks[None] if follow else pages[:, None] + blocks)


def _rows(side: Side, table: Table, follow: bool, scales: torch.Tensor | None = None) -> RowPages:
    arena, pages, _ = side
    if not follow:
        return RowPages(arena, table, 1, scales)
    first = int(pages[0])
    return RowPages(arena[first:], table, len(pages), None if scales is None else scales[first:])

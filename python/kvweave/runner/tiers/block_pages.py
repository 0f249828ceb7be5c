"""Pages of the same heads of many blocks, carried in as few pieces as they lie in."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from kvweave import ops
from kvweave.ops import RowPages
from kvweave.runner.kv.host_pool import Way, carry_pages
from kvweave.runner.kv.tables import Int32, send

Side: TypeAlias = tuple[torch.Tensor, Int32, Int32]
"""An arena [pages, …], the pages [R] of some heads in a block, the first pages [N] of blocks."""


def carry_blocks(
    on_device: Side, at_home: Side, way: Way, *, pinned: bool, engine_bytes: int
) -> None:
    """Carries R pages of each of N blocks between a device and where they are kept.

    Heads whose pages follow each other on both sides, at a multiple of their count in every block,
    are carried as one. On a GPU whose driver reaches the memory at home (`pinned`) its copy engine
    carries pieces from `engine_bytes` on, and its processors smaller ones: see `copy_engine`.
    """
    if not len(on_device[1]) or not len(on_device[2]):
        return
    together = _heads_together(on_device, at_home)
    slots, home = (_joined(side, together) for side in (on_device, at_home))
    heads, blocks = len(slots[1]), len(slots[2])
    moves = np.empty((heads * blocks, 3), np.int32)
    moves[:, 0] = np.tile(np.arange(heads, dtype=np.int32), blocks)
    moves[:, 1] = moves[:, 2] = np.repeat(np.arange(blocks, dtype=np.int32), heads)
    count = np.asarray([len(moves)], np.int32)
    tables = [np.ascontiguousarray(side[1][:, None] + side[2]) for side in (slots, home)]
    arena, memory = slots[0], home[0]
    is_large = arena[0].numel() * arena.element_size() >= engine_bytes
    if pinned and is_large:
        # Block by block, so that neighbours are one copy.
        here, there = RowPages(arena, tables[0]), RowPages(memory, tables[1])
        ops.move_pages(moves, count, here, there, way=way, processors=0)
        return
    sent = send(arena.device, moves, count, *tables)
    here, there = RowPages(arena, sent[2]), RowPages(memory, sent[3])
    carry_pages(sent[0], sent[1], here, there, way, pinned=pinned)


def _heads_together(on_device: Side, at_home: Side) -> int:
    """How many heads are carried as one piece: all of them, or each for itself."""
    heads = len(on_device[1])
    for arena, pages, blocks in (on_device, at_home):
        begins = [len(arena), pages[:1], blocks]
        if (np.diff(pages) != 1).any() or any((np.asarray(n) % heads).any() for n in begins):
            return 1
    return heads


def _joined(side: Side, heads: int) -> Side:
    """The same where so many heads that follow each other are one page."""
    arena, pages, blocks = side
    return arena.view(len(arena) // heads, -1), pages[::heads] // heads, blocks // heads

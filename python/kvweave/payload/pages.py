"""Where positions of a request lie in the pages, and K, V gathered from there or written there.

All heads of a group go in one copy: pages [pages, 2, P, D] are read as rows [pages · 2 · P, D], and
the row of (block, rank, K or V, slot) is `((block + rank) · 2 + kv) · P + slot`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.cache import KvRequest, KvShape
from kvweave.ops import RopeTable

Int32 = npt.NDArray[np.int32]

TURNED_AT_ONCE = 4096
"""Positions whose keys are rotated together, through pages made for that."""


@dataclass(frozen=True)
class Places:
    """Positions i32 [n], sorted, the block and slot of each, and how far its key is to be moved."""

    positions: Int32
    blocks: Int32
    slots: Int32
    deltas: Int32

    @staticmethod
    def read_by(request: KvRequest, table: int) -> Places:
        """All positions whose KV the request reads through one of its tables."""
        block, begin, end, position, delta = request.entries(table).T
        counts = end - begin
        entry = np.repeat(np.arange(len(counts)), counts)
        step = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
        position, slot = position[entry] + step, begin[entry] + step
        return Places(*(a.astype(np.int32) for a in (position, block[entry], slot, delta[entry])))

    def of(self, chosen: npt.NDArray[np.bool_] | slice) -> Places:
        """Those of some positions."""
        found = (self.positions, self.blocks, self.slots, self.deltas)
        return Places(*(array[chosen] for array in found))

    def rows(self, heads: int, pages: torch.Tensor) -> torch.Tensor:
        """Rows i64 [heads · 2 · n] of the pages: each head's keys, then its values."""
        width = pages.shape[2]
        table = np.stack((self.blocks, self.slots))
        block, slot = torch.from_numpy(table).to(pages.device, torch.int64).unbind()
        page: torch.Tensor = block + torch.arange(heads, device=pages.device)[:, None, None]
        kv = torch.arange(2, device=pages.device)[:, None]
        return (((page * 2 + kv) * width) + slot).view(-1)


def gather(pages: torch.Tensor, places: Places, heads: int) -> torch.Tensor:
    """K and V [heads, 2, n, D] of the pages at some places, keys as they are stored."""
    flat = pages.view(-1, pages.shape[3])
    found = flat.index_select(0, places.rows(heads, pages))
    return found.view(heads, 2, len(places.positions), pages.shape[3])


def scatter(pages: torch.Tensor, places: Places, part: torch.Tensor) -> None:
    """Writes K and V [heads, 2, n, D] to some places."""
    flat = pages.view(-1, pages.shape[3])
    flat.index_copy_(0, places.rows(len(part), pages), part.to(pages.device).flatten(0, 2))


def turn(part: torch.Tensor, deltas: Int32, layers: Int32, rope: RopeTable, shape: KvShape) -> None:
    """Rotates keys of `part` [heads, 2, n, D] by their deltas [n] at their layers' frequencies.

    By the op that moves keys in the cache, so that the bits are those of a copy there: positions
    with a delta are laid into pages of their own, and copied to others beside them.
    """
    moved = np.flatnonzero(deltas)
    for start in range(0, len(moved), TURNED_AT_ONCE):
        chosen = moved[start : start + TURNED_AT_ONCE]
        heads, width = len(part), shape.page_tokens
        blocks = -(-len(chosen) // width)
        # The block in front stands for the null block, which no copy may touch.
        pages = part.new_zeros((1 + 2 * blocks) * heads, 2, width, shape.head_dim)
        step = np.arange(len(chosen), dtype=np.int32)
        block, slot, delta = (1 + step // width) * heads, step % width, deltas[chosen]
        old = Places(step, block, slot, delta)
        new = Places(step, block + blocks * heads, slot, np.zeros_like(delta))
        index = torch.from_numpy(chosen).to(part.device)
        scatter(pages, old, part.index_select(2, index))
        copies = (old.blocks, slot, new.blocks, slot, np.ones_like(step), delta)
        table = np.ascontiguousarray(np.stack(copies, 1), np.int32)
        ops.copy_rerotate(pages, table, rope, kv_heads=shape.kv_heads, layers=layers)
        part.index_copy_(2, index, gather(pages, new, heads))

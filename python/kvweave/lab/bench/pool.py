"""Pages of many requests in random order, and which KV heads read what.

Heads that read the same tokens form a group with blocks of its own, as in a cache with a head
class map. The arena is [pages, 2, P, D]; block b of a group has the pages b, b + 1, … of its heads,
layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.lab.bench.pages import PAGE, Shape
from kvweave.lab.bench.shapes import SINK, WINDOW

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Group:
    """KV heads by rank, first positions of their blocks i32 [n], the blocks i32 [B, n].

    The page of a block's first head is `first_rank` pages after the block's start.
    """

    heads: range
    window: int
    positions: Rows
    blocks: Rows
    first_rank: int = 0

    def layer(self, layer: int) -> Group:
        """The same group of another layer."""
        return replace(self, first_rank=layer * len(self.heads))


@dataclass(frozen=True)
class Pool:
    """Pages [pages, 2, P, D] and the groups of one layer that read them, on one device."""

    shape: Shape
    tokens: int
    pages: torch.Tensor
    groups: tuple[Group, ...]

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.groups[0].blocks)

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.pages.device

    @property
    def widened(self) -> Pool:
        """The same numbers in bf16, which has all that e4m3 has."""
        return replace(self, pages=self.pages.bfloat16())

    def layer(self, layer: int) -> Pool:
        """The same pages as another layer reads them."""
        return replace(self, groups=tuple(group.layer(layer) for group in self.groups))

    def entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries i32 [N, 5] of all requests and offsets i32 [B·tables + 1], on the device."""
        tables = []
        for group in self.groups:
            position = np.broadcast_to(group.positions, group.blocks.shape)
            zero = np.zeros_like(group.blocks)
            columns = (group.blocks, zero, zero + PAGE, position, zero)
            tables.append(np.stack(columns, axis=-1))
        joined = np.concatenate(tables, axis=1).reshape(-1, 5)
        counts = np.tile([len(group.positions) for group in self.groups], self.batch)
        return self.put(joined), self.put(np.concatenate(([0], np.cumsum(counts))))

    def reach(self) -> ops.Reach | None:
        """What each KV head reads; None where all read everything."""
        if len(self.groups) == 1:
            return None
        rows = [
            (table, group.first_rank + rank, group.window, SINK if group.window else 0)
            for table, group in enumerate(self.groups)
            for rank in range(len(group.heads))
        ]
        return ops.Reach(tables=len(self.groups), heads=np.array(rows, np.int32))

    def put(self, table: npt.NDArray[Any]) -> torch.Tensor:
        """The table as int32 on the device."""
        return torch.from_numpy(np.ascontiguousarray(table, np.int32)).to(self.device)

    def group(self, head: int) -> Group:
        """The group of a KV head."""
        return next(group for group in self.groups if head in group.heads)

    def head_pages(self, head: int) -> tuple[Rows, Rows]:
        """Pages i32 [B, n] of a KV head and their first positions i32 [n]."""
        group = self.group(head)
        rank = group.first_rank + head - group.heads.start
        return (group.blocks + rank).astype(np.int32), group.positions

    def head_positions(self, head: int) -> torch.Tensor:
        """Positions [n·P] of the keys that a KV head reads, on the device."""
        starts = self.head_pages(head)[1]
        return self.put((starts[:, None] + np.arange(PAGE)).flatten())

    def lengths(self) -> Rows:
        """Keys i32 [G] that each KV head of a request reads."""
        heads = range(self.shape.kv_heads)
        return np.array([PAGE * len(self.head_pages(head)[1]) for head in heads], np.int32)

    def page_table(self) -> Rows:
        """Pages i32 [B, G, most] of every head, padded with page 0."""
        pages = [self.head_pages(head)[0] for head in range(self.shape.kv_heads)]
        most = max(table.shape[1] for table in pages)
        padded = [np.pad(table, ((0, 0), (0, most - table.shape[1]))) for table in pages]
        return np.stack(padded, axis=1)

    def block_table(self) -> Rows:
        """Block numbers i32 [B, n], counted in blocks, of a pool whose heads all read the same."""
        return (self.groups[0].blocks // self.shape.kv_heads).astype(np.int32)

    def blocks_view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [blocks, G, P, D] where they lie, of a pool whose heads all read the same."""
        view = self.pages.view(-1, self.shape.kv_heads, 2, PAGE, self.shape.head_dim)
        return view[:, :, 0], view[:, :, 1]

    def heads_view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [pages, 1, P, D] where they lie: each page a block of a cache with one head."""
        return self.pages[:, 0, None], self.pages[:, 1, None]

    def keys(self, request: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K, V f32 [n, D] that one head of one request reads, and their positions [n]."""
        pages = self.put(self.head_pages(head)[0][request])
        # Bytes are chosen as such: torch indexes no fp8 tensor on some devices.
        bits = self.pages.view(torch.uint8)[pages.long()]
        k, v = bits.view(self.pages.dtype).float().transpose(0, 1).flatten(1, 2)
        return k, v, self.head_positions(head)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K, V [B, G, T, D] copied out of the pages, zero where none, and bool [G, T]: where."""
        s = self.shape
        size = (2, self.batch, s.kv_heads, self.tokens, s.head_dim)
        both = torch.zeros(size, dtype=self.pages.dtype, device=self.device)
        there = torch.zeros(size[2:4], dtype=torch.bool, device=self.device)
        for head in range(s.kv_heads):
            at = self.head_positions(head).long()
            there[head, at] = True
            for request, pages in enumerate(self.head_pages(head)[0]):
                chosen = self.pages[self.put(pages).long()]
                both[:, request, head, at] = chosen.transpose(0, 1).flatten(1, 2)
        return both[0], both[1], there


def pool(
    shape: Shape,
    batch: int,
    tokens: int,
    *,
    full_heads: int,
    device: torch.device,
    rows_anywhere: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Pool:
    """Random pages for `batch` requests; KV heads from `full_heads` on are local.

    Local heads keep what the last row sees, or all keys where rows may be anywhere. tokens is a
    multiple of P, and at least what a local head reads if there is one.
    """
    every = np.arange(0, tokens, PAGE, dtype=np.int32)
    local = np.concatenate((every[: SINK // PAGE], every[-(WINDOW // PAGE) :]))
    if rows_anywhere:
        local = every
    wanted = [(range(full_heads), 0, every)]
    if full_heads < shape.kv_heads:
        wanted.append((range(full_heads, shape.kv_heads), WINDOW, local))
    rng = np.random.default_rng(tokens + batch)
    groups = []
    # The null block, which no entry names, comes first.
    first = shape.block_pages
    for heads, window, positions in wanted:
        count = batch * len(positions)
        order = rng.permutation(count).reshape(batch, len(positions))
        size = shape.layers * len(heads)
        blocks = (first + order * size).astype(np.int32)
        groups.append(Group(heads, window, positions, blocks))
        first += count * size
    # Whole blocks of all heads, so that the arena can be seen as such.
    pages = -(-first // shape.kv_heads) * shape.kv_heads
    arena = torch.empty(pages, 2, PAGE, shape.head_dim, dtype=torch.bfloat16, device=device)
    return Pool(shape, tokens, arena.normal_().to(dtype), tuple(groups))

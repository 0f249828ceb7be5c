"""Layers of requests brought together on the device, where some pages lie in host memory.

A pass that reads all pages, as the verification of drafts does, has all of one layer at hand and
not more: what its heads read is laid side by side into pages of its own, from host memory and from
the device's arena. Tables then name these pages in place of blocks, in the same order, so what is
computed over them is what would be over pages that had never left. TriForce (Sun et al., arXiv
2404.11912) verifies so where keys and values are offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import TransferFailed
from kvweave.ops import Reach, RowPages, Table
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.tables import Int32, send, send_index

_Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WholeLayer:
    """What B requests read in one layer: `pages` [N, 2, P, D], of which `reach` says the heads'.

    entries i32 [M, 5] and offsets i32 [B · tables + 1] name those pages.
    """

    pages: torch.Tensor
    entries: Table
    offsets: Table
    reach: Reach

    def table(self, number: int) -> Int32:
        """The entries i32 [M, 5] of a table of the first request."""
        begin, end = (int(end) for end in self.offsets[number : number + 2])
        return np.asarray(torch.as_tensor(self.entries[begin:end]).cpu())


@dataclass(frozen=True)
class _Home:
    """Pages of a head group that come from host memory: those of `heads` a block, of B requests.

    `blocks` i32 [B, W] there, `slots` i32 [B, W] the first page of each on the device; `moves` i32
    [M, 3], `count` i32 [1], as `move_pages` takes them.
    """

    pool: HostPool
    heads: int
    blocks: Table
    slots: Table
    moves: Table
    count: Table


@dataclass(frozen=True)
class _Table:
    """Pages of a table that come from the device: `blocks` i64 [M] without rank, and `to` where."""

    number: int
    blocks: torch.Tensor
    to: torch.Tensor
    home: _Home | None


@dataclass(frozen=True)
class _Layout:
    """How the pages of a layer lie: of all layers with as many heads in the same tables."""

    pages: int
    entries: Table
    offsets: Table
    tables: list[_Table]


class WholeLayers:
    """All that B requests read, layer by layer.

    `entries` i32 [N, 5] of their tables, request by request, `lengths` i64 [B, T] of each; a block
    below 0 is −1 − its number in the host memory of the table's head group. `failed`: by number the
    requests whose pages could not be had from there; what is computed of these is nothing.
    """

    def __init__(
        self, heads: HeadReads, pages: torch.Tensor, entries: Int32, lengths: _Int64
    ) -> None:
        self.heads = heads
        self.pages = pages
        self.failed: dict[int, TransferFailed] = {}
        self._entries, self._lengths = entries, lengths
        requests, tables = lengths.shape
        each = lengths.reshape(-1)
        self._table = np.repeat(np.tile(np.arange(tables), requests), each)
        self._request = np.repeat(np.arange(requests), lengths.sum(1))
        self._layouts: dict[tuple[tuple[int, int], ...], _Layout] = {}

    def layer(self, rows: Int32) -> WholeLayer:
        """A layer whose heads read by rows i32 [G, 4], as `Reach` has them. Its keys are written.

        # Errors
        `OutOfMemory` where the device has no room for it.
        """
        rows = rows.copy()
        named = np.unique(rows[:, 0])
        ranks = [rows[rows[:, 0] == table, 1] for table in named]
        first = {int(table): int(of.min()) for table, of in zip(named, ranks, strict=True)}
        shape = tuple(
            (int(table), int(of.max() - of.min()) + 1)
            for table, of in zip(named, ranks, strict=True)
        )
        if shape not in self._layouts:
            self._layouts[shape] = self._layout(dict(shape))
        layout = self._layouts[shape]
        sizes = (layout.pages, *self.pages.shape[1:])
        made = torch.empty(sizes, dtype=self.pages.dtype, device=self.pages.device)
        for table in layout.tables:
            rank = first[table.number]
            made.index_copy_(0, table.to, self.pages.index_select(0, table.blocks + rank))
            if table.home is not None:
                self._bring(table.home, rank, made)
        rows[:, 1] -= [first[table] for table in rows[:, 0].tolist()]
        reach = Reach(self._lengths.shape[1], rows)
        return WholeLayer(made, layout.entries, layout.offsets, reach)

    def _bring(self, home: _Home, rank: int, made: torch.Tensor) -> None:
        to = RowPages(made, home.slots, home.heads)
        of = home.pool.at(home.blocks, home.heads, rank)
        self.failed.update(home.pool.fetch(home.moves, home.count, to, of, home.heads))

    def _layout(self, heads: dict[int, int]) -> _Layout:
        """Of tables by number, of each of which a layer has so many heads."""
        device = self.pages.device
        read = np.isin(self._table, list(heads))
        entries, table, request = self._entries[read], self._table[read], self._request[read]
        pages = np.asarray([heads.get(t, 0) for t in range(self._lengths.shape[1])])[table]
        first = np.cumsum(pages) - pages
        blocks = entries[:, 0].astype(np.int64)
        entries[:, 0] = first
        lengths = self._lengths.copy()
        lengths[:, [t for t in range(lengths.shape[1]) if t not in heads]] = 0
        offsets = np.cumsum([0, *lengths.reshape(-1)], dtype=np.int32)
        parts = []
        for number, count in heads.items():
            of_heads, own = np.arange(count), table == number
            here, away = own & (blocks >= 0), own & (blocks < 0)
            at, to = (
                (pages_of[here, None] + of_heads).reshape(-1).astype(np.int32)
                for pages_of in (blocks, first)
            )
            home = None
            if away.any():
                at_home = -1 - blocks[away], first[away], request[away]
                home = self._home(self.heads.host[number], count, *at_home)
            of, onto = (send_index(device, index).long() for index in (at, to))
            parts.append(_Table(number, of, onto, home))
        listed, ends = send(device, entries, offsets)
        return _Layout(int(pages.sum()), listed, ends, parts)

    def _home(
        self, pool: HostPool, heads: int, blocks: _Int64, first: _Int64, request: _Int64
    ) -> _Home:
        counts = np.bincount(request, minlength=len(self._lengths))
        starts = np.cumsum(counts) - counts
        number = np.arange(len(request)) - starts[request]
        sides = np.zeros((2, len(counts), int(counts.max())), np.int32)
        sides[0, request, number], sides[1, request, number] = blocks, first
        moves = np.empty((len(request), heads, 3), np.int32)
        moves[:, :, 0] = heads * request[:, None] + np.arange(heads)
        moves[:, :, 1:] = number[:, None, None]
        moves = np.ascontiguousarray(moves.reshape(-1, 3))
        count = np.asarray([len(moves)], np.int32)
        sent = send(self.pages.device, *sides, moves, count)
        return _Home(pool, heads, *sent)

"""What the KV heads of one layer have in packed pages: all but their first and newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.transformers.paged_step import Attends, States
from kvweave.adapters.transformers.ranked_rows import RankedEntries, RowReads
from kvweave.cache import KvCache, KvRequest
from kvweave.device_memory import needs_memory
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner.kv.packed_pool import RECENT_TOKENS, SINK_TOKENS
from kvweave.runner.kv.packed_prefix import packs_of
from kvweave.runner.kv.states import merged_states
from kvweave.runner.kv.tables import Int32, send

Vectors = Sequence[torch.Tensor]
"""Keys or values [n, D] of each head."""


UNPACKED_TOKENS = SINK_TOKENS + RECENT_TOKENS + PAGE_TOKENS - 1
"""The most tokens of a head of which none is packed."""


def packed_count(tokens: int) -> int:
    """How many of a head's tokens are packed: whole pages between the sink and the newest."""
    return max(0, tokens - SINK_TOKENS - RECENT_TOKENS) // PAGE_TOKENS * PAGE_TOKENS


class PoolBounds:
    """Bounds f32 [pages, 3, D] of a pool's packed keys, which there are from their first use on."""

    def __init__(self, pages: ops.PackedPages) -> None:
        self._pages = pages
        self._values: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Those of all pages, which are made where there are none.

        # Errors
        `OutOfMemory` where there is no room for them.
        """
        if self._values is None:
            data, size = self._pages.data, self._pages.format.head_dim
            wanted = f"{len(data) * 3 * size * 4} bytes on {data.device}"
            zeros = needs_memory("bounds of packed pages", wanted)(torch.zeros)
            self._values = zeros((len(data), 3, size), device=data.device)
        return self._values

    @property
    def page_bytes(self) -> int:
        """Bytes of those of a page, 0 while there are none."""
        return 0 if self._values is None else self._values[0].nbytes


@dataclass(frozen=True)
class PackedHeadPool:
    """Packed pages of one head each, whichever layer it is of; `cache` counts them.

    `bounds` of their keys, where any head reads few pages in decode steps. Of a format in a basis,
    `pages.bases` has one for each head of each layer, or one for all; `fits`: whether they are made
    of what is packed.
    """

    cache: KvCache
    pages: ops.PackedPages
    bounds: PoolBounds
    fits: bool
    rope: ops.RopeTable

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that are held and of their bounds; of all bases while any is held."""
        held, bases = int(self.cache.stats()["held"]), self.pages.bases
        page = self.pages.format.page_bytes + self.bounds.page_bytes
        return held * page + (bases.data.nbytes if held and bases is not None else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all that there is room for."""
        bases = self.pages.bases
        known = self.pages.data.nbytes + len(self.pages.data) * self.bounds.page_bytes
        return known + (0 if bases is None else bases.data.nbytes)


class PackedHeads:
    """The packed tokens of G heads, of which the first has the basis of this number.

    A head is a request of the pool, as in `HeadPages`; one without packed tokens has none.
    """

    def __init__(self, pool: PackedHeadPool, first_basis: int) -> None:
        self._pool, self._first_basis = pool, first_basis
        self._requests: list[KvRequest | None] = []
        self._reads: RowReads | None = None
        self._entries: Int32 = np.zeros((0, 5), np.int32)
        self._ends: Int32 = np.zeros(1, np.int32)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each head that are packed."""
        return [0 if request is None else request.length for request in self._requests]

    def keep(
        self, keys: Vectors, values: Vectors, reads: RowReads | None = None
    ) -> tuple[Vectors, Vectors]:
        """Packs what of each head is to be, in place of all before, and returns the rest.

        `reads`: of how many packed pages a decode step reads of each head, None for all.

        # Errors
        `PoolFull` when it does not fit; nothing is packed then.
        """
        self.release()
        self._reads = reads
        counts = [packed_count(len(one)) for one in keys]
        try:
            for head, count in enumerate(counts):
                self._requests.append(self._admitted(head, count) if count else None)
            self._list()
            if len(self._entries):
                self._pack(_middle(keys, counts), _middle(values, counts))
        except BaseException:
            self.release()
            raise
        return _others(keys, counts), _others(values, counts)

    def merged(self, q: torch.Tensor, how: Attends, exact: States) -> States:
        """Attention of rows [G · n, H / G, D], head by head, over packed tokens and `exact`."""
        if not len(self._entries):
            return exact
        rows = q.contiguous()
        one_each = len(rows) == len(self._requests)
        return merged_states(exact, self._step(rows, how) if one_each else self._many(rows, how))

    def release(self) -> None:
        """Gives all pages back."""
        requests, self._requests = self._requests, []
        for request in requests:
            if request is not None:
                request.release()
        self._list()

    def _admitted(self, head: int, count: int) -> KvRequest:
        request = self._pool.cache.admit(np.full(count, head, np.int32), reuse="none")
        request.take_copies()
        request.finish_copies()
        return request

    def _list(self) -> None:
        none: Int32 = np.zeros((0, 5), np.int32)
        parts = [none if request is None else request.entries() for request in self._requests]
        self._entries = np.concatenate([none, *parts])
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)

    def _pack(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Packs tokens [N, P, D] of all pages, head by head."""
        pool, blocks = self._pool, self._entries[:, 0]
        # Behind the null block.
        exact = torch.nn.functional.pad(torch.stack((keys, values), 1), (0, 0, 0, 0, 0, 0, 1, 0))
        packs = packs_of(blocks, np.arange(1, 1 + len(blocks), dtype=np.int32)[:, None])
        if pool.pages.bases is not None:
            self._choose_bases(pool.pages.bases, exact, packs)
        (table,) = send(exact.device, packs)
        ops.pack_pages(exact, pool.pages, table, pages=1)
        if self._reads is not None:
            ops.bound_packed(exact, pool.bounds.values(), packs, pages=1, page_tokens=PAGE_TOKENS)

    def _choose_bases(self, bases: ops.PackedBases, exact: torch.Tensor, packs: Int32) -> None:
        """Says which basis each head's pages are packed in, making it of them where none is."""
        here = exact.cpu() if self._pool.fits else exact
        for head, (first, end) in enumerate(zip(self._ends, self._ends[1:], strict=False)):
            if first == end:
                continue
            own = packs[first:end]
            number = self._first_basis + head if len(bases.data) > 1 else 0
            bases.of[torch.from_numpy(own[:, 0]).long()] = number
            if self._pool.fits:
                moments = ops.Moments(self._pool.pages.format, 1)
                moments.add(here, own)
                bases.data[number] = torch.from_numpy(moments.basis()).to(bases.data.device)

    def _step(self, q: torch.Tensor, how: Attends) -> States:
        """One row of each head over packed pages as they are, those that it ranks first."""
        pool = self._pool
        behind = np.full(len(q), int(self._entries[:, 3].max()) + PAGE_TOKENS, np.int32)
        positions, entries, ends = send(q.device, behind, self._entries, self._ends)
        kv = ops.PackedKv(pool.pages, 0, 1, how.scale, pool.rope)
        counts, reads = np.diff(self._ends).tolist(), self._reads
        if reads is not None and reads.leave_out(counts):
            bounds, width = pool.bounds.values(), max(counts)
            ranked = RankedEntries(entries, entries, ends, bounds, width, PAGE_TOKENS, reads)
            entries, ends, kv = ranked.of(q, kv)
        return ops.attend_packed(q, positions, entries, kv, entry_offsets=ends)

    def _many(self, q: torch.Tensor, how: Attends) -> States:
        """Some rows of each head over what the pages stand for, unpacked for these rows alone."""
        pool, count, rows = self._pool, len(self._entries), len(q) // len(self._requests)
        shape = (1 + count, 2, PAGE_TOKENS, q.shape[2])
        exact = torch.zeros(shape, dtype=q.dtype, device=q.device)
        places = np.arange(1, 1 + count, dtype=np.int32)
        listed = self._entries.copy()
        listed[:, 0] = places
        behind = np.full(len(q), int(listed[:, 3].max()) + PAGE_TOKENS, np.int32)
        packs = packs_of(self._entries[:, 0], places[:, None])
        each = rows * np.arange(len(self._ends), dtype=np.int32)
        positions, table, entries, ends, row_ends = send(
            q.device, behind, packs, listed, self._ends, each
        )
        ops.unpack_pages(pool.pages, exact, table, pages=1)
        kv = ops.PagedKv(exact, 0, 1, how.scale, pool.rope)
        return ops.attend_prefill(
            q, positions, entries, kv, row_offsets=row_ends, entry_offsets=ends
        )


def _middle(x: Vectors, counts: Sequence[int]) -> torch.Tensor:
    """Of each head the tokens that are packed: [N, P, D]."""
    parts = [one[SINK_TOKENS : SINK_TOKENS + count] for one, count in zip(x, counts, strict=True)]
    return torch.cat(parts).view(-1, PAGE_TOKENS, x[0].shape[-1])


def _others(x: Vectors, counts: Sequence[int]) -> Vectors:
    """Of each head the tokens that stay exact."""
    return [
        torch.cat((one[:SINK_TOKENS], one[SINK_TOKENS + count :])) if count else one
        for one, count in zip(x, counts, strict=True)
    ]

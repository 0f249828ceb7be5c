"""`PackedPrefix`: the packed pages of one request, written as its pages fill and read as they are.

The exact pool lets go of what lies behind the newest tokens, so a page has to be packed before:
whoever moves a request on has its full pages packed first. Packed pages are a prefix of a text:
requests that begin alike share them, and nobody writes one a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.errors import PoolFull
from kvweave.ops import Table
from kvweave.packed_page import PAGE_TOKENS
from kvweave.plan import Rows
from kvweave.runner.kv.layer_packing import LayerPacking
from kvweave.runner.kv.layer_pages import blocks_of_layer, pages_of_layer
from kvweave.runner.kv.packed_pool import RECENT_TOKENS, SCRATCH_TOKENS, SINK_TOKENS, PackedPool
from kvweave.runner.kv.pool_bases import needs_steps, some_queries
from kvweave.runner.kv.rows_in_place import attend_in_place, reads_in_place
from kvweave.runner.kv.states import States, merged_states
from kvweave.runner.kv.tables import Int32, RowTable, send
from kvweave.runner.kv.turned_rows import LayerBasis, attend_turned
from kvweave.runner.model.layer_spec import LayerSpec, Scores
from kvweave.runner.report import PackedReport


class PageCopy(Protocol):
    """What is told of the pages of a text that is being packed."""

    def add(self, exact: torch.Tensor, packs: Int32, left_out: int) -> None:
        """Exact pages, and the packs that name them, when they have been packed.

        What is chosen by them is chosen without so many tokens at the beginning of the first pack.
        """

    def add_queries(self, q: torch.Tensor, first: int, kv_heads: int) -> None:
        """Queries f32 [R, H, D] on the host, as `ops.Moments.add_queries` takes them."""

    def drop(self) -> None:
        """The request is released: what waits for more of its pages is forgotten."""


class PackedPrefix:
    """The packed pages of one request: those of its first `tokens` tokens, whole pages.

    `reserve_tokens`: room is set aside behind the prompt's own. `reuse` as for `KvCache.admit`.

    # Errors
    `PoolFull` when prompt and reserve do not fit; nothing is held then.
    """

    basis: int | None = None
    """The basis that its pages are packed in, by its number in the pool; None: the shared one."""

    _layers: LayerPacking | None = None
    """What packs the pages that the rows under way fill, while these are computed."""

    _exact: int | None = None
    """The first token that was computed over a part of what is packed; None: no token was."""

    def __init__(
        self,
        pool: PackedPool,
        tokens: Rows,
        *,
        namespace: str,
        reuse: str,
        regime: int,
        reserve_tokens: int = 0,
    ) -> None:
        self.pool = pool
        self.copy: PageCopy | None = None
        self.report = PackedReport()
        found = 0 if reuse == "none" else pool.found_prefix(tokens, namespace, regime)
        # The last token of an admission is never reused, and a prefix is taken in whole pages.
        first = tokens[: found + 1]
        self.request = pool.cache.admit(
            first,
            namespace=namespace,
            reuse=reuse,
            reserve_tokens=len(tokens) + reserve_tokens - len(first),
            regime=regime,
        )
        self.tokens = self.request.plan.reused_prefix // PAGE_TOKENS * PAGE_TOKENS
        self.request.take_copies()
        self.request.finish_copies()
        self._blocks = self.request.entries()[: self.tokens // PAGE_TOKENS, 0]
        pool.readers.add(self)

    def fork(self) -> PackedPrefix:
        """The packed pages of a fork: all are shared, and a page that comes to be full is its own.

        Only whole pages are written, so what copying a page in progress asks for is left undone.
        """
        fork = copy(self)
        fork.copy, fork.request = None, self.request.fork()
        fork.report = PackedReport()
        self.pool.readers.add(fork)
        return fork

    @property
    def full_at(self) -> int:
        """Tokens that the request has when its next page is full."""
        return self.tokens + PAGE_TOKENS

    def reused(self, exact: int) -> int:
        """The rows that need not be computed, where `exact` are in exact pages at the start.

        Packed pages count where the sink is there, which is never read from one.
        """
        return max(exact, self.tokens) if exact == SINK_TOKENS else exact

    def pack(self, request: KvRequest, done: int) -> None:
        """Packs the pages that are full now that `done` tokens of the request have their KV.

        # Errors
        `PoolFull` without room; nothing has changed then.
        """
        pages, blocks = self.claim(request, done)
        self._convert(True, request, pages, blocks)
        self.filled(blocks)

    def expect(self, first: int, end: int) -> None:
        """Has pages that the rows [first, end) fill packed as their layers are written.

        Their rows come next, and then `pack`. Where a shared basis is to be made of them yet they
        are packed once all are there.
        """
        pool, unknown = self.pool, self.basis is None
        if pool.aside is None or end < self.full_at:
            return
        if pool.bases is not None and unknown and pool.bases.wanted(self._filled(end)).any():
            return
        self._layers = LayerPacking(pool, pool.aside, (first, end), self.basis)

    def _filled(self, end: int) -> Int32:
        """The pages of the text that are full at an end and not packed yet."""
        return np.arange(self.tokens // PAGE_TOKENS, end // PAGE_TOKENS, dtype=np.int32)

    def written(self, request: KvRequest, layer: int, rows: RowTable) -> None:
        """Takes note of a layer of which the request's rows have been written."""
        if self._layers is not None:
            self._layers.written(layer, rows, lambda: self._next_packs(request, rows))

    def _next_packs(self, request: KvRequest, rows: RowTable) -> Int32:
        pages, blocks = self.claim(request, int(rows.rows[-1]) + 1)
        return self._packs(request, pages, blocks)

    def claim(self, request: KvRequest, done: int) -> tuple[npt.NDArray[np.int64], Int32]:
        """The pages that are full once `done` tokens have their KV, and blocks for them [N].

        # Errors
        `PoolFull` without room; nothing has changed then.
        """
        if done < self.full_at:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        end = done // PAGE_TOKENS * PAGE_TOKENS
        self._append(request, end)
        pages = np.arange(self.tokens // PAGE_TOKENS, end // PAGE_TOKENS)
        return pages, self._own_blocks(pages)

    def filled(self, blocks: Int32) -> None:
        """Says that claimed blocks have been packed."""
        self._blocks = np.concatenate((self._blocks, blocks))
        self.tokens += PAGE_TOKENS * len(blocks)

    def take_queries(self, layer: int, q: torch.Tensor, rows: Rows) -> None:
        """Takes note of some of the queries [R, H, D] of a prompt's rows, by positions i32 [R].

        They say which errors of keys matter, where a basis is to be made that spends bits by that.
        """
        if not needs_steps(self.pool.pages.format):
            return
        shared, filled = self.pool.bases, self._filled(int(rows[-1]) + 1)
        if shared is not None and not shared.wants_queries(filled):
            shared = None
        takers = [taker for taker in (shared, self.copy) if taker is not None]
        if takers:
            some = some_queries(q)
            heads = self.pool.kv_heads
            for taker in takers:
                taker.add_queries(some, layer * heads, heads)

    def freeze(self, request: KvRequest, name: str) -> int:
        """Packs all of a text that was prefilled alone, and freezes it under a name.

        Its last page has as many tokens as are left for it. Returns how many at its beginning stay
        exact beside its pages.

        # Errors
        `PoolFull` without room, or where the frozen share does not suffice, `QuotaExceeded`.
        """
        length = request.length
        self.pack(request, length)
        if rest := length - self.tokens:
            self._append(request, length)
            page = np.asarray([self.tokens // PAGE_TOKENS])
            self._convert(True, request, page, self.request.entries()[-1:, 0], rest)
        self.request.commit(length, length)
        self.request.freeze(name, 0, length)
        if self.pool.firsts is None:
            return 0
        return self.pool.firsts.keep(self.request, request, self.pool.exact)

    def _append(self, request: KvRequest, end: int) -> None:
        """Makes room for the tokens before an end, in blocks that nobody else writes."""
        self._grow(request.tokens[:end])

    def _grow(self, tokens: Rows) -> None:
        """As `_append`, for a text of these tokens."""
        known = self.request.length
        if len(tokens) > known:
            self.request.append(tokens[known:])
            # A page is written whole: what a shared block in progress had is not copied first.
            self.request.take_copies()
            self.request.finish_copies()

    def unpack_newest(self, request: KvRequest) -> None:
        """Fills the newest exact pages of a request whose rows go on behind what is packed."""
        first = max(SINK_TOKENS, self.tokens - RECENT_TOKENS) // PAGE_TOKENS
        pages = np.arange(first, self.tokens // PAGE_TOKENS)
        self._convert(False, request, pages, self._blocks[first:])

    def _own_blocks(self, pages: npt.NDArray[np.int64]) -> Int32:
        """The packed blocks of some pages of the text, whose last tokens are the request's own."""
        entries = self.request.entries()
        lasts = (pages + 1) * PAGE_TOKENS - 1
        blocks: Int32 = entries[np.searchsorted(entries[:, 3], lasts, side="right") - 1, 0]
        return blocks

    def _convert(
        self,
        pack: bool,
        request: KvRequest,
        pages: npt.NDArray[np.int64],
        blocks: Int32,
        tokens: int = PAGE_TOKENS,
    ) -> None:
        """Packs or unpacks some pages in a row, of all layers and heads in one launch.

        `tokens`: the first so many of each.
        """
        if not len(pages):
            return
        pool, packs = self.pool, self._packs(request, pages, blocks, tokens)
        if not pack:
            pool.unpack(packs, pool.exact)
            return
        left_out = min(pool.first_tokens, tokens) if pages[0] == 0 else 0
        layers, self._layers = self._layers, None
        beside = layers is not None and layers.finish(packs)
        if not beside:
            pool.pack(packs, pages.astype(np.int32), self.basis, left_out)
        self.report.note(len(pages), beside, "" if layers is None else layers.why)
        if self.copy is not None:
            self.copy.add(pool.exact, packs, left_out)

    def _packs(
        self,
        request: KvRequest,
        pages: npt.NDArray[np.int64],
        blocks: Int32,
        tokens: int = PAGE_TOKENS,
    ) -> Int32:
        """Some pages in a row and their packed blocks [N], as `ops.pack_pages` takes them."""
        entries, size = request.entries(), self.pool.exact.shape[2]
        end = pages[-1] * PAGE_TOKENS + tokens
        starts = np.arange(pages[0] * PAGE_TOKENS, end, size)
        at = np.searchsorted(entries[:, 3], starts)
        assert np.array_equal(entries[at, 3], starts), "what is packed lies in exact pages"
        exact = np.zeros(len(pages) * (PAGE_TOKENS // size), np.int32)
        exact[: len(at)] = entries[at, 0]
        return packs_of(blocks, exact.reshape(len(pages), -1), tokens)

    def read_in_part(self, position: int) -> None:
        """Says that the token at a position was computed over a part of what is packed.

        What was decoded with a choice of pages is not what a prefill would have computed.
        """
        self._exact = position if self._exact is None else min(self._exact, position)

    def commit_text(self, request: KvRequest, computed: int) -> None:
        """Lets later prompts find the packed pages of a request's text, and its sink.

        Pages that find no room are left out.
        """
        with suppress(PoolFull):
            self.pack(request, computed)
        self.commit()
        if computed >= SINK_TOKENS:
            request.commit(SINK_TOKENS, SINK_TOKENS)

    def commit(self) -> None:
        """Lets later prompts find what is packed, up to what was computed over a part of it."""
        exact = self.tokens if self._exact is None else min(self._exact, self.tokens)
        if whole := exact // PAGE_TOKENS * PAGE_TOKENS:
            self.request.commit(whole, whole)
            if self.pool.documents is not None:
                self.pool.documents.remembered(self.request, whole)

    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of packed blocks that this request alone pays for, and of those that it shares.

        The latter with the bases that documents have of their own.
        """
        page = self.pool.cache.shape.page_bytes
        own, shared = self.request.kv_bytes()
        size = self.pool.pages.format.page_bytes
        return own // page * size, shared // page * size + self.pool.more_bytes(self.request)

    def scratch_bytes(self, tokens: int) -> int:
        """What a chunk of a prompt of so many tokens has unpacked at most."""
        return min(tokens, SCRATCH_TOKENS) * self.pool.token_bytes

    def release(self) -> None:
        """Gives the blocks back; safe to call twice."""
        if self._layers is not None:
            self._layers.join()
            self._layers = None
        if self.copy is not None:
            self.copy.drop()
            self.copy = None
        self.request.release()
        self.pool.readers.discard(self)

    # ---- reading --------------------------------------------------------------------------

    def entries(self) -> Int32:
        """All packed pages behind the sink, i32 [N, 5]; a decode step cuts them by its position."""
        blocks = self._blocks[SINK_TOKENS // PAGE_TOKENS :]
        rows = np.zeros((len(blocks), 5), np.int32)
        rows[:, 0], rows[:, 2] = blocks, PAGE_TOKENS
        rows[:, 3] = SINK_TOKENS + PAGE_TOKENS * np.arange(len(blocks))
        return rows

    def exact_entries(self, first: int) -> Int32:
        """What lies in exact pages beside the windows, from a position on: of a prefix nothing."""
        return np.zeros((0, 5), np.int32)

    def step_entries(self, first: int) -> Int32:
        """The same as decode steps read it."""
        return self.exact_entries(first)

    def _behind(self, prompt: int) -> Int32:
        """Entries i32 [N, 5] of `_blocks`, which are of pages that end behind so many tokens.

        They begin behind these, and behind the sink.
        """
        first = PAGE_TOKENS * (prompt // PAGE_TOKENS + np.arange(len(self._blocks)))
        rows = np.zeros((len(self._blocks), 5), np.int32)
        rows[:, 3] = np.maximum(first, max(prompt, SINK_TOKENS))
        rows[:, 0], rows[:, 1], rows[:, 2] = self._blocks, rows[:, 3] - first, PAGE_TOKENS
        return rows[rows[:, 1] < rows[:, 2]]

    def end_of_gap(self, request: KvRequest) -> int:
        """Where exact pages begin again behind the sink: what lies between is read packed."""
        starts = request.entries()[:, 3]
        behind = starts[starts >= SINK_TOKENS]
        return int(behind[0]) if len(behind) else SINK_TOKENS

    def merged(
        self,
        layer: int,
        of: LayerSpec,
        rope: ops.RopeTable,
        rows: tuple[torch.Tensor, Table],
        gap_end: int,
        exact: States,
    ) -> States:
        """Attention of a prompt's rows over packed tokens and, as `exact` has it, over the others.

        `rows`: queries [R, H, D] and their positions i32 [R], all of them at or behind `gap_end`,
        where packed tokens end. A few rows read those of this layer as they lie. For a chunk of a
        prompt they are unpacked into scratch, `SCRATCH_TOKENS` at once, which costs what a copy
        does. What lies in exact pages beside the windows is read there. Heads with windows have all
        that they see in windows.
        """
        heads = self.pool.heads
        aside = before(self.exact_entries(SINK_TOKENS), gap_end)
        if len(aside):
            ends = heads.offsets(np.asarray([0, len(aside)], np.int32))
            entries, offsets = send(self.pool.device, aside, ends)
            kept, reach, count = self.pool.exact, heads.others(layer), self.pool.kv_heads
            kv = ops.PagedKv(kept, layer, count, of.scale, rope, None, of.softcap, reach)
            states = ops.attend_prefill(*rows, entries, kv, entry_offsets=offsets)
            exact = merged_states(exact, states)
        known = layer, of, rope, rows, gap_end, exact
        if reads_in_place(self.pool, len(rows[0])):
            return self.read_in_place(*known)
        return self.read_packed(*known, (heads.others(layer), heads.tables))

    def read_in_place(
        self,
        layer: int,
        of: LayerSpec,
        rope: ops.RopeTable,
        rows: tuple[torch.Tensor, Table],
        gap_end: int,
        exact: States,
    ) -> States:
        """As `merged`, of rows that read packed pages as they lie."""
        packed = before(self.entries(), gap_end)
        if not len(packed):
            return exact
        ends = self.pool.heads.offsets(np.asarray([0, len(packed)], np.int32))
        entries, offsets = send(self.pool.device, packed, ends)
        kv = self.pool.read(layer, of, rope, self.pool.heads.others(layer))
        return merged_states(exact, attend_in_place(rows, kv, entries, offsets))

    def read_packed(
        self,
        layer: int,
        of: Scores,
        rope: ops.RopeTable,
        rows: tuple[torch.Tensor, Table],
        gap_end: int,
        exact: States,
        read: tuple[ops.Reach | None, int],
    ) -> States:
        """As `merged`, where heads `read` by a reach, over so many tables of a request."""
        reach, tables = read
        for part, number in self._parts(before(self.entries(), gap_end), of.softcap):
            pages, listed = unpacked(self.pool, layer, part, in_basis=number is not None)
            ends = np.full(tables + 1, len(listed), np.int32)
            ends[0] = 0
            entries, offsets = send(pages.device, listed, ends)
            heads = self.pool.kv_heads
            kv = ops.PagedKv(pages, layer, heads, of.scale, rope, None, of.softcap, reach)
            if number is None:
                states = ops.attend_prefill(*rows, entries, kv, entry_offsets=offsets)
            else:
                basis = LayerBasis.of(self.pool, layer, number)
                states = attend_turned(basis, rows, (kv, entries, offsets))
            exact = merged_states(exact, states)
        return exact

    def _parts(self, entries: Int32, softcap: float | None) -> Iterator[tuple[Int32, int | None]]:
        """Entries in parts of so many pages as are unpacked at once, each in one basis.

        With the number of that where rows are turned into it; None where keys and values are turned
        out of it: keys that are moved, or whose scores are capped, and on a GPU, where turning the
        rows of a long chunk takes more than turning what they read.
        """
        bases, turned = self.pool.bases, np.full(len(entries), -1, np.int32)
        if bases is not None and softcap is None and self.pool.device.type == "cpu":
            turned = np.where(entries[:, 4] == 0, self.pool.bases_of(entries[:, 0]), turned)
        for run in np.split(np.arange(len(entries)), np.flatnonzero(np.diff(turned)) + 1):
            for part in _in_parts(entries[run]):
                number = int(turned[run[0]])
                yield part, None if number < 0 else number


def before(entries: Int32, end: int) -> Int32:
    """Of entries in order of position what lies before an end."""
    kept: Int32 = entries[entries[:, 3] < end].copy()
    kept[:, 2] = np.minimum(kept[:, 2], kept[:, 1] + end - kept[:, 3])
    return kept


def _in_parts(entries: Int32) -> Iterator[Int32]:
    """Entries in parts of so many pages as are unpacked at once."""
    turns = np.ones(len(entries), np.int64)
    turns[1:] = entries[1:, 0] != entries[:-1, 0]
    part = (np.cumsum(turns) - 1) // (SCRATCH_TOKENS // PAGE_TOKENS)
    yield from np.split(entries, np.flatnonzero(np.diff(part)) + 1) if len(entries) else ()


def unpacked(
    pool: PackedPool, layer: int, entries: Int32, *, in_basis: bool = False
) -> tuple[torch.Tensor, Int32]:
    """One layer's packed pages in exact ones of their own, and what entries say of those instead.

    `in_basis`: as `ops.unpack_pages` has it.
    """
    blocks, which = np.unique(entries[:, 0], return_inverse=True)
    heads = pool.kv_heads
    pages = pages_of_layer(pool.exact, heads, PAGE_TOKENS, layer, len(blocks))
    exact = blocks_of_layer(heads, len(blocks))
    listed = entries.copy()
    listed[:, 0] = exact[which]
    packs = packs_of(blocks, (exact + layer * heads)[:, None])
    pool.unpack_layer(layer, packs, pages, in_basis)
    return pages, listed


def packs_of(packed: Int32, exact: Int32, tokens: int = PAGE_TOKENS) -> Int32:
    """Packed blocks [N] of so many tokens and the exact ones [N, n] of each: `ops.pack_pages`'."""
    counts = np.full(len(packed), tokens, np.int32)
    return np.column_stack((packed, counts, exact)).astype(np.int32)

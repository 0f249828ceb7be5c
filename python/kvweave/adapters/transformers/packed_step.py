"""One forward of a model whose full pages are packed: what attends for its layers.

Every row reads the sink and its own tokens exactly, and the newest ones before the forward's first
of its text; what lies between is packed. A decode step reads packed pages as they are. Of several
tokens a layer's exact ones, old and new, are put side by side in pages of that layer alone: from
there they are attended, and full pages packed, so the KV of a prompt is never there for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.transformers.live_rows import LiveRow, LiveRows
from kvweave.adapters.transformers.packed_layers import LayeredPool
from kvweave.adapters.transformers.paged_step import Attends, States
from kvweave.adapters.transformers.ranked_rows import RankedEntries, RowReads
from kvweave.adapters.transformers.step_rows import RowVectors, StepRows, Vectors
from kvweave.packed_page import PAGE_TOKENS
from kvweave.plan import Rows
from kvweave.runner.kv.packed_pool import RECENT_TOKENS, SINK_TOKENS
from kvweave.runner.kv.packed_prefix import PackedPrefix, before, packs_of
from kvweave.runner.kv.states import merged_states
from kvweave.runner.kv.tables import Int32, send, send_index
from kvweave.runner.kv.token_places import entries_at, no_places, pages_at, places_of
from kvweave.runner.model.sinks import beside_sinks


class PackedStep:
    """The tables of one forward, whose arguments are those of a `PagedStep`.

    `pool` has packed pages. Blocks for pages that come to be full are taken when it is made.

    # Errors
    `PoolFull` without room for them.
    """

    def __init__(
        self,
        live: LiveRows,
        pool: LayeredPool,
        written: Sequence[Rows],
        wanted: Sequence[int],
        columns: int,
        is_answer: bool,
    ) -> None:
        requests = [row.request for row in live.rows]
        rows = StepRows.of(requests, written, wanted, columns)
        self._vectors = RowVectors(rows, live.pool.geometry)
        sent = send(live.pool.geometry.device, rows.ids, rows.positions)
        self.ids, self.positions = (torch.as_tensor(table).long() for table in sent)
        made = _Single if is_answer and rows.is_decode else _Several
        self._reads: _Single | _Several = made(live, pool, rows, written)

    def attend(self, layer: int, vectors: Vectors, how: Attends) -> torch.Tensor:
        """Takes K, V of a layer and attends: q [B, H, n, D], k, v [B, G, n, D] → [B, n, H, D].

        # Errors
        As `PagedStep.states`.
        """
        self._vectors.check(layer, vectors)
        q, new = self._vectors.queries(vectors), self._vectors.new(vectors)
        out = beside_sinks(self._reads.states(layer, q, new, how), how.sinks)
        return self._vectors.spread(out)

    def done(self) -> None:
        """Says that all layers have been attended."""
        self._reads.done()


class _Single:
    """A decode step: one token of each row, over packed pages as they are."""

    def __init__(
        self, live: LiveRows, pool: LayeredPool, rows: StepRows, written: Sequence[Rows]
    ) -> None:
        self._exact, self._packed = live.pool, pool
        requests = [row.request for row in live.rows]
        positions = np.concatenate(rows.computed)
        entries = [request.entries() for request in requests]
        listed = [
            before(_packed(row).entries(), max(0, int(at) - RECENT_TOKENS + 1))
            for row, at in zip(live.rows, positions, strict=True)
        ]
        self._width = max(map(len, listed))
        slots = [r.slots(at) for r, at in zip(requests, written, strict=True)]
        ends = (np.cumsum([0, *map(len, parts)], dtype=np.int32) for parts in (entries, listed))
        tables = positions, np.concatenate(slots), np.concatenate(entries), np.concatenate(listed)
        sent = send(live.pool.geometry.device, *tables, *ends)
        self._places, self._slots, self._entries, self._listed, self._ends, self._listed_ends = sent

    def states(
        self, layer: int, q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], how: Attends
    ) -> States:
        exact, space = self._exact, self._exact.workspace
        ops.write_pages(exact.pages, layer, *new, self._slots)
        heads, known = exact.geometry.kv_heads, (how.scale, exact.rope, None, how.softcap)
        reach = ops.Reach(1, exact.cache.head_rows(layer))
        kv = ops.PagedKv(exact.pages, layer, heads, *known, reach)
        read = q, self._places, self._entries, kv
        states = ops.attend_decode(*read, entry_offsets=self._ends, workspace=space)
        if not self._width:
            return states
        entries: ops.Table = self._packed.entries_of(layer, self._listed)
        ends = self._listed_ends
        packed = ops.PackedKv(self._packed.pages, 0, heads, *known)
        most, bounds = self._packed.most, self._packed.bounds
        if bounds is not None and self._width > most:
            reads = RowReads.alike(len(q), most)
            ranked = RankedEntries(entries, entries, ends, bounds, self._width, PAGE_TOKENS, reads)
            entries, ends, packed = ranked.of(q, packed)
        behind = ops.attend_packed(
            q, self._places, entries, packed, entry_offsets=ends, workspace=space
        )
        return merged_states(states, behind)

    def done(self) -> None:
        """Nothing: pages are packed before the next tokens come."""


@dataclass(frozen=True)
class _Text:
    """What a forward computes of one live row, from position `start` on, and finds beside it.

    Packed tokens are read up to `gap_end`. `pages` are those that come to be full, and `blocks`
    what they are packed into.
    """

    row: LiveRow
    start: int
    gap_end: int
    pages: Rows
    blocks: Int32

    @staticmethod
    def of(row: LiveRow, written: Rows) -> _Text:
        """A row whose positions from the first one written on are new."""
        start, packed = int(written[0]), _packed(row)
        pages, blocks = packed.claim(row.request, row.request.length)
        # What a prompt finds packed it reads so; a row that goes on has its newest tokens exactly.
        newest = start if row.before is None else start - RECENT_TOKENS + 1
        gap_end = max(SINK_TOKENS, min(newest, start))
        return _Text(row, start, gap_end, pages.astype(np.int32), blocks)

    @property
    def old(self) -> Rows:
        """The positions before the new ones that are read exactly."""
        sink = np.arange(min(self.start, SINK_TOKENS), dtype=np.int32)
        return np.append(sink, np.arange(self.gap_end, self.start, dtype=np.int32))

    @property
    def new(self) -> Rows:
        """The new positions."""
        return np.arange(self.start, self.row.request.length, dtype=np.int32)


class _Several:
    """Several tokens of rows: each layer's exact ones in pages of its own, old beside new."""

    def __init__(
        self, live: LiveRows, pool: LayeredPool, rows: StepRows, written: Sequence[Rows]
    ) -> None:
        self._exact, self._packed = live.pool, pool
        # Rows of one text are one live row, whose tokens the first of them computes.
        pairs = zip(live.rows, written, strict=True)
        self._texts = {id(row): _Text.of(row, at) for row, at in pairs if len(at)}
        self._rows = [self._texts[id(row)] for row in live.rows]
        heads, known = pool.kv_heads, {}
        count = 0
        sources, copies, slots, kept, packs = [], [], [], [], []
        for number, text in self._texts.items():
            request = text.row.request
            there = np.concatenate((text.old, text.new))
            pages, which = np.unique(there // PAGE_TOKENS, return_inverse=True)
            places = no_places(len(there))
            # Behind the null block, one block for each page that has any of them.
            blocks = heads * (1 + count + np.arange(len(pages), dtype=np.int32))
            places[:, 0], places[:, 1] = blocks[which], there % PAGE_TOKENS
            known[number] = entries_at(there, places)
            count, old = count + len(pages), len(text.old)
            source = text.row.before or request
            sources.append(places_of(source.entries(), text.start)[text.old])
            copies.append(places[:old])
            kept.append(places_of(request.entries(), request.length)[text.new])
            slots.append(places[old:, :2])
            packs.append(packs_of(text.blocks, blocks[np.searchsorted(pages, text.pages), None]))
        self._count = heads * (1 + count)
        self._sources, self._copies = np.concatenate(sources), np.concatenate(copies)
        self._packs = np.concatenate(packs)
        self._filled = np.concatenate([text.pages for text in self._texts.values()])
        newest = np.concatenate(kept)
        stays = np.flatnonzero(newest[:, 0] >= 0).astype(np.int32)
        entries = [known[id(row)] for row in live.rows]
        tables = (
            np.concatenate(rows.computed),
            np.concatenate(slots),
            np.ascontiguousarray(newest[stays, :2]),
            np.concatenate(entries),
            np.cumsum([0, *map(len, entries)], dtype=np.int32),
            rows.ends,
        )
        device = live.pool.geometry.device
        self._stays = send_index(device, stays).long()
        self._ends = rows.ends.tolist()
        self._places, self._slots, self._kept, self._entries, self._entry_ends, self._row_ends = (
            send(device, *tables)
        )

    def states(
        self, layer: int, q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], how: Attends
    ) -> States:
        exact, pool = self._exact, self._packed
        beside = self._beside(layer, new)
        known = how.scale, exact.rope, None, how.softcap
        kv = ops.PagedKv(beside, 0, pool.kv_heads, *known)
        states = ops.attend_prefill(
            q,
            self._places,
            self._entries,
            kv,
            row_offsets=self._row_ends,
            entry_offsets=self._entry_ends,
            workspace=exact.workspace,
        )
        states = self._merged(layer, q, how, states)
        if len(self._stays):
            k, v = (x.index_select(0, self._stays) for x in new)
            ops.write_pages(exact.pages, layer, k, v, self._kept)
        pool.take_queries(layer, q, self._filled)
        if len(self._packs):
            pool.pack_layer(layer, self._packs, self._filled, beside)
        return states

    def _beside(self, layer: int, new: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """A layer's exact tokens in pages of its own [pages, 2, P, D]."""
        pool = self._packed
        shape = (self._count, 2, PAGE_TOKENS, pool.head_dim)
        pages = torch.zeros(shape, dtype=pool.exact.dtype, device=pool.device)
        heads = pool.kv_heads
        there = pages_at(pool.exact, layer, heads, self._sources)
        here = pages_at(pages, 0, heads, self._copies)
        for side in (0, 1):
            pages[here[0], side, here[1]] = pool.exact[there[0], side, there[1]]
        ops.write_pages(pages, 0, *new, self._slots)
        return pages

    def _merged(self, layer: int, q: torch.Tensor, how: Attends, exact: States) -> States:
        """Attention over packed tokens as well, unpacked row by row."""
        if all(text.gap_end == SINK_TOKENS for text in self._rows):
            return exact
        parts = []
        for text, first, end in zip(self._rows, self._ends, self._ends[1:], strict=False):
            own = exact[0][first:end], exact[1][first:end]
            rows = q[first:end], self._places[first:end]
            packed, rope = _packed(text.row), self._exact.rope
            parts.append(packed.read_packed(layer, how, rope, rows, text.gap_end, own, (None, 1)))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def done(self) -> None:
        """Says that the pages that are full have been packed."""
        for text in self._texts.values():
            _packed(text.row).filled(text.blocks)


def _packed(row: LiveRow) -> PackedPrefix:
    assert row.packed is not None
    return row.packed

"""`ResumedPages`: the packed tokens of a payload, in the pool where their request goes on."""

from __future__ import annotations

import numpy as np

from kvweave.cache import KvCache, KvRequest
from kvweave.errors import InvalidArgument
from kvweave.packed_page import PAGE_TOKENS
from kvweave.payload import KvPayload
from kvweave.payload.packed import (
    ASIDE,
    ASIDE_ENTRIES,
    BASES,
    BOUNDS,
    ENTRIES,
    PAGES,
    WHICH,
    PackedHeader,
)
from kvweave.payload.page_format import PageFormat
from kvweave.payload.pages import Places, scatter
from kvweave.runner.kv.packed_pool import RECENT_TOKENS, PackedPool
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.kv.pool_bases import BlockBases
from kvweave.runner.kv.sent_pages import choices_of, choosing_ranks, pages_of, ranks
from kvweave.runner.kv.sent_texts import expect_formats, taken_texts
from kvweave.runner.kv.tables import Int32
from kvweave.runner.kv.token_places import entries_at, entries_in_place, places_of


def expect_packed_alike(pool: PackedPool, header: PackedHeader | None) -> PackedHeader:
    """What a payload says of packed tokens, where they are of a pool's format and head map.

    # Errors
    `InvalidArgument` for others, and for none.
    """
    expected = PageFormat.of(pool.pages.format).name
    got = "exact pages alone" if header is None else header.format.name
    if header is None or got != expected:
        raise InvalidArgument(f"payload format: expected {expected}, got {got}")
    heads = pool.heads
    alike = np.array_equal(heads.sights.reshape(-1, 2), np.asarray(header.sights))
    alike &= np.array_equal(heads.budget_of.reshape(-1), np.asarray(header.chooses))
    if not alike or header.choices != choices_of(pool):
        raise InvalidArgument(
            "payload head map: expected heads that read as they do here, got others"
        )
    expect_formats(pool, header.texts)
    return header


class ResumedPages(PackedPrefix):
    """The packed tokens of a payload in a pool, and what is packed behind them.

    Its packed blocks lie in those that the request has for pages of its own, and in more where
    these do not suffice, texts of several formats beside the pool; its exact tokens aside lie in
    blocks of `cache`, as its own did. Nobody finds any of it. The request's coming pages are packed
    as they would be where it comes from.

    # Errors
    `PoolFull` when prompt, blocks, bases or the reserve do not fit; nothing is held then.
    """

    def __init__(
        self,
        pool: PackedPool,
        cache: KvCache,
        payload: KvPayload,
        packed: PackedHeader,
        reserve_tokens: int,
    ) -> None:
        header = payload.header
        tokens = payload.tokens.cpu().numpy()
        self._more: list[KvRequest] = []
        self._texts: list[KvRequest] = []
        self._kept: list[KvRequest] = []
        # It and its forks, while they read.
        self._readers = {self}
        super().__init__(
            pool,
            tokens,
            namespace=header.namespace,
            reuse="none",
            regime=header.regime,
            reserve_tokens=reserve_tokens,
        )
        try:
            self.tokens = len(tokens) // PAGE_TOKENS * PAGE_TOKENS
            self._grow(tokens[: self.tokens])
            self._until, self._prompt = packed.tokens, len(tokens)
            self._listed = self._taken(payload, packed)
            self._aside = self._taken_aside(cache, payload)
        except BaseException:
            self.release()
            raise

    def _taken(self, payload: KvPayload, packed: PackedHeader) -> Int32:
        """Writes packed blocks and says what they are packed in; their entries i32 [N, 5]."""
        pool, parts = self.pool, payload.parts
        blocks = self.request.entries()[:, 0]
        # One more than are taken has the basis of what is still to be packed.
        if (lacking := packed.blocks + 1 - len(blocks)) > 0:
            room = np.zeros(lacking * PAGE_TOKENS, np.int32)
            self._more.append(pool.cache.admit(room, reuse="none"))
            blocks = np.concatenate((blocks, self._more[0].entries()[:, 0]))
        taken, left = np.split(blocks, [packed.blocks])
        rows = pool.rows(blocks)
        if pool.bases is not None:
            which = np.full(len(blocks), packed.basis or 0, np.int32)
            which[: len(taken)] = parts[WHICH].cpu().numpy()
            pool.bases.put(rows, BlockBases(which, tuple(parts[BASES].cpu())))
            if packed.basis is not None:
                self.basis = int(pool.bases.numbers(pool.rows(left[:1]))[0])
        data, rows = pool.pages.data, rows[: len(taken)]
        sent, others = (ranks(pool, reads_all=all_) for all_ in (True, False))
        data.index_copy_(0, pages_of(pool, rows, sent), parts[PAGES].to(data.device).flatten(0, 1))
        data.index_fill_(0, pages_of(pool, rows, others), 0)
        self._text_bytes = taken_texts(pool, payload, packed, self._texts)
        named = np.concatenate((taken, *(text.entries()[:, 0] for text in self._texts)))
        if len(bounded := choosing_ranks(pool)):
            assert pool.bounds is not None
            index = pages_of(pool, named, bounded)
            pool.bounds.index_copy_(0, index, parts[BOUNDS].to(data.device).flatten(0, 1))
        entries: Int32 = parts[ENTRIES].cpu().numpy().copy()
        entries[:, 0] = named[entries[:, 0]]
        return entries

    def _taken_aside(self, cache: KvCache, payload: KvPayload) -> Int32:
        """Writes exact tokens aside as they lay; in pages of another size, one behind the other.

        In the order in which they lay, by which steps read them.
        """
        said = payload.parts[ASIDE_ENTRIES].cpu().numpy()
        size, length = cache.shape.page_tokens, payload.header.tokens
        if not len(said):
            return said
        places = places_of(said, length)
        positions = np.flatnonzero(places[:, 0] >= 0).astype(np.int32)
        places = places[positions]
        if payload.header.page_tokens != size:
            at = np.empty(len(positions), np.int32)
            at[np.lexsort((places[:, 1], places[:, 0]))] = np.arange(len(positions))
            places[:, 0], places[:, 1] = at // size, at % size
        numbers, which = np.unique(places[:, 0], return_inverse=True)
        self._kept.append(cache.admit(np.zeros(len(numbers) * size, np.int32), reuse="none"))
        places[:, 0] = np.sort(self._kept[0].entries()[:, 0])[which]
        to = Places(positions, places[:, 0], places[:, 1], places[:, 2])
        scatter(self.pool.exact, to, payload.parts[ASIDE])
        return entries_at(positions, places)

    def fork(self) -> ResumedPages:
        """What a fork reads: the same."""
        fork = super().fork()
        assert isinstance(fork, ResumedPages)
        fork._more = [held.fork() for held in self._more]
        fork._kept = [held.fork() for held in self._kept]
        fork._texts = [held.fork() for held in self._texts]
        for held in fork._texts:
            assert self.pool.documents is not None
            self.pool.documents.hold(held)
        fork._readers.add(fork)
        return fork

    def entries(self) -> Int32:
        """All packed tokens behind the sink, of the payload and then what was decoded."""
        return np.concatenate((self._listed, self._behind(self._until)))

    def exact_entries(self, first: int) -> Int32:
        """The tokens aside, of an entry's position on."""
        return self._aside[self._aside[:, 3] >= first]

    def step_entries(self, first: int) -> Int32:
        """The same in as few entries as where they come from."""
        places = places_of(self._aside, self._prompt)
        return entries_in_place(places, first, self._prompt - RECENT_TOKENS)

    def reused(self, exact: int) -> int:
        """No row is left out for what packed pages have: all of the prompt is there."""
        return exact

    def commit(self) -> None:
        """Nothing is found by later prompts: blocks of a payload may be of any text."""

    def kv_bytes(self) -> tuple[int, int]:
        """Bytes that this request alone pays for, packed and aside, and those that it shares."""
        own, shared = super().kv_bytes()
        page, size = self.pool.cache.shape.page_bytes, self.pool.pages.format.page_bytes
        own += sum(sum(held.kv_bytes()) // page * size for held in self._more)
        own += self._text_bytes
        return own + sum(sum(held.kv_bytes()) for held in self._kept), shared

    def release(self) -> None:
        """Gives all blocks back, and bases that nobody else has; safe to call twice."""
        bases = self.pool.bases
        if bases is not None and self in self._readers:
            self._readers.remove(self)
            blocks = self._packed_blocks()
            left = [reader._packed_blocks() for reader in self._readers]
            gone = np.setdiff1d(blocks, np.concatenate([blocks[:0], *left]))
            bases.forget(self.pool.rows(gone))
        for held in (*self._more, *self._kept, *self._texts):
            held.release()
        super().release()

    def _packed_blocks(self) -> Int32:
        return np.concatenate([held.entries()[:, 0] for held in (self.request, *self._more)])

"""`PackedDocuments`: what a request reads of packed documents, and what it has beside them.

Documents are frozen in the packed pool, and a prompt reads them there, wherever it has them: their
entries have a delta by which queries are turned. What the prompt computes itself, its own text and
whatever its policy recomputes of documents, lies aside, in exact pages that the request keeps. A
token lies in one of the two, in all layers: one that comes aside is brought there first as it was
reused. First tokens of documents that are exact beside their pages come aside with every prompt.
The sink is computed by every prompt; so it is exact whatever begins the prompt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.cache import KvCache, KvRequest, ReusePlan
from kvweave.packed_page import PAGE_TOKENS
from kvweave.plan import Rows
from kvweave.runner.kv.exact_firsts import Begun
from kvweave.runner.kv.gathered_tokens import GatheredTokens, PackedPlaces
from kvweave.runner.kv.packed_pool import RECENT_TOKENS, SINK_TOKENS, PackedPool
from kvweave.runner.kv.packed_prefix import PackedPrefix, packs_of
from kvweave.runner.kv.reused_tokens import Spans
from kvweave.runner.kv.tables import Int32, send
from kvweave.runner.kv.token_places import (
    Places,
    copies_between,
    entries_at,
    entries_in_place,
    no_places,
    places_of,
)
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.report import PackedReport

BROUGHT_PAGES = 16
"""Packed pages that are unpacked at once, of all layers, to be brought into exact pages."""


class PackedDocuments(PackedPrefix):
    """The packed tokens of a request that reads documents, and its exact ones aside.

    `spans`: the documents in the prompt, half-open and sorted, behind the sink. `places` i32
    [T, 3]: where their tokens lie packed; `aside` i32 [T, 3]: where those lie that are exact.
    `has_documents`: whether any of it is more than what an earlier prompt began with. `rotates`
    False reads keys as if they had not moved.

    # Errors
    `PoolFull` when the prompt and its reserve do not fit; nothing is held then.
    """

    def __init__(
        self,
        pool: PackedPool,
        cache: KvCache,
        prompt: TokenizedPrompt,
        *,
        namespace: str,
        discover: bool,
        regime: int,
        reserve_tokens: int,
        rotates: bool,
    ) -> None:
        self.pool, self._cache, self.copy = pool, cache, None
        self.report = PackedReport()
        length = len(prompt.tokens)
        self.request = pool.cache.admit(
            prompt.tokens,
            namespace=namespace,
            segments=prompt.segments,
            discover=discover,
            reuse="segments",
            mode="share",
            reserve_tokens=reserve_tokens,
            regime=regime,
        )
        known = places_of(self.request.entries(), length)
        for block, slot, _, to, count, _ in self.request.take_copies().tolist():
            # A prefix that ends within a page is read there too: no page is written for it.
            at = self.request.plan.reused_prefix - count
            assert at % PAGE_TOKENS == to
            known[at : at + count, 0] = block
            known[at : at + count, 1] = slot + np.arange(count)
        self.request.finish_copies()
        self.spans = spans_of(self.request.plan)
        self._begun = _beginnings(self.request, prompt, known)
        self.has_documents = has_documents(self.request.plan, prompt)
        self.places = no_places(length)
        for start, end in self.spans:
            self.places[start:end] = known[start:end]
        self._rotates = rotates
        if not rotates:
            self.places[:, 2] = 0
        self.aside = no_places(length)
        self._held: list[KvRequest] = []
        self._listed: tuple[Int32, Int32] | None = None
        pool.readers.add(self)
        # Pages of what is decoded: the first may begin with tokens of the prompt.
        self._prompt, self.tokens = length, length // PAGE_TOKENS * PAGE_TOKENS
        self._blocks = np.zeros(0, np.int32)

    def fork(self) -> PackedDocuments:
        """What a fork reads: the same, documents and what lies aside."""
        fork = super().fork()
        assert isinstance(fork, PackedDocuments)
        fork.places, fork.aside = self.places.copy(), self.aside.copy()
        fork._held = [held.fork() for held in self._held]
        return fork

    @property
    def fresh(self) -> Rows:
        """The positions that no document covers, i32, sorted."""
        covered = np.zeros(self._prompt, bool)
        for start, end in self.spans:
            covered[start:end] = True
        return np.flatnonzero(~covered).astype(np.int32)

    # ---- exact tokens ---------------------------------------------------------------------

    def keep(self, rows: Rows, rope: ops.RopeTable) -> bool:
        """Has rows lie aside, those of documents as they were reused; whether any came anew.

        # Errors
        `PoolFull` without room for them; nothing has changed then.
        """
        new = rows[self.aside[rows, 0] < 0]
        if not len(new):
            return False
        slots = self._taken(new)
        reused = self.places[new, 0] >= 0
        self.bring(self.places[new[reused]], slots[reused], rope)
        self.aside[new, :2], self._listed = slots, None
        return True

    def _taken(self, rows: Rows) -> Int32:
        """Slots [n, 2] for rows to lie aside in; `PoolFull` without room."""
        held = self._cache.admit(self.request.tokens[rows], reuse="none")
        self._held.append(held)
        return held.slots(np.arange(len(rows), dtype=np.int32))

    def keep_firsts(self, rope: ops.RopeTable) -> None:
        """Has first tokens of documents lie aside that are exact beside their pages.

        # Errors
        `PoolFull` without room for them; nothing has changed then.
        """
        firsts, regime = self.pool.firsts, self.request.regime
        if firsts is None:
            return
        prompt = self.request.tokens[: self._prompt]
        exact = firsts.places(prompt, self._begun, regime, rotates=self._rotates)
        # What is computed, such as the sink, is aside already.
        new = np.flatnonzero((exact[:, 0] >= 0) & (self.aside[:, 0] < 0)).astype(np.int32)
        if len(new):
            slots = self._taken(new)
            self._copy(exact[new], slots, rope, firsts.pages)
            self.aside[new, :2], self._listed = slots, None

    def bring(self, places: Places, slots: Int32, rope: ops.RopeTable) -> None:
        """Copies tokens from packed places [n, 3] to exact slots [n, 2], turning their keys."""
        pool, size = self.pool, self.pool.block_pages
        blocks, which = np.unique(places[:, 0], return_inverse=True)
        for first in range(0, len(blocks), BROUGHT_PAGES):
            some = blocks[first : first + BROUGHT_PAGES]
            exact = size * np.arange(1, len(some) + 1, dtype=np.int32)
            among = (which >= first) & (which < first + len(some))
            source = places[among]
            source[:, 0] = exact[which[among] - first]
            shape = (size * (len(some) + 1), 2, PAGE_TOKENS, pool.head_dim)
            pages = torch.empty(shape, dtype=pool.exact.dtype, device=pool.exact.device)
            pool.unpack(packs_of(some, exact[:, None]), pages)
            self._copy(source, slots[among], rope, pages)

    def _copy(
        self, places: Places, slots: Int32, rope: ops.RopeTable, source: torch.Tensor | None = None
    ) -> None:
        """Copies tokens from places [n, 3] in the exact pages, or others, to slots [n, 2] there."""
        copies = copies_between(places, slots)
        if len(copies):
            (moved,) = send(self.pool.device, copies)
            heads = self.pool.kv_heads
            ops.copy_rerotate(self.pool.exact, moved, rope, kv_heads=heads, source=source)

    def settle(self, request: KvRequest, rope: ops.RopeTable) -> None:
        """Fills the exact pages that a request keeps of its prompt: its sink and newest tokens."""
        slots = places_of(request.entries(), self._prompt)
        kept = np.flatnonzero(slots[:, 0] >= 0)
        exact = self.aside[kept, 0] >= 0
        packed = kept[~exact]
        self.bring(self.places[packed], slots[packed, :2], rope)
        own = kept[exact]
        self._copy(self.aside[own], slots[own, :2], rope)

    # ---- packed tokens --------------------------------------------------------------------

    def expect(self, first: int, end: int) -> None:
        """Nothing: what the prompt computes lies aside."""

    def reused(self, exact: int) -> int:
        """No row is left out for what packed pages have: a plan says so of each."""
        return exact

    def commit(self) -> None:
        """Nothing is found by later prompts: what was computed saw documents as they lie packed."""

    def scratch_bytes(self, tokens: int) -> int:
        """The most of what is unpacked at once: a layer that is looked at, or pages of all.

        A layer is unpacked as it lies and brought together from there.
        """
        pages = len(np.unique(self.places[self.places[:, 0] >= 0, 0]))
        brought = min(pages, BROUGHT_PAGES) * PAGE_TOKENS * self.pool.cache.shape.layers
        return max(tokens + pages * PAGE_TOKENS, brought) * self.pool.token_bytes

    def kv_bytes(self) -> tuple[int, int]:
        """Bytes that this request alone pays for, packed and aside, and those that it shares."""
        own, shared = super().kv_bytes()
        return own + sum(sum(held.kv_bytes()) for held in self._held), shared

    def release(self) -> None:
        """Gives all blocks back; safe to call twice."""
        for held in self._held:
            held.release()
        super().release()

    # ---- reading --------------------------------------------------------------------------

    def entries(self) -> Int32:
        """All packed tokens that are not aside, of the prompt and then what was decoded."""
        return np.concatenate((self._entries()[0], self._behind(self._prompt)))

    def exact_entries(self, first: int = 0) -> Int32:
        """The tokens aside, of an entry's position on: entries i32 [N, 5]."""
        entries = self._entries()[1]
        return entries[entries[:, 3] >= first]

    def step_entries(self, first: int) -> Int32:
        """As `exact_entries`, in the fewest entries that decode steps may read.

        Steps see all that lies before the newest tokens of the prompt. What of it is aside is
        listed as it lies there, one position after the other: of rows that a policy chose here and
        there each would be an entry else.
        """
        return entries_in_place(self.aside, first, self._prompt - RECENT_TOKENS)

    def _entries(self) -> tuple[Int32, Int32]:
        """Entries of the prompt's packed tokens and of those aside, in order of position.

        The sink fills whole blocks of the latter: no entry begins in it and ends behind it.
        """
        if self._listed is None:
            exact = self.aside[:, 0] >= 0
            packed = (self.places[:, 0] >= 0) & ~exact
            parts = ((packed, self.places), (exact, self.aside))
            one, other = (_listed(among, places) for among, places in parts)
            self._listed = one, other
        return self._listed

    def gathering(self, request: KvRequest, first: int, end: int) -> GatheredTokens:
        """How the tokens [first, end) of any layer are brought together, in order of position.

        `request`: the prompt's, or a fork that has decoded on in exact pages.
        """
        said = places_of(request.entries(), request.length)[self._prompt :]
        exact = np.concatenate((self.aside, said))[first:end]
        packed = no_places(end - first)
        held = self.places[first:end]
        packed[: len(held)] = held
        known = PackedPlaces(self.pool, packed)
        return GatheredTokens.of(self.pool.exact, self.pool.kv_heads, first, exact, known)


class DraftedDocuments(PackedPrefix):
    """What a draft reads of packed documents. Nothing that it says is packed."""

    def __init__(self, documents: PackedDocuments) -> None:
        self.pool, self.tokens = documents.pool, documents.tokens
        self._documents = documents

    def pack(self, request: KvRequest, done: int) -> None:
        """Nothing."""

    def entries(self) -> Int32:
        """The prompt's."""
        return self._documents.entries()

    def exact_entries(self, first: int) -> Int32:
        """The prompt's."""
        return self._documents.exact_entries(first)

    def step_entries(self, first: int) -> Int32:
        """The prompt's."""
        return self._documents.step_entries(first)


def spans_of(plan: ReusePlan) -> Spans:
    """What a prompt finds packed behind its sink: documents, and text that it begins with."""
    found = [span for span in plan.spans if span.kind != "recompute" and span.end > SINK_TOKENS]
    return tuple((max(span.start, SINK_TOKENS), span.end) for span in found)


def _beginnings(request: KvRequest, prompt: TokenizedPrompt, known: Places) -> tuple[Begun, ...]:
    """Where documents begin in a prompt that are read from their first token on: [start, end).

    With the namespace of each. `known`: where tokens lie, with how far they moved.
    """
    found = []
    for span in request.plan.spans:
        if span.kind == "segment" and known[span.start, 2] == span.start:
            marked = (of for at, end, of in prompt.segments if at <= span.start < end)
            found.append((span.start, span.end, next(marked, request.namespace)))
    return tuple(found)


def has_documents(plan: ReusePlan, prompt: TokenizedPrompt) -> bool:
    """Whether a prompt finds documents: segments behind the sink, or one that it begins with."""
    if any(span.kind == "segment" and span.end > SINK_TOKENS for span in plan.spans):
        return True
    return (
        SINK_TOKENS
        < plan.reused_prefix
        <= max((end for start, end, _ in prompt.segments if start == 0), default=0)
    )


def _listed(among: npt.NDArray[np.bool_], places: Places) -> Int32:
    """Entries of those tokens that are among some, bool [T]."""
    positions = np.flatnonzero(among).astype(np.int32)
    return entries_at(positions, places[positions])

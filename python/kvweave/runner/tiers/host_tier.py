"""`HostTier`: copies of documents in the host's memory, for when their blocks have left the device.

A cache of its own counts its blocks, which have the pages of all heads of all layers, whatever head
groups there are on the device: what is kept is every token in every head. So the indexes, the order
of eviction and the quotas here are those of any other cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from kvweave.cache import KvCache, KvRequest
from kvweave.device_memory import arena_pages
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.runner.clock import Clock
from kvweave.runner.kv.aside import Arrival, Aside
from kvweave.runner.kv.block_pages import carry_blocks
from kvweave.runner.kv.carry_pages import Way, carry_pages
from kvweave.runner.kv.copy_engine import NEVER, WAYS, measured
from kvweave.runner.kv.exact_firsts import first_rooms
from kvweave.runner.kv.host_pages import blocks_of
from kvweave.runner.kv.pinned import pin
from kvweave.runner.kv.pool_bases import OWN_SHARE, BlockBases
from kvweave.runner.kv.tables import Int32
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import DocumentForm

_PIECES = 8
"""A document comes over in so many copies, each of some layers."""


class FetchedKv:
    """A document that a GPU copies into the blocks of a request beside its other work.

    What the current stream does after `write_to` finds the first `layers`. `begin`, `end`: when it
    set out, and, for who waits for that, when all of it was there.
    """

    def __init__(self, request: KvRequest, clock: Clock) -> None:
        self.request = request
        self.layers = 0
        self.begin = self.end = clock.mark()
        self._pieces: list[tuple[int, Arrival]] = []

    def note(self, layers: int, arrival: Arrival) -> None:
        """Takes note of a copy behind which so many layers are there."""
        self._pieces.append((layers, arrival))
        if arrival.event is not None:
            self.end = arrival.event

    def write_to(self, layers: int) -> None:
        """Has the current stream wait until so many layers are there; the host does not wait."""
        while self.layers < layers:
            there, arrival = self._pieces.pop(0)
            arrival.wait()
            self.layers = there

    def release(self) -> None:
        """Lets the blocks go, which nobody is given before all of it has come."""
        self.write_to(self._pieces[-1][0] if self._pieces else 0)
        self.request.release()


class HostTier:
    """So many bytes of documents beside the pages of a cache, which lie here as its form has them.

    Bases that documents have of their own take a share of the bytes. `firsts`: their first tokens,
    where these are exact beside their pages. `pinned`: whether a GPU reads the memory where it
    lies; otherwise the host copies what it would read, and waits for that.
    `engine_bytes`: from which size on its copy engine carries pieces, "fetch" and "spill", as was
    measured when the tier was made; may be set.
    Whoever carries pages does so alone; `has` is for any thread.

    # Errors
    `InvalidArgument` for bytes that hold no block; `OutOfMemory` for what the host cannot hold.
    """

    def __init__(self, form: DocumentForm, size: int, *, eviction: str, hash: str) -> None:
        cache, arena, shape = form.cache, form.arena, form.cache.shape
        block_bytes = form.token_bytes * shape.page_tokens

        def taken(blocks: int) -> int:
            return blocks * block_bytes + (1 + first_rooms(blocks)) * form.first_bytes

        # The null block and one more.
        least = taken(2)
        if form.basis_bytes:
            size = size * OWN_SHARE // (OWN_SHARE + 1)
            least = -(-least * (OWN_SHARE + 1) // OWN_SHARE)
        if size < taken(2):
            raise InvalidArgument(f"document_bytes: expected at least {least}, got {size}")
        most = range(size // block_bytes + 1)
        count = bisect_right(most, size, key=taken) - 1 if form.first_bytes else most[-1]
        self._form, self._block_bytes = form, block_bytes
        self.firsts = form.firsts_at_home(first_rooms(count))
        # Of each block here its basis and its bounds: documents that begin alike share blocks.
        self._bases: dict[int, torch.Tensor | None] = {}
        self._bounds: dict[int, torch.Tensor] = {}
        self.cache = KvCache(
            shape,
            blocks=count,
            memory=False,
            eviction=eviction,
            hash=hash,
            fingerprint=cache.fingerprint,
        )
        sizes = (self.cache.stats()["arena_pages"], *arena.shape[1:])
        self.pages = arena_pages(sizes, arena.dtype, torch.device("cpu"))
        self.pinned = arena.is_cuda and pin(self.pages, arena.device)
        self.engine_bytes: Mapping[Way, int] = dict.fromkeys(WAYS, NEVER)
        if self.pinned:
            self.engine_bytes = measured(arena, self.pages)
        self._arena = arena
        self._aside = Aside(arena.device)
        self._ranks = [_ranks_of(cache, group) for group in range(len(cache.groups))]

    def has(self, document: Document) -> bool:
        """Whether all of a document is here."""
        return document.is_in(self.cache)

    def keep(self, document: Document, request: KvRequest) -> bool:
        """Copies a document from the request that has it alone; whether it is here now.

        Where room is short others give way, as the cache's order says.
        """
        if self.has(document):
            return True
        try:
            with self.cache.admit(
                document.tokens,
                namespace=document.namespace,
                regime=document.regime,
                reuse="none",
            ) as home:
                blocks = blocks_of(home)
                self._carry(request, blocks, "spill")
                self._note(blocks.tolist(), blocks_of(request))
                if self.firsts is not None:
                    self.firsts.put(*_named(document), self._form.firsts(request))
                home.commit(document.length, document.length)
        except PoolFull:
            return False
        return True

    def admit(self, document: Document) -> KvRequest | None:
        """A request on the device that has a document alone, committed; None if it is not here.

        # Errors
        As `fetch`, and as `KvCache.admit`.
        """
        request = self._form.cache.admit(
            document.tokens, namespace=document.namespace, regime=document.regime, reuse="none"
        )
        try:
            if not self.fetch(document, request):
                request.release()
                return None
            request.commit(document.length, document.length)
        except BaseException:
            request.release()
            raise
        return request

    def fetch(self, document: Document, request: KvRequest) -> bool:
        """Copies a document into the blocks of a request of it alone; False if it is not here.

        # Errors
        `PoolFull` where the device has no room for a basis of it.
        """
        return self._fetch(document, request, lambda blocks: self._carry(request, blocks, "fetch"))

    def fetch_aside(self, document: Document, request: KvRequest) -> FetchedKv | None:
        """As `fetch`, beside what a GPU does, layer by layer; None if it is not here.

        Whoever has it waits for all of it before anything else is copied to here.
        """
        layers = self.cache.shape.layers
        fetched = FetchedKv(request, Clock(self._arena.device))

        def carry(blocks: Int32) -> None:
            step = -(-layers // _PIECES)
            for first in range(0, layers, step):
                end = min(layers, first + step)
                work = partial(self._carry, request, blocks, "fetch", (first, end))
                fetched.note(end, self._aside.do(work))

        return fetched if self._fetch(document, request, carry) else None

    def _fetch(
        self, document: Document, request: KvRequest, carry: Callable[[Int32], None]
    ) -> bool:
        # The last token of a prompt is never looked up: the document's own is not the last.
        followed = np.append(document.tokens, np.int32(0))
        try:
            home = self.cache.admit(
                followed,
                namespace=document.namespace,
                regime=document.regime,
                reuse="prefix",
            )
        except PoolFull:
            return False
        with home:
            if home.plan.reused_prefix < document.length:
                return False
            whole, rest = divmod(document.length, self.cache.shape.page_tokens)
            blocks = blocks_of(home)[:whole]
            if rest:
                # It would be copied to the request's own block; it is read where it lies.
                blocks = np.append(blocks, home.take_copies(0)[0, 0])
            self._put(blocks.tolist(), blocks_of(request))
            if self.firsts is not None:
                self._form.put_firsts(request, self.firsts.of_text(*_named(document)))
            carry(blocks)
        return True

    def _note(self, home: list[int], blocks: Int32) -> None:
        """Takes note of bases and bounds of blocks that were copied to blocks here."""
        bases, bounds = self._form.bases(blocks), self._form.bounds(blocks)
        if bases is not None:
            self._bases.update(zip(home, bases.of_each(), strict=True))
        if bounds is not None:
            of_each = bounds.view(len(home), -1, *bounds.shape[1:])
            # Each for itself: no more of them are kept than blocks.
            self._bounds.update((block, of_each[at].clone()) for at, block in enumerate(home))

    def _put(self, home: list[int], blocks: Int32) -> None:
        """Says of blocks that are to be copied from blocks here what bases and bounds they have.

        # Errors
        `PoolFull` where there is no room for a basis.
        """
        bases = BlockBases.of([self._bases[block] for block in home]) if self._bases else None
        bounds = torch.cat([self._bounds[block] for block in home]) if self._bounds else None
        self._form.put_bases(blocks, bases)
        self._form.put_bounds(blocks, bounds)

    def stats(self) -> dict[str, Any]:
        """Counts of blocks as `KvCache.stats` has them, bytes of one, and whether it is pinned."""
        counts = self.cache.stats()
        return {**counts, "block_bytes": self._block_bytes, "pinned": self.pinned}

    def _carry(
        self, request: KvRequest, home: Int32, way: Way, layers: tuple[int, int] | None = None
    ) -> None:
        """Carries all pages of a request's blocks, group by group, to or from blocks [n] here.

        `layers`: those of [first, end) alone.
        """
        for group, (on_device, at_home) in enumerate(self._ranks):
            if layers is not None:
                of_page = at_home // self.cache.shape.kv_heads
                some = (layers[0] <= of_page) & (of_page < layers[1])
                on_device, at_home = on_device[some], at_home[some]
            carry_blocks(
                (self._arena, on_device, blocks_of(request, group)),
                (self.pages, at_home, home),
                way,
                partial(carry_pages, pinned=self.pinned),
                engine_bytes=self.engine_bytes[way],
            )


def _named(document: Document) -> tuple[Int32, str, int]:
    return document.tokens, document.namespace, document.regime


def _ranks_of(cache: KvCache, group: int) -> tuple[Int32, Int32]:
    """The pages of a group's heads in a block of it, and in a block of all heads: i32 [heads]."""
    on_device, at_home = [], []
    for layer in range(cache.shape.layers):
        for head, (table, page, *_) in enumerate(cache.head_rows(layer).tolist()):
            if table == group:
                on_device.append(page)
                at_home.append(layer * cache.shape.kv_heads + head)
    return np.asarray(on_device, np.int32), np.asarray(at_home, np.int32)

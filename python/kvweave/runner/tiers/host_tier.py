"""`HostTier`: copies of documents in the host's memory, for when their blocks have left the device.

A cache of its own counts its blocks, which have the pages of all heads of all layers, whatever head
groups there are on the device: what is kept is every token in every head. So the indexes, the order
of eviction and the quotas here are those of any other cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvweave.cache import KvCache, KvRequest
from kvweave.device_memory import arena_pages
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.ops import RowPages
from kvweave.runner.kv.host_pages import blocks_of
from kvweave.runner.kv.host_pool import Way, carry_pages
from kvweave.runner.kv.pinned import pin
from kvweave.runner.kv.pool_bases import OWN_SHARE, BlockBases
from kvweave.runner.kv.tables import Int32, send
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import DocumentForm


class HostTier:
    """So many bytes of documents beside the pages of a cache, which lie here as its form has them.

    Bases that documents have of their own take a share of the bytes. `pinned`: whether a GPU reads
    the memory where it lies; otherwise the host copies what it would read, and waits for that.
    Whoever carries pages does so alone; `has` is for any thread.

    # Errors
    `InvalidArgument` for bytes that hold no block; `OutOfMemory` for what the host cannot hold.
    """

    def __init__(self, form: DocumentForm, size: int, *, eviction: str, hash: str) -> None:
        cache, arena, shape = form.cache, form.arena, form.cache.shape
        block_bytes = form.token_bytes * shape.page_tokens
        # The null block and one more.
        least = 2 * block_bytes
        if form.basis_bytes:
            size = size * OWN_SHARE // (OWN_SHARE + 1)
            least = -(-least * (OWN_SHARE + 1) // OWN_SHARE)
        if size < 2 * block_bytes:
            raise InvalidArgument(f"document_bytes: expected at least {least}, got {size}")
        self._form, self._block_bytes = form, block_bytes
        # By the first block of a document here: the bases of all of its blocks.
        self._bases: dict[int, BlockBases | None] = {}
        self.cache = KvCache(
            shape,
            blocks=size // block_bytes,
            memory=False,
            eviction=eviction,
            hash=hash,
            fingerprint=cache.fingerprint,
        )
        sizes = (self.cache.stats()["arena_pages"], *arena.shape[1:])
        self.pages = arena_pages(sizes, arena.dtype, torch.device("cpu"))
        self.pinned = arena.is_cuda and pin(self.pages, arena.device)
        self._arena = arena
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
                for block in blocks.tolist():
                    self._bases.pop(block, None)
                self._bases[int(blocks[0])] = self._form.bases(blocks_of(request))
                home.commit(document.length, document.length)
        except PoolFull:
            return False
        return True

    def fetch(self, document: Document, request: KvRequest) -> bool:
        """Copies a document into the blocks of a request of it alone; False if it is not here.

        # Errors
        `PoolFull` where the device has no room for a basis of it.
        """
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
            self._form.put_bases(blocks_of(request), self._bases[int(blocks[0])])
            self._carry(request, blocks, "fetch")
        return True

    def stats(self) -> dict[str, Any]:
        """Counts of blocks as `KvCache.stats` has them, bytes of one, and whether it is pinned."""
        counts = self.cache.stats()
        return {**counts, "block_bytes": self._block_bytes, "pinned": self.pinned}

    def _carry(self, request: KvRequest, home: Int32, way: Way) -> None:
        """Carries all pages of a request's blocks, group by group, to or from blocks [n] here."""
        for group, (on_device, at_home) in enumerate(self._ranks):
            here = blocks_of(request, group)
            rows = np.arange(len(on_device), dtype=np.int32)
            pages = np.arange(len(home), dtype=np.int32)
            moves = np.empty((len(rows) * len(pages), 3), np.int32)
            moves[:, 0] = np.repeat(rows, len(pages))
            moves[:, 1] = moves[:, 2] = np.tile(pages, len(rows))
            tables = (
                moves,
                np.asarray([len(moves)], np.int32),
                np.ascontiguousarray(on_device[:, None] + here),
                np.ascontiguousarray(at_home[:, None] + home),
            )
            sent = send(self._arena.device, *tables)
            slots, at = RowPages(self._arena, sent[2]), RowPages(self.pages, sent[3])
            carry_pages(sent[0], sent[1], slots, at, way, pinned=self.pinned)


def _ranks_of(cache: KvCache, group: int) -> tuple[Int32, Int32]:
    """The pages of a group's heads in a block of it, and in a block of all heads: i32 [heads]."""
    on_device, at_home = [], []
    for layer in range(cache.shape.layers):
        for head, (table, page, *_) in enumerate(cache.head_rows(layer).tolist()):
            if table == group:
                on_device.append(page)
                at_home.append(layer * cache.shape.kv_heads + head)
    return np.asarray(on_device, np.int32), np.asarray(at_home, np.int32)

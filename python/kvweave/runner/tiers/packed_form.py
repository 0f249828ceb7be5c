"""`PackedForm`: documents in packed pages, which leave as they are, with the bases they need.

A shard says which format its pages have in its provenance, so that no other is ever found for it.
Bytes of pages may be anything: whoever reads them reads nothing outside of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvweave.cache import KvCache, KvRequest
from kvweave.device_memory import arena_pages
from kvweave.errors import CorruptShard, InvalidArgument, NamespaceConflict
from kvweave.ops import PackedPages, RopeTable
from kvweave.payload.page_format import PageFormat
from kvweave.payload.stored import part_of
from kvweave.remote import RemoteShard, RemoteStore
from kvweave.runner.kv.exact_firsts import ExactFirsts
from kvweave.runner.kv.pool_bases import BlockBases, PoolBases, basis_shape, needs_steps
from kvweave.runner.kv.tables import Int32, send_index
from kvweave.runner.tiers.document_form import RowsFlops
from kvweave.store import Provenance, Shard, Store

VERSION = 1
"""Of how parts of a shard are laid out."""

_PAGES, _WHICH, _BASES = "pages", "which", "bases"

FIRSTS = "firsts"
"""The part that has a document's exact first tokens."""


@dataclass(frozen=True, eq=False)
class PackedDocument:
    """A document in packed pages, away from its pool.

    `header`: what it is of; `tokens` i32 [T]. `parts`: "pages" u8 [blocks, pages of one, bytes];
    of pages in bases also "which" i32 [blocks] and, where any is used, "bases" f32, as `BlockBases`
    has them; where its first tokens are exact "firsts", as `ExactFirsts.of_text` gives them.
    """

    header: Provenance
    tokens: Int32
    parts: Mapping[str, torch.Tensor]

    def on_host(self) -> PackedDocument:
        """The same with parts that lie on the host."""
        parts = {name: part.cpu() for name, part in self.parts.items()}
        return PackedDocument(self.header, self.tokens, parts)

    @property
    def bases(self) -> BlockBases | None:
        """The bases of its blocks; None where they have none."""
        if _WHICH not in self.parts:
            return None
        return BlockBases(self.parts[_WHICH].numpy(), tuple(self.parts.get(_BASES, ())))


class PackedBlocks(Protocol):
    """Packed pages that documents lie in: a `PackedPool`'s, or those of another store.

    A block has a page for each (layer, KV head), and its number in `cache` is that of the first.
    `bases` and `bounds` are None where pages have none, and `firsts` where all of a document is
    packed.
    """

    @property
    def cache(self) -> KvCache:
        """Whose block numbers are."""

    @property
    def pages(self) -> PackedPages:
        """All of them."""

    @property
    def bases(self) -> PoolBases | None:
        """In which pages are packed."""

    @property
    def bounds(self) -> torch.Tensor | None:
        """By what heads choose pages, f32 [pages, 3, D]."""

    @property
    def firsts(self) -> ExactFirsts | None:
        """The exact first tokens of documents."""

    @property
    def block_pages(self) -> int:
        """Pages of a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""

    def bound(self, blocks: Int32, tokens: int) -> None:
        """Makes the bounds of blocks of a text of so many tokens, where pages have any."""


class PackedForm:
    """Documents in the pages of one pool: see `DocumentForm`; `heads` as `ExactForm`.

    `fingerprint`: of the weights, as shards name them; None: the cache's.
    """

    def __init__(
        self, pool: PackedBlocks, heads: str, flops: RowsFlops, *, fingerprint: str | None = None
    ) -> None:
        self._heads, self.flops, self._fingerprint = heads, flops, fingerprint
        self.pool, self.cache, self.arena = pool, pool.cache, pool.pages.data

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all heads of all layers, scales, bitmaps and bounds among them."""
        bounds = 0 if self.pool.bounds is None else self.pool.bounds[0].nbytes
        return (self.pool.block_bytes + bounds * self.pool.block_pages) // self._page_tokens

    @property
    def _page_tokens(self) -> int:
        return self.pool.pages.format.page_tokens

    @property
    def basis_bytes(self) -> int:
        """Bytes of a basis, 0 without any."""
        return 0 if self.pool.bases is None else self.pool.bases.basis_bytes

    def provenance(self, namespace: str, regime: int) -> Provenance:
        """That of the pool's format, whose every size is in the layout."""
        return self._provenance(namespace, regime)

    def _provenance(self, namespace: str, regime: int, more: str = "") -> Provenance:
        """The same where the layout says something `more`."""
        shape, of = self.cache.shape, PageFormat.of(self.pool.pages.format)
        named = f"packed/{VERSION}/{of.name}"
        if self.pool.firsts is not None:
            named = f"{named}/firsts/{self.pool.firsts.tokens}"
        return Provenance(
            self.cache.fingerprint if self._fingerprint is None else self._fingerprint,
            dtype=shape.dtype,
            layout=f"{named}/{more}" if more else named,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            namespace=namespace,
            regime=regime,
            heads=self._heads,
        )

    def export(self, request: KvRequest, rope: RopeTable | None = None) -> PackedDocument:
        """The blocks of a request as they are."""
        blocks = request.entries()[:, 0]
        found = self.arena.index_select(0, self._index(blocks))
        parts = {_PAGES: found.view(len(blocks), self.pool.block_pages, -1)}
        bases = self.bases(blocks)
        if bases is not None:
            parts[_WHICH] = torch.from_numpy(bases.which)
            if bases.bases:
                parts[_BASES] = torch.stack(bases.bases)
        header = self.provenance(request.namespace, request.regime)
        tokens = np.asarray(request.tokens, np.int32)
        return PackedDocument(header, tokens, parts | self._firsts_of(request))

    def _firsts_of(self, request: KvRequest) -> dict[str, torch.Tensor]:
        """The part of a document that has its exact first tokens, where these are kept."""
        firsts = self.firsts(request)
        return {} if firsts is None else {FIRSTS: firsts}

    def admit(self, document: PackedDocument, namespace: str) -> KvRequest:
        """A request of a stored document; its bases are found here, or written.

        # Errors
        As `DocumentForm.admit`.
        """
        self._expect(document, namespace)
        tokens, regime = document.tokens, document.header.regime
        request = self.cache.admit(tokens, namespace=namespace, reuse="none", regime=regime)
        try:
            blocks = request.entries()[:, 0]
            self.put_bases(blocks, document.bases)
            pages = document.parts[_PAGES].to(self.arena.device)
            self.arena.index_copy_(0, self._index(blocks), pages.flatten(0, 1))
            self.pool.bound(blocks, len(tokens))
            self.put_firsts(request, document.parts.get(FIRSTS))
            request.commit(len(tokens), len(tokens))
        except BaseException:
            request.release()
            raise
        return request

    def _expect(self, document: PackedDocument, namespace: str) -> None:
        """Refuses a document of another namespace, model or format."""
        header = document.header
        if namespace != header.namespace:
            raise NamespaceConflict(
                f"packed document namespace: expected {namespace!r}, got {header.namespace!r}"
            )
        if header != self.provenance(namespace, header.regime):
            raise InvalidArgument("packed document: expected one of this model and format")

    def write(self, store: Store, document: PackedDocument) -> str:
        """A shard with a part for each part."""
        parts = {name: part.cpu().contiguous() for name, part in document.parts.items()}
        cost = self.flops(0, len(document.tokens))
        return store.put(document.header, document.tokens, parts, cost=cost)[0]

    def send(self, store: RemoteStore, document: PackedDocument) -> None:
        """The same to a store on another machine."""
        held = {name: part.cpu().contiguous() for name, part in document.parts.items()}
        parts = {name: part.reshape(-1).view(torch.uint8).numpy() for name, part in held.items()}
        store.put(document.header, document.tokens, parts)

    def most_bytes(self, tokens: int) -> int:
        """Bytes of the parts of a document of so many tokens, at most."""
        blocks, bases = -(-tokens // self._page_tokens), self.pool.bases
        pages = blocks * self._page_tokens * self.token_bytes
        # No more of them than there is room for here.
        of_bases = 0 if bases is None else min(bases.nbytes, blocks * bases.basis_bytes)
        return pages + 4 * blocks + of_bases + self.first_bytes

    def read(self, shard: Shard | RemoteShard) -> PackedDocument:
        """The parts of a shard, each as many bytes as the document's tokens and bases ask for.

        # Errors
        As `DocumentForm.read`; `CorruptShard` as well for bases that are not finite or whose bits
        have no room, or that blocks name and are not there, and for first tokens that are not
        finite.
        """
        header = self._expect_header(shard)
        tokens = shard.tokens().astype(np.int32)
        count = -(-len(tokens) // self._page_tokens)
        shape = (count, self.pool.block_pages, self.pool.pages.format.page_bytes)
        parts = {_PAGES: part_of(shard, _PAGES, shape, torch.uint8)}
        if self.pool.bases is not None:
            parts |= self._read_bases(shard, count)
        return PackedDocument(header, tokens, parts | self._read_firsts(shard))

    def _expect_header(self, shard: Shard | RemoteShard) -> Provenance:
        """What a shard is of, which is what documents here are of."""
        header = shard.provenance
        if header != self.provenance(header.namespace, header.regime):
            raise CorruptShard("shard layout: expected packed pages of this format, got others")
        return header

    def begin(self, shard: Shard) -> PackedDocument:
        """As `read`: whole."""
        return self.read(shard)

    def _read_bases(self, shard: Shard | RemoteShard, blocks: int) -> dict[str, torch.Tensor]:
        """The parts of a shard that say what so many blocks are packed in."""
        of = self.pool.pages.format
        which = part_of(shard, _WHICH, (blocks,), torch.int32)
        least, used = (1 if needs_steps(of) else 0), int(which.max())
        if int(which.min()) < least or used > blocks:
            raise CorruptShard("shard part which: expected numbers of bases, got others")
        if not used:
            return {_WHICH: which}
        shape = used, *basis_shape(of, self.pool.block_pages)
        bases = part_of(shard, _BASES, shape, torch.float32)
        if not bool(bases.isfinite().all()):
            raise CorruptShard("shard part bases: expected finite numbers, got others")
        try:
            of.check_bases(bases)
        except InvalidArgument as error:
            raise CorruptShard(f"shard part bases: {error}") from error
        return {_WHICH: which, _BASES: bases}

    def _read_firsts(self, shard: Shard | RemoteShard) -> dict[str, torch.Tensor]:
        """The part of a shard that has exact first tokens, if it has them."""
        firsts = self.pool.firsts
        if firsts is None or FIRSTS not in shard.parts:
            return {}
        of = firsts.data
        part = part_of(shard, FIRSTS, tuple(of.shape[1:]), of.dtype)
        # Other documents that begin alike read them too.
        if not bool(part.isfinite().all()):
            raise CorruptShard("shard part firsts: expected finite numbers, got others")
        return {FIRSTS: part}

    def hold(self, request: KvRequest) -> None:
        """Nothing: blocks that a request holds are not given to others."""

    def bases(self, blocks: Int32) -> BlockBases | None:
        """Those that blocks are packed in."""
        return None if self.pool.bases is None else self.pool.bases.of_blocks(blocks)

    def put_bases(self, blocks: Int32, bases: BlockBases | None) -> None:
        """Says which bases blocks are packed in."""
        if self.pool.bases is not None:
            assert bases is not None
            self.pool.bases.put(blocks, bases)

    def bounds(self, blocks: Int32) -> torch.Tensor | None:
        """Those of all pages of blocks."""
        bounds = self.pool.bounds
        return None if bounds is None else bounds.index_select(0, self._index(blocks)).cpu()

    def put_bounds(self, blocks: Int32, bounds: torch.Tensor | None) -> None:
        """Says which bounds all pages of blocks have."""
        if self.pool.bounds is not None:
            assert bounds is not None
            self.pool.bounds.index_copy_(0, self._index(blocks), bounds.to(self.arena.device))

    @property
    def first_bytes(self) -> int:
        """Bytes of a document's first tokens that are exact, 0 without any."""
        return 0 if self.pool.firsts is None else self.pool.firsts.room_bytes

    def firsts_at_home(self, rooms: int) -> ExactFirsts | None:
        """So many rooms for these in the host's memory."""
        firsts = self.pool.firsts
        if firsts is None:
            return None
        shape = 1 + rooms, *firsts.data.shape[1:]
        return ExactFirsts(arena_pages(shape, firsts.data.dtype, torch.device("cpu")))

    def firsts(self, request: KvRequest) -> torch.Tensor | None:
        """Those of the document that a request has alone."""
        firsts = self.pool.firsts
        if firsts is None:
            return None
        return firsts.of_text(request.tokens, request.namespace, request.regime)

    def put_firsts(self, request: KvRequest, firsts: torch.Tensor | None) -> None:
        """Says which the document has that a request has alone."""
        if self.pool.firsts is not None:
            known = request.tokens, request.namespace, request.regime
            self.pool.firsts.put(*known, firsts)

    def _index(self, blocks: Int32) -> torch.Tensor:
        """The pages of blocks, block by block."""
        count = self.pool.block_pages
        pages = np.repeat(blocks, count) + np.tile(np.arange(count, dtype=np.int32), len(blocks))
        return send_index(self.arena.device, pages).long()

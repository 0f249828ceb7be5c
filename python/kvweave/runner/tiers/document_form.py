"""`DocumentForm`: how documents lie in a cache's pages, and leave them for a store or the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from kvweave.cache import KvCache, KvRequest
from kvweave.ops import RopeTable
from kvweave.payload import KvPayload
from kvweave.payload.arriving import ArrivingPayload
from kvweave.payload.stored import provenance_here, read_payload, send_payload, store_payload
from kvweave.payload.transfer import admit_kv, export_kv
from kvweave.remote import RemoteShard, RemoteStore
from kvweave.runner.kv.exact_firsts import ExactFirsts
from kvweave.runner.kv.pool_bases import BlockBases
from kvweave.runner.kv.tables import Int32
from kvweave.store import Provenance, Shard, Store


class StoredHeader(Protocol):
    """What is known of a document that left its pages."""

    @property
    def namespace(self) -> str:
        """Whose it is."""


class StoredDocument(Protocol):
    """A document that left its pages: what it is of, and its parts."""

    @property
    def header(self) -> StoredHeader:
        """What it is of."""

    @property
    def parts(self) -> Mapping[str, torch.Tensor]:
        """Its parts, on any device."""

    def on_host(self) -> StoredDocument:
        """The same with parts that lie on the host."""


RowsFlops: TypeAlias = Callable[[int, int], int]
"""FLOPs of the rows at [start, end) of a prompt."""


class DocumentForm(Protocol):
    """Documents of one cache. `arena` [pages, …]: its pages; `token_bytes` of a token in them.

    `flops`: what computing rows takes; whole documents are kept with what they took.
    """

    cache: KvCache
    arena: torch.Tensor
    flops: RowsFlops

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all heads of all layers."""

    @property
    def basis_bytes(self) -> int:
        """Bytes of a basis, 0 without any."""

    def provenance(self, namespace: str, regime: int) -> Provenance:
        """What a document of this cache is of, but for its tokens."""

    def export(self, request: KvRequest, rope: RopeTable | None = None) -> StoredDocument:
        """The KV of a request that has a document alone, every token in every head."""

    def admit(self, document: Any, namespace: str) -> KvRequest:
        """A request of a stored document, committed as if it had been computed here.

        # Errors
        `InvalidArgument`, `NamespaceConflict` for one that is not this cache's, `PoolFull` when it
        does not fit. After any error nothing is held.
        """

    def write(self, store: Store, document: Any) -> str:
        """Puts a document into a store, with the FLOPs that it took; returns the shard's name.

        # Errors
        As for `Store.put`.
        """

    def send(self, store: RemoteStore, document: Any) -> None:
        """As `write`, to a store on another machine.

        # Errors
        As for `RemoteStore.put`.
        """

    def most_bytes(self, tokens: int) -> int:
        """Bytes of the parts of a document of so many tokens, but for their ids, at most."""

    def read(self, shard: Shard | RemoteShard) -> StoredDocument:
        """The document in a shard.

        # Errors
        `CorruptShard` for a shard that holds none, or another than it says; `StoreUnavailable`.
        """

    def begin(self, shard: Shard) -> StoredDocument | ArrivingPayload:
        """As `read`; of a form whose documents can arrive layer by layer, to be read on."""

    def hold(self, request: KvRequest) -> None:
        """Says that somebody reads what a request has, until it is released."""

    def bases(self, blocks: Int32) -> BlockBases | None:
        """The bases that blocks [N] are packed in; None where there are none."""

    def put_bases(self, blocks: Int32, bases: BlockBases | None) -> None:
        """Says which bases blocks [N] are packed in.

        # Errors
        `PoolFull` where there is no room for one.
        """

    def bounds(self, blocks: Int32) -> torch.Tensor | None:
        """By what heads choose the pages of blocks [N], on the host; None where none choose."""

    def put_bounds(self, blocks: Int32, bounds: torch.Tensor | None) -> None:
        """Says by what heads choose the pages of blocks [N]."""

    @property
    def first_bytes(self) -> int:
        """Bytes of a document's tokens that are exact beside its pages; 0 where none are."""

    def firsts_at_home(self, rooms: int) -> ExactFirsts | None:
        """So many rooms for them in the host's memory; None where none are."""

    def firsts(self, request: KvRequest) -> torch.Tensor | None:
        """Those of the document that a request has alone; None where there are none."""

    def put_firsts(self, request: KvRequest, firsts: torch.Tensor | None) -> None:
        """Says which the document has that a request has alone."""


class ExactForm:
    """Documents in exact pages [pages, 2, P, D]; `heads` names the head map, "" for none."""

    basis_bytes = 0
    first_bytes = 0

    def __init__(self, cache: KvCache, pages: torch.Tensor, heads: str, flops: RowsFlops) -> None:
        self.cache, self.arena, self.flops, self._heads = cache, pages, flops, heads

    @property
    def token_bytes(self) -> int:
        """As `DocumentForm`, and so are the others."""
        return self.cache.shape.token_bytes

    def provenance(self, namespace: str, regime: int) -> Provenance:
        """A payload's."""
        return provenance_here(self.cache, namespace, regime, self._heads)

    def export(self, request: KvRequest, rope: RopeTable | None = None) -> KvPayload:
        """A payload with all that windows hold."""
        return export_kv(self.cache, self.arena, request, rope=rope, whole=True)

    def admit(self, document: KvPayload, namespace: str) -> KvRequest:
        """As `admit_kv`."""
        return admit_kv(self.cache, self.arena, document, namespace)

    def write(self, store: Store, document: KvPayload) -> str:
        """As `store_payload`."""
        cost = self.flops(0, document.header.tokens)
        return store_payload(store, document, self._heads, cost=cost)

    def send(self, store: RemoteStore, document: KvPayload) -> None:
        """As `send_payload`."""
        send_payload(store, document, self._heads)

    def most_bytes(self, tokens: int) -> int:
        """All tokens in all heads."""
        return tokens * self.token_bytes

    def read(self, shard: Shard | RemoteShard) -> KvPayload:
        """As `read_payload`."""
        return read_payload(shard)

    def begin(self, shard: Shard) -> ArrivingPayload:
        """Its KV is read layer by layer."""
        return ArrivingPayload(shard)

    def hold(self, request: KvRequest) -> None:
        """Nothing: blocks that a request holds are not given to others."""

    def bases(self, blocks: Int32) -> None:
        """None."""

    def put_bases(self, blocks: Int32, bases: BlockBases | None) -> None:
        """Nothing."""

    def bounds(self, blocks: Int32) -> None:
        """None: bounds of exact pages are of the requests that read them."""

    def put_bounds(self, blocks: Int32, bounds: torch.Tensor | None) -> None:
        """Nothing."""

    def firsts_at_home(self, rooms: int) -> None:
        """None: all tokens are exact."""

    def firsts(self, request: KvRequest) -> None:
        """None: all tokens are exact."""

    def put_firsts(self, request: KvRequest, firsts: torch.Tensor | None) -> None:
        """Nothing."""

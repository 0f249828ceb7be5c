"""How documents lie in the folder of a rank: exactly, or in packed pages where the store's are.

A packed store writes its pages as they lie, with the bases that they are packed in where they have
any and the first tokens that are exact beside them, and takes them back bit for bit; exact
documents that the folder has of the same text are packed as they come. An exact store knows exact
ones alone. The format of packed pages, their tokens and how many first ones are exact are part of
what a shard is found by, so pages of another one are never read as these.

Whether there is room for a document's bases each rank knows for its own alone. So it is part of
what ranks agree on before any of them takes the document, and what is free then stays free until
it is taken: pages that are taken name no more bases than before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave import ops
from kvweave.adapters.vllm.segments.packed_store import PackedSegmentStore
from kvweave.adapters.vllm.segments.ranks import all_of
from kvweave.adapters.vllm.segments.store import DocumentRoom, SegmentStore
from kvweave.cache import KvCache, KvRequest
from kvweave.errors import KvweaveError
from kvweave.payload import KvPayload
from kvweave.payload.stored import provenance_here, read_payload, store_payload
from kvweave.runner.kv.exact_firsts import ExactFirsts
from kvweave.runner.kv.pool_bases import PoolBases
from kvweave.runner.tiers.document_form import RowsFlops
from kvweave.runner.tiers.packed_form import PackedDocument, PackedForm
from kvweave.store import Provenance, Shard, Store

Ids = npt.NDArray[np.uint32]
Document: TypeAlias = KvPayload | PackedDocument
Found: TypeAlias = tuple[Document, str]
"""A document, and the name of its shard."""


@dataclass(frozen=True)
class StoreBlocks:
    """The packed blocks of a `PackedSegmentStore`: no bounds."""

    cache: KvCache
    pages: ops.PackedPages
    block_pages: int
    block_bytes: int
    bases: PoolBases | None
    firsts: ExactFirsts | None
    bounds: None = None

    def bound(self, blocks: npt.NDArray[np.int32], tokens: int) -> None:
        """Nothing: nobody chooses among these."""


class DocumentShards:
    """Documents of `segments` in `store`, of the weights that `model` names.

    `heads` says which heads a rank has; `flops` is what computing rows takes; `refused` is called
    with what is wrong with a shard that cannot be read.
    """

    def __init__(
        self,
        segments: SegmentStore,
        store: Store,
        model: str,
        heads: str,
        flops: RowsFlops,
        refused: Callable[[KvweaveError], None],
    ) -> None:
        self._segments, self._store, self._model, self._heads = segments, store, model, heads
        self._flops, self._refused = flops, refused
        self._packed: PackedForm | None = None
        if isinstance(segments, PackedSegmentStore):
            sizes, beside = (segments.block_pages, segments.block_bytes), segments.firsts
            blocks = StoreBlocks(segments.cache, segments.packed, *sizes, segments.bases, beside)
            self._packed = PackedForm(blocks, heads, flops, fingerprint=model)

    def write(self, request: KvRequest, room: DocumentRoom) -> str:
        """Puts a committed document into the folder, and returns the shard's name.

        Errors: as `Store.put`.
        """
        if self._packed is not None:
            return self._packed.write(self._store, self._packed.export(request))
        payload = room.payload(self._segments.rope)
        payload = KvPayload(replace(payload.header, fingerprint=self._model), payload.parts)
        cost = self._flops(0, request.length)
        return store_payload(self._store, payload, self._heads, cost=cost)

    def read(self, namespace: str, tokens: Ids) -> Found | None:
        """A document, each byte checked: on all ranks in the same form, or None on all of them.

        Every rank has to ask. As pages of the two forms may be shared with others in another way,
        ranks that took different ones would plan later prompts differently.
        """
        if self._packed is not None:
            of = self._packed.provenance(namespace, self._segments.regime)
            found = self._found(of, tokens, self._read_packed)
            if all_of(found is not None):
                return found
        cache, regime = self._segments.cache, self._segments.regime
        of = provenance_here(cache, namespace, regime, self._heads, fingerprint=self._model)
        found = self._found(of, tokens, self._read_exact)
        return found if all_of(found is not None) else None

    def admit(self, document: Document, namespace: str) -> KvRequest:
        """A request of a document that was read, stored as if it had been computed here.

        Errors: as `SegmentStore.take`. Nothing is held then.
        """
        if isinstance(document, PackedDocument):
            assert self._packed is not None
            return self._packed.admit(document, namespace)
        return self._segments.take(document, namespace)

    def _found(
        self, of: Provenance, tokens: Ids, read: Callable[[Shard], Document]
    ) -> Found | None:
        try:
            shard = self._store.get(of, tokens)
            return None if shard is None else (read(shard), shard.name)
        except KvweaveError as error:
            self._refused(error)
            return None

    def _read_packed(self, shard: Shard) -> PackedDocument:
        assert self._packed is not None
        document, pool = self._packed.read(shard), self._packed.pool
        if pool.bases is not None and document.bases is not None:
            # What was freed by now is packed in no basis any more.
            pool.cache.zero_freed()
            pool.bases.expect_room(document.bases)
        return document

    def _read_exact(self, shard: Shard) -> KvPayload:
        payload = read_payload(shard)
        own = replace(payload.header, fingerprint=self._segments.cache.fingerprint)
        return KvPayload(own, payload.parts)

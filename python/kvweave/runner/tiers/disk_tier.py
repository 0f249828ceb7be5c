"""`DiskTier`: the documents of a store that are of this model, and lie in pages like these."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.errors import UnknownShard
from kvweave.payload.arriving import ArrivingPayload
from kvweave.runner.tiers.choice import Tier
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import DocumentForm, StoredDocument
from kvweave.store import Provenance, Store


class DiskTier:
    """A store as the documents of one cache lie in it, whose form says how.

    From any thread. All errors are the store's.
    """

    source: Tier = "disk"
    called = "the store"
    trouble = ""
    is_resting = False

    def __init__(self, store: Store, form: DocumentForm) -> None:
        self.store = store
        self._form = form

    def provenance(self, namespace: str, regime: int) -> Provenance:
        """What the KV of a document here is of, but for its tokens."""
        return self._form.provenance(namespace, regime)

    def has(self, document: Document) -> bool:
        """Whether the store has a document, by its head."""
        of = self.provenance(document.namespace, document.regime)
        return self.store.contains(of, document.tokens)

    def read(
        self, document: Document, left: Callable[[], bool]
    ) -> StoredDocument | ArrivingPayload | None:
        """As `ReadTier.read`; what can arrive layer by layer is begun."""
        of = self.provenance(document.namespace, document.regime)
        shard = self.store.get(of, document.tokens)
        return None if shard is None else self._form.begin(shard)

    def name(self, document: Document, name: str) -> None:
        """Keeps a document that the store has under a name.

        # Errors
        `UnknownShard` for one that it has no longer.
        """
        of = self.provenance(document.namespace, document.regime)
        shard = self.store.get(of, document.tokens)
        if shard is None:
            raise UnknownShard("shard: expected the one that was read, got none")
        self.store.name(document.namespace, name, shard.name)

    def write(self, payload: StoredDocument, name: str | None) -> None:
        """Keeps a document, under a name if there is one; when this returns, it survives."""
        shard = self._form.write(self.store, payload)
        if name is not None:
            self.store.name(payload.header.namespace, name, shard)

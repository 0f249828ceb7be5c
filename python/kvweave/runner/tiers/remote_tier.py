"""`RemoteTier`: documents of this model, head map and dtype in a store on another machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvweave.errors import StoreUnavailable
from kvweave.remote import RemoteStore
from kvweave.runner.tiers.choice import Tier
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import DocumentForm, StoredDocument

REST_S = 10.0
_BESIDE = 1 << 20
"""Bytes of a shard that are neither ids nor KV: its head, a payload's header, the gaps."""


class RemoteTier:
    """A remote store as the documents of one cache lie in it, whose form says how.

    Once it has not answered, or has refused, it is asked again after `rest_s`: so a dead one costs
    one request its patience, and not each. From any thread. All errors are the store's.
    """

    source: Tier = "remote"
    called = "the remote store"
    trouble = "remote "

    def __init__(self, store: RemoteStore, form: DocumentForm, *, rest_s: float = REST_S) -> None:
        self.store = store
        self.rest_s = rest_s
        self._form = form
        self._until = 0.0

    @property
    def is_resting(self) -> bool:
        """Whether it failed just now, and nobody is to ask it for a while."""
        return time.monotonic() < self._until

    def read(self, document: Document, left: Callable[[], bool]) -> StoredDocument | None:
        """The KV of a document, all of it compared; None where there is none, or nobody wants it.

        An object that is larger than such a document can be is refused before it is read.
        """
        of = self._form.provenance(document.namespace, document.regime)
        most = self._form.most_bytes(document.length) + 4 * document.length + _BESIDE
        with self._answering():
            shard = self.store.get(of, document.tokens, most_bytes=most, left=left)
        return None if shard is None else self._form.read(shard)

    def write(self, payload: StoredDocument, name: str | None) -> None:
        """Sends a document, if it is not there; it is found by its text, not by a name."""
        with self._answering():
            self._form.send(self.store, payload)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        if self.is_resting:
            raise StoreUnavailable("remote store: expected one that answers, got none just now")
        try:
            yield
        except StoreUnavailable:
            self._until = time.monotonic() + self.rest_s
            raise

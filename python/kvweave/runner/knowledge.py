"""Knowledge bases: documents that are prefilled once, frozen by name, and kept in a store."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvweave.arguments import shown, word
from kvweave.cache import KvRequest
from kvweave.device_memory import needs_memory
from kvweave.errors import (
    CorruptShard,
    ForeignShard,
    InvalidArgument,
    StoreDegraded,
    StoreUnavailable,
    UnknownSegment,
    UnknownShard,
)
from kvweave.ops import RopeTable
from kvweave.policies import policy_of
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prompt import TokenizedPrompt, token_array
from kvweave.runner.report import Report
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import DocumentForm
from kvweave.runner.tiers.final_packing import TextCopy
from kvweave.store import Provenance, Shard, Store

_REFUSED = (CorruptShard, ForeignShard, StoreUnavailable, UnknownShard)


class Knowledge:
    """The documents of one runner. Whoever computes or writes pages does so alone."""

    def __init__(self, prefiller: Prefiller, form: DocumentForm) -> None:
        self._prefiller = prefiller
        self._tiers = prefiller.tiers
        self._form = form

    def encode(
        self, text: TokenizedPrompt, name: str, namespace: str, store: Store | None = None
    ) -> Report:
        """Prefills a document alone and freezes it; keeps it in a store, if there is one.

        That is the one named here, before this returns, and the runner's own, behind it. One that
        is to be packed finally is kept as it is then.
        """
        prefiller, tokens = self._prefiller, text.tokens
        failed: list[Exception] = []

        def kept(request: KvRequest, rope: RopeTable | None = None) -> None:
            try:
                self._keep(request, name, store, rope)
            except Exception as error:
                failed.append(error)

        with prefiller.computing, self._copy(text, namespace) as copy:
            keep, lookup = prefiller.packed is None, Lookup(namespace)
            full = policy_of("full")
            with prefiller.prefill(text, full, lookup, keep=keep, copy=copy) as done:
                packed = done.kv.packed
                if packed is None:
                    done.request.freeze(name, 0, len(tokens))
                    kept(done.request, done.positions.rope)
                else:
                    exact = packed.freeze(done.request, name)
                    if done.report.packed is not None:
                        done.report.packed.exact_first = exact
                    if copy is None:
                        kept(packed.request)
                    else:
                        copy.finish(packed, name, kept)
                        done.report.packing = copy.report
                report = done.report
        if store is not None:
            self.flush()
        if failed:
            raise failed[0]
        return report

    @contextmanager
    def _copy(self, text: TokenizedPrompt, namespace: str) -> Iterator[TextCopy | None]:
        """What keeps a document's exact pages where it may be packed once more."""
        final, rotary = self._prefiller.final_packing, self._prefiller.rotary
        if final is None:
            yield None
            return
        tokens = text.tokens
        copy = final.begin(tokens, namespace, rotary.regime(len(tokens)))
        try:
            yield copy
        except BaseException:
            copy.drop()
            raise

    def _keep(
        self, request: KvRequest, name: str, store: Store | None, rope: RopeTable | None
    ) -> None:
        """Keeps a document that was frozen in the runner's own tiers, and in a store."""
        if self._tiers is not None:
            self._tiers.keep(request, request.regime, name)
        if store is not None:
            shard = self._form.write(store, self._form.export(request, rope))
            store.name(request.namespace, name, shard)

    def flush(self) -> None:
        """Returns when no document waits to be packed finally."""
        if self._prefiller.final_packing is not None:
            self._prefiller.final_packing.flush()

    def deleted(self, name: str, namespace: str) -> None:
        """Says that a document is frozen no longer."""
        packed = self._prefiller.packed
        if packed is not None and (documents := packed.documents) is not None:
            self._prefiller.computing.soon(lambda: documents.forget(namespace, name))

    def packing_stats(self) -> dict[str, int]:
        """As `FinalPacking.stats`; empty where pages are packed in no basis."""
        final = self._prefiller.final_packing
        return {} if final is None else final.stats()

    def close(self) -> None:
        """Ends the thread that packs documents finally."""
        if self._prefiller.final_packing is not None:
            self._prefiller.final_packing.close()

    def insert(self, text: TokenizedPrompt, name: str, namespace: str, store: Store | None) -> None:
        """Freezes a document: from the store where it is kept there, else computed and kept."""
        if store is None:
            if not self._from_tiers(text, name, namespace):
                self.encode(text, name, namespace)
            return
        _expect_store(store)
        wanted = self._provenance(namespace, len(text.tokens))
        try:
            shard = store.get(wanted, text.tokens)
            if shard is not None:
                self._freeze(shard, name, namespace)
        except _REFUSED as error:
            _warn(f"document {shown(name)} is computed anew: {error}")
            shard = None
        if shard is None:
            self.encode(text, name, namespace, store)
        else:
            store.name(namespace, name, shard.name)

    @needs_memory("insert")
    @torch.inference_mode()
    def _from_tiers(self, text: TokenizedPrompt, name: str, namespace: str) -> bool:
        """Freezes a document that the host's memory or the runner's store has; whether one had."""
        tiers, prefiller = self._tiers, self._prefiller
        if tiers is None:
            return False
        regime = prefiller.rotary.table(len(text.tokens)).regime
        document = Document(text.tokens, namespace, regime)
        with prefiller.computing, prefiller.spec.current(), tiers.document(document) as brought:
            if not brought.requests:
                return False
            brought.requests[0].freeze(name, 0, document.length)
            self._named(brought.requests[0], name)
            prefiller.clock.wait()
            brought.take_times()
            tiers.name(document, brought.requests[0], name)
        return True

    def restore(self, store: Store | None, namespace: str, name: str | None) -> list[str]:
        """Freezes what a store keeps by name, by default the runner's own; returns the names."""
        if store is None and self._tiers is not None and self._tiers.disk is not None:
            store = self._tiers.disk.store
        _expect_store(store)
        assert store is not None
        if name is not None:
            self._restore(store, word("name", name), namespace)
            return [name]
        restored = []
        for _, each, _ in store.documents(namespace):
            try:
                self._restore(store, each, namespace)
            except (*_REFUSED, UnknownSegment) as error:
                _warn(f"document {shown(each)} is left out: {error}")
            else:
                restored.append(each)
        return restored

    def _restore(self, store: Store, name: str, namespace: str) -> None:
        shard = store.document(name, namespace)
        if shard is None:
            raise UnknownSegment(f"document {shown(name)}: expected one in the store, got none")
        self._freeze(shard, name, namespace)

    @needs_memory("restore")
    @torch.inference_mode()
    def _freeze(self, shard: Shard, name: str, namespace: str) -> None:
        """Writes a shard's KV into the pages and freezes it.

        # Errors
        `ForeignShard` for one of another model, head map, regime or vocabulary, `CorruptShard`.
        """
        prefiller = self._prefiller
        tokens = shard.tokens()
        self._provenance(namespace, len(tokens)).expect(shard.provenance)
        try:
            token_array(tokens, prefiller.spec.vocabulary)
        except InvalidArgument as error:
            raise ForeignShard(f"shard {error}") from error
        document = self._form.read(shard)
        with prefiller.computing, self._form.admit(document, namespace) as request:
            request.freeze(name, 0, request.length)
            self._named(request, name)
            if self._tiers is not None:
                self._tiers.copy_to_host(request, request.regime)

    def _named(self, request: KvRequest, name: str) -> None:
        """Takes note of a document that was brought and frozen."""
        packed = self._prefiller.packed
        if packed is not None and packed.documents is not None:
            packed.documents.named(request, name)

    def _provenance(self, namespace: str, tokens: int) -> Provenance:
        """What the KV of a document of this length would be of here."""
        regime = self._prefiller.rotary.table(tokens).regime
        return self._form.provenance(namespace, regime)


def _expect_store(store: object) -> None:
    if not isinstance(store, Store):
        raise InvalidArgument(f"store: expected a Store, got {shown(store)}")


def _warn(text: str) -> None:
    # Points at whoever called `Runner.insert` or `Runner.restore`.
    warnings.warn(text, StoreDegraded, stacklevel=4)

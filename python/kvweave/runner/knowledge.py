"""Knowledge bases: documents that are prefilled once, frozen by name, and kept in a store."""

from __future__ import annotations

import warnings

import torch

from kvweave.arguments import shown, word
from kvweave.cache import HeadClassMap
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
from kvweave.payload.stored import LAYOUT, read_payload, store_payload
from kvweave.payload.transfer import export_kv, freeze_kv
from kvweave.policies import policy_of
from kvweave.policies.policy_profile import heads_digest
from kvweave.runner.kv.beside_packed import refuse_beside_packed
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prompt import TokenizedPrompt, token_array
from kvweave.runner.report import Report
from kvweave.store import Provenance, Shard, Store

_REFUSED = (CorruptShard, ForeignShard, StoreUnavailable, UnknownShard)


class Knowledge:
    """The documents of one runner. Whoever computes or writes pages does so alone."""

    def __init__(self, prefiller: Prefiller, heads: HeadClassMap | None) -> None:
        self._prefiller = prefiller
        self._heads = "" if heads is None else heads_digest(heads)

    def encode(
        self, text: TokenizedPrompt, name: str, namespace: str, store: Store | None = None
    ) -> Report:
        """Prefills a document alone and freezes it; keeps it in a store, if there is one."""
        prefiller = self._prefiller
        refuse_beside_packed(prefiller.packed, "documents")
        lookup = Lookup(namespace)
        with (
            prefiller.computing,
            prefiller.prefill(text, policy_of("full"), lookup, keep=True) as done,
        ):
            done.request.freeze(name, 0, len(text.tokens))
            if store is not None:
                payload = export_kv(
                    prefiller.cache,
                    prefiller.pages,
                    done.request,
                    rope=done.positions.rope,
                    whole=True,
                )
                store.name(namespace, name, store_payload(store, payload, self._heads))
            return done.report

    def insert(self, text: TokenizedPrompt, name: str, namespace: str, store: Store | None) -> None:
        """Freezes a document: from the store where it is kept there, else computed and kept."""
        if store is None:
            self.encode(text, name, namespace)
            return
        _expect_store(store)
        refuse_beside_packed(self._prefiller.packed, "documents")
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

    def restore(self, store: Store, namespace: str, name: str | None) -> list[str]:
        """Freezes what a store keeps by name; returns the names."""
        _expect_store(store)
        refuse_beside_packed(self._prefiller.packed, "documents")
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
        payload = read_payload(shard)
        with prefiller.computing:
            freeze_kv(prefiller.cache, prefiller.pages, payload, name, namespace)

    def _provenance(self, namespace: str, tokens: int) -> Provenance:
        """What the KV of a document of this length would be of here."""
        cache = self._prefiller.cache
        return Provenance(
            cache.fingerprint,
            dtype=cache.shape.dtype,
            layout=LAYOUT,
            layers=cache.shape.layers,
            kv_heads=cache.shape.kv_heads,
            head_dim=cache.shape.head_dim,
            namespace=namespace,
            regime=self._prefiller.rotary.table(tokens).regime,
            heads=self._heads,
        )


def _expect_store(store: object) -> None:
    if not isinstance(store, Store):
        raise InvalidArgument(f"store: expected a Store, got {shown(store)}")


def _warn(text: str) -> None:
    # Points at whoever called `Runner.insert` or `Runner.restore`.
    warnings.warn(text, StoreDegraded, stacklevel=4)

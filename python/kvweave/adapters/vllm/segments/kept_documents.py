"""Documents of a knowledge base that survive their worker: in a folder, and back in its pages.

Each rank of tensor parallelism keeps the heads that it has, in a folder of its own, and what one
rank cannot read none reads: a prompt is planned alike on all. On the device the documents that were
used last are frozen, as many as may be; the others wait in the folder until a prompt marks their
text.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed import get_tp_group

from kvweave.adapters.vllm.segments.store import AdmittedPrompt, SegmentStore
from kvweave.cache import KvRequest
from kvweave.errors import KvweaveError, PoolFull, UnknownSegment
from kvweave.payload import KvPayload, export_kv
from kvweave.payload.stored import provenance_here, read_payload, store_payload
from kvweave.payload.transfer import admit_kv
from kvweave.store import Provenance, Store

_log = logging.getLogger(__name__)
Tokens = Sequence[int]
Text = tuple[str, bytes]
"""A namespace, and token ids as bytes."""
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Kept:
    """A text's KV from the folder: its shard, and the first document that names it, if any."""

    payload: KvPayload
    shard: str
    name: str | None


class KeptDocuments:
    """The documents of one rank: a `Store` below `folder`, and the segments' store before it.

    `model` names the weights and their configuration (`model_identity`).

    Errors: `StoreUnavailable` and others of `Store` for a folder that cannot be one.
    """

    def __init__(
        self,
        segments: SegmentStore,
        folder: Path,
        model: str,
        capacity_bytes: int | None = None,
        quota_bytes: int | None = None,
    ) -> None:
        group = get_tp_group()
        self._segments, self._model = segments, model
        self._heads = f"rank-{group.rank_in_group}-of-{group.world_size}"
        # Names in SHA-256: one tenant must not choose a text that takes the place of another's.
        self.store = Store(
            folder / self._heads,
            hash="sha256",
            capacity_bytes=capacity_bytes,
            quota_bytes=quota_bytes,
        )
        self._frozen: OrderedDict[Text, str] = OrderedDict()
        self._brought: Counter[str] = Counter()
        self._told: set[str] = set()

    # ---- a document that is inserted or deleted ------------------------------------------------

    def take(self, name: str, tokens: Tokens, namespace: str) -> bool:
        """Freezes a document whose text is kept already; whether every rank could read it."""
        kept = self._read(namespace, tokens)
        if not _all_of(kept is not None) or kept is None:
            return False
        if not self._bring(kept.payload, namespace, tokens, name):
            return False
        return self._named(namespace, name, tokens, kept.shard) is None

    def freeze(self, request: KvRequest, name: str) -> None:
        """Freezes all of a committed request; kept documents make room, those used least first.

        Errors: `PoolFull` where they do not make enough.
        """
        while True:
            try:
                request.freeze(name, 0, request.length)
                return
            except PoolFull:
                if not self._unfreeze_one():
                    raise

    def keep(self, request: KvRequest, name: str, tokens: Tokens) -> str | None:
        """Writes a frozen document; when this returns None, it survives. Else why it does not."""
        segments = self._segments
        payload = export_kv(segments.cache, segments.pages, request, rope=segments.rope, whole=True)
        payload = KvPayload(replace(payload.header, fingerprint=self._model), payload.parts)
        shard, why = "", None
        try:
            shard = store_payload(self.store, payload, self._heads)
        except KvweaveError as error:
            why = str(error)
        return self._refused(name, why) or self._named(request.namespace, name, tokens, shard)

    def delete(self, namespace: str, name: str) -> bool:
        """Takes a document out of the folder; whether it was there."""
        self._forget_frozen(namespace, name)
        shard = self._shards(namespace).get(name)
        if not self.store.forget(name, namespace):
            return False
        self._drop(namespace, shard)
        return True

    # ---- a prompt that is looked up ------------------------------------------------------------

    def bring(self, prompt: Tokens, admitted: AdmittedPrompt, spans: Spans) -> bool:
        """Freezes those of a prompt's marked texts that are documents in the folder alone.

        Whether there were any: then the prompt is to be admitted anew.
        """
        namespace, brought = admitted.request.namespace, 0
        for start, end in spans:
            tokens = prompt[start:end]
            # The last token of a prompt is computed in any case.
            if admitted.reused[start : min(end, admitted.tokens - 1)].all():
                self._used(namespace, tokens)
            elif not self._is_whole(namespace, tokens):
                brought += self._bring_text(namespace, tokens)
        return brought > 0

    # ---- what there is -------------------------------------------------------------------------

    def names(self, namespace: str | None) -> list[tuple[str, str, int]]:
        """Namespace, name and tokens of every document in the folder, of a namespace or all."""
        sizes = {shard.name: shard.tokens or 0 for shard in self.store.list(namespace)}
        documents = self.store.documents(namespace)
        return [(space, name, sizes.get(shard, 0)) for space, name, shard in documents]

    def counts(self) -> dict[str, int]:
        """Documents and bytes in the folder, and how many came from there, and their tokens."""
        held, documents = self.store.held()[0], len(self.store.documents())
        found = {name: self._brought[name] for name in ("documents", "tokens", "refused")}
        brought = {f"brought_{name}": count for name, count in found.items()}
        return {"kept_documents": documents, "kept_bytes": held, **brought}

    # ---- inside --------------------------------------------------------------------------------

    def _bring_text(self, namespace: str, tokens: Tokens) -> bool:
        kept = self._read(namespace, tokens)
        name = None if kept is None else kept.name
        if not _all_of(name is not None) or kept is None or name is None:
            return False
        return self._bring(kept.payload, namespace, tokens, name)

    def _read(self, namespace: str, tokens: Tokens) -> Kept | None:
        """The KV of a text, each byte of it checked; None where it is to be computed."""
        fingerprint = self._segments.cache.fingerprint
        try:
            shard = self.store.get(self._provenance(namespace), _ids(tokens))
            if shard is None:
                return None
            payload = read_payload(shard)
            named = self._shards(namespace).items()
        except KvweaveError as error:
            self._brought["refused"] += 1
            self._tell(f"a document is computed anew: {error}")
            return None
        payload = KvPayload(replace(payload.header, fingerprint=fingerprint), payload.parts)
        name = next((name for name, found in named if found == shard.name), None)
        return Kept(payload, shard.name, name)

    @torch.inference_mode()
    def _bring(self, payload: KvPayload, namespace: str, tokens: Tokens, name: str) -> bool:
        """Writes a document's KV into the pages and freezes it; not where there is no room."""
        segments = self._segments
        try:
            with admit_kv(segments.cache, segments.pages, payload, namespace) as request:
                self.freeze(request, name)
        except PoolFull:
            return False
        self._brought.update(documents=1, tokens=len(tokens))
        self._forget_frozen(namespace, name)
        self._frozen[namespace, _ids(tokens).tobytes()] = name
        return True

    def _named(self, namespace: str, name: str, tokens: Tokens, shard: str) -> str | None:
        """Has a name mean a text's shard, and its old one go; or why not."""
        why = None
        try:
            old = self._shards(namespace).get(name)
            self.store.name(namespace, name, shard)
            if old != shard:
                self._drop(namespace, old)
        except KvweaveError as error:
            why = str(error)
        why = self._refused(name, why)
        if why is None:
            self._forget_frozen(namespace, name)
            self._frozen[namespace, _ids(tokens).tobytes()] = name
        return why

    def _drop(self, namespace: str, shard: str | None) -> None:
        """Removes a shard that no document names any more."""
        if shard is not None and shard not in self._shards(namespace).values():
            self.store.delete(shard)

    def _shards(self, namespace: str) -> dict[str, str]:
        """The shard of each document of a namespace, by name."""
        return {name: shard for _, name, shard in self.store.documents(namespace)}

    def _provenance(self, namespace: str) -> Provenance:
        segments = self._segments
        return provenance_here(
            segments.cache, namespace, segments.regime, self._heads, fingerprint=self._model
        )

    def _is_whole(self, namespace: str, tokens: Tokens) -> bool:
        name = self._frozen.get((namespace, _ids(tokens).tobytes()))
        if name is None:
            return False
        try:
            entry = self._segments.cache.frozen_segment(name, namespace)
        except UnknownSegment:
            return False
        return entry.resident_blocks == entry.blocks

    def _used(self, namespace: str, tokens: Tokens) -> None:
        key = namespace, _ids(tokens).tobytes()
        if key in self._frozen:
            self._frozen.move_to_end(key)

    def _unfreeze_one(self) -> bool:
        """Lets the kept document that was used least recently go; it can be read again."""
        if not self._frozen:
            return False
        (namespace, _), name = self._frozen.popitem(last=False)
        with suppress(UnknownSegment):
            self._segments.cache.delete(name, namespace)
        return True

    def _forget_frozen(self, namespace: str, name: str) -> None:
        """A name is another text's from now on, or nobody's."""
        named = [key for key, own in self._frozen.items() if (key[0], own) == (namespace, name)]
        for key in named:
            del self._frozen[key]

    def _refused(self, name: str, why: str | None) -> str | None:
        """Why a rank could not write a document, on every rank."""
        if _all_of(why is None):
            return None
        why = why or "another rank could not write it"
        self._tell(f"document {name!r} is not kept: {why}")
        return why

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning("kvweave store: %s", text)


def _ids(tokens: Tokens) -> npt.NDArray[np.uint32]:
    return np.asarray(tokens, np.uint32)


def _all_of(holds: bool) -> bool:
    """Whether something holds on every rank of tensor parallelism; asked by all of them."""
    group = get_tp_group()
    if group.world_size == 1:
        return holds
    said = torch.tensor(int(holds))
    all_reduce(said, ReduceOp.MIN, group=group.cpu_group)
    return bool(said)

"""Documents of a knowledge base that survive their worker: in a folder, and back in its pages.

Each rank of tensor parallelism keeps the heads that it has, in a folder of its own, and what one
rank cannot read none reads: a prompt is planned alike on all. On the device the documents that were
used last are frozen, as many as may be; the others wait in the folder until a prompt marks their
text.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tp_group

from kvweave.adapters.vllm.own_store import opened_for
from kvweave.adapters.vllm.segments.document_shards import Document, DocumentShards
from kvweave.adapters.vllm.segments.document_weighing import DocumentWeighing
from kvweave.adapters.vllm.segments.kept_weights import KeptWeights
from kvweave.adapters.vllm.segments.ranks import agreed, all_of
from kvweave.adapters.vllm.segments.store import AdmittedPrompt, DocumentRoom, SegmentStore
from kvweave.cache import KvRequest
from kvweave.errors import (
    ForeignStore,
    InvalidArgument,
    KvweaveError,
    PoolFull,
    UnknownSegment,
    UnknownShard,
)

_log = logging.getLogger(__name__)
HEAD = 16
"""Tokens that a marked text and a document have to begin with alike, to be compared further."""
Tokens = Sequence[int]
Ids = npt.NDArray[np.uint32]
Name = tuple[str, str]
"""A namespace, and the name of a document of it."""
Spans = Sequence[tuple[int, int]]


class KeptDocuments:
    """The documents of one rank: a `Store` below `folder`, and the segments' store before it.

    `model` names the weights and their configuration (`model_identity`), and behind a space the
    head map; `owner` is the model that the folder is to belong to, None: any. `weighing` says which
    documents are worth reading, `weights` which weights all are of.

    Errors: as `opened_for`.
    """

    def __init__(
        self,
        segments: SegmentStore,
        folder: Path,
        model: str,
        weighing: DocumentWeighing,
        weights: KeptWeights,
        owner: str | None = None,
        capacity_bytes: int | None = None,
        quota_bytes: int | None = None,
    ) -> None:
        group = get_tp_group()
        self._segments, self.weighing, self.weights = segments, weighing, weights
        heads = f"rank-{group.rank_in_group}-of-{group.world_size}"
        _check_others(folder, group.world_size, owner)
        # Names in SHA-256: one tenant must not choose a text that takes the place of another's.
        self.store = opened_for(
            owner,
            "store_shared",
            folder / heads,
            hash="sha256",
            capacity_bytes=capacity_bytes,
            quota_bytes=quota_bytes,
        )
        self._shards = DocumentShards(
            segments, self.store, model, heads, weighing.flops, self._computed_anew
        )
        self._frozen: OrderedDict[Name, Ids] = OrderedDict()
        self._listed: list[tuple[str, str, str]] = []
        self._texts: dict[Name, Ids] = {}
        # Bytes that reading each of them takes.
        self._sizes: dict[Name, int] = {}
        self._brought: Counter[str] = Counter()
        self._told: set[str] = set()

    # ---- a document that is inserted or deleted ------------------------------------------------

    def take(self, name: str, tokens: Tokens, namespace: str) -> bool:
        """Freezes a document whose text is kept already; whether every rank could read it."""
        found = self._shards.read(namespace, _ids(tokens))
        if found is None:
            return False
        document, shard = found
        if not self._bring(document, (namespace, name), _ids(tokens)):
            return False
        return self._named((namespace, name), _ids(tokens), shard) is None

    def yielding(self) -> list[Name]:
        """Documents that `freeze` has make room where it must: they can be read again."""
        return list(self._frozen)

    def freeze(self, request: KvRequest, name: str) -> None:
        """Freezes all of a committed request; kept documents make room, those used least first.

        Errors: `PoolFull` where they do not make enough; none goes for one that is too large alone.
        """
        self._segments.require_room_alone(request.length)
        while True:
            try:
                request.freeze(name, 0, request.length)
                return
            except PoolFull:
                if not self._unfreeze_one():
                    raise

    def keep(self, request: KvRequest, room: DocumentRoom, name: str) -> str | None:
        """Writes a frozen document; when this returns None, it survives. Else why it does not.

        `room`: where it was encoded.
        """
        shard, why = "", None
        try:
            shard = self._shards.write(request, room)
        except KvweaveError as error:
            why = str(error)
        document = request.namespace, name
        why = self._refused(name, why) or self._named(document, _ids(request.tokens), shard)
        if why is not None:
            # What had the name before is replaced all the same.
            with suppress(KvweaveError):
                self.delete(*document)
        return why

    def delete(self, namespace: str, name: str) -> bool:
        """Takes a document out of the folder; whether it was there."""
        self._frozen.pop((namespace, name), None)
        self._texts.pop((namespace, name), None)
        shard = self._named_shards(namespace).get(name)
        if not self.store.forget(name, namespace):
            return False
        self._drop(namespace, shard)
        return True

    def all_went(self) -> None:
        """Hears that the device has no document any more: those of the folder can be read again."""
        self._frozen.clear()

    def leave(self) -> None:
        """Says that the folder is left as it is: the engine's weights are others now."""
        text = "the weights were replaced: from now on documents last as long as the engine"
        self._tell(text, "replaced")

    # ---- a prompt that is looked up ------------------------------------------------------------

    def bring(self, prompt: Tokens, admitted: AdmittedPrompt, spans: Spans) -> bool:
        """Freezes those of a prompt's marked texts that are documents in the folder alone.

        Whether there were any: then the prompt is to be admitted anew.
        """
        namespace, brought = admitted.request.namespace, 0
        for start, end in spans:
            tokens = _ids(prompt[start:end])
            # The last token of a prompt is computed in any case.
            if admitted.reused[start : min(end, admitted.tokens - 1)].all():
                self._used(namespace, tokens)
                continue
            here = ~admitted.reused
            others = int(here.sum() - here[start:end].sum())
            brought += self._bring_text(namespace, tokens, start, others)
        return brought > 0

    # ---- what there is -------------------------------------------------------------------------

    def names(self, namespace: str | None) -> list[tuple[str, str, int]]:
        """Namespace, name and tokens of every document in the folder, of a namespace or all."""
        self._refresh()
        listed = [(space, name) for space, name, _ in self._listed]
        own = [each for each in listed if namespace is None or each[0] == namespace]
        return [(*each, len(self._texts.get(each, ()))) for each in own]

    def counts(self) -> dict[str, int]:
        """Documents and bytes in the folder, and how many came from there, and their tokens.

        `brought_declined`: how often computing one was faster than reading it.
        """
        held, documents = self.store.held()[0], len(self.store.documents())
        names = ("documents", "tokens", "refused", "declined")
        found = {name: self._brought[name] for name in names}
        brought = {f"brought_{name}": count for name, count in found.items()}
        return {"kept_documents": documents, "kept_bytes": held, **brought}

    # ---- inside --------------------------------------------------------------------------------

    def _bring_text(self, namespace: str, tokens: Ids, start: int, others: int) -> bool:
        """Freezes the document that a marked text begins like, if the folder alone has it.

        It is at `start` in a prompt of which `others` tokens are computed anyway.
        """
        self._refresh()
        texts = {name: ids for (space, name), ids in self._texts.items() if space == namespace}
        name = agreed(_most_alike(texts, tokens))
        if name is None or self._is_whole((namespace, name), texts[name]):
            return False
        document = texts[name]
        size, end = self._sizes.get((namespace, name), 0), start + len(document)
        if not all_of(self.weighing.is_worth_reading(size, start, end, others)):
            self._brought["declined"] += 1
            return False
        begun = time.perf_counter()
        found = self._shards.read(namespace, document)
        if found is None:
            return False
        brought = self._bring(found[0], (namespace, name), document)
        if brought:
            self.weighing.was_read(size, time.perf_counter() - begun)
        return brought

    def _refresh(self) -> None:
        """Reads the texts of documents that came since, whoever wrote them."""
        try:
            listed = list(self.store.documents())
        except KvweaveError as error:
            self._tell(f"documents are not found: {error}", "not found")
            return
        if listed == self._listed:
            return
        known = set(self._listed)
        self._listed = listed
        here = {(space, name) for space, name, _ in listed}
        self._texts = {name: ids for name, ids in self._texts.items() if name in here}
        self._sizes = {name: size for name, size in self._sizes.items() if name in here}
        for space, name, shard in listed:
            if (space, name, shard) in known:
                continue
            try:
                opened = self.store.shard(shard)
                self._texts[space, name] = opened.tokens()
                self._sizes[space, name] = sum(opened.parts.values())
            except KvweaveError as error:
                self._computed_anew(error)

    def _computed_anew(self, error: KvweaveError) -> None:
        """Counts a shard that cannot be read, and says so."""
        self._brought["refused"] += 1
        self._tell(f"a document is computed anew: {error}", type(error).__name__)

    @torch.inference_mode()
    def _bring(self, read: Document, document: Name, tokens: Ids) -> bool:
        """Writes a document's KV into the pages and freezes it; not where a rank has no room."""
        request = None
        try:
            self._segments.require_room_alone(len(tokens))
            request = self._shards.admit(read, document[0])
        except PoolFull:
            pass
        except KvweaveError as error:
            self._computed_anew(error)
        if not all_of(request is not None):
            if request is not None:
                request.release()
            return False
        assert request is not None
        try:
            with request:
                self.freeze(request, document[1])
        except PoolFull:
            return False
        self._brought.update(documents=1, tokens=len(tokens))
        self._is_frozen(document, tokens)
        return True

    def _named(self, document: Name, tokens: Ids, shard: str) -> str | None:
        """Has a name mean a text's shard, and its old one go; or why not."""
        why, (namespace, name) = None, document
        try:
            old = self._named_shards(namespace).get(name)
            self.store.name(namespace, name, shard)
            if old != shard:
                self._drop(namespace, old)
        except KvweaveError as error:
            why = str(error)
        why = self._refused(name, why)
        if why is None:
            self._texts[document] = tokens
            self._is_frozen(document, tokens)
        return why

    def _is_frozen(self, document: Name, tokens: Ids) -> None:
        """Enters a document as the one that was used last."""
        self._frozen.pop(document, None)
        self._frozen[document] = tokens

    def _drop(self, namespace: str, shard: str | None) -> None:
        """Removes a shard that no document names any more.

        Another engine on the folder may have named it meanwhile, or removed it.
        """
        if shard is not None and shard not in self._named_shards(namespace).values():
            with suppress(InvalidArgument, UnknownShard):
                self.store.delete(shard)

    def _named_shards(self, namespace: str) -> dict[str, str]:
        """The shard of each document of a namespace, by name."""
        return {name: shard for _, name, shard in self.store.documents(namespace)}

    def _is_whole(self, document: Name, tokens: Ids) -> bool:
        """Whether a document is frozen with the text that the folder has, maybe a new one."""
        if not np.array_equal(self._frozen.get(document, ()), tokens):
            return False
        namespace, name = document
        try:
            entry = self._segments.cache.frozen_segment(name, namespace)
        except UnknownSegment:
            return False
        return entry.resident_blocks == entry.blocks

    def _used(self, namespace: str, tokens: Ids) -> None:
        texts = {name: ids for (space, name), ids in self._frozen.items() if space == namespace}
        name = _most_alike(texts, tokens)
        if name is not None:
            self._frozen.move_to_end((namespace, name))

    def _unfreeze_one(self) -> bool:
        """Lets the kept document that was used least recently go; it can be read again."""
        if not self._frozen:
            return False
        (namespace, name), _ = self._frozen.popitem(last=False)
        with suppress(UnknownSegment):
            self._segments.cache.delete(name, namespace)
        return True

    def _refused(self, name: str, why: str | None) -> str | None:
        """Why a rank could not write a document, on every rank."""
        if all_of(why is None):
            return None
        why = why or "another rank could not write it"
        self._tell(f"document {name!r} is not kept: {why}", "not kept")
        return why

    def _tell(self, text: str, kind: str) -> None:
        """Says something, once of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("kvweave store: %s", text)


def _check_others(folder: Path, ranks: int, owner: str | None) -> None:
    """Refuses a folder in which another number of ranks keeps another model's documents."""
    for other in sorted(folder.glob("rank-*-of-*")):
        if other.name.endswith(f"-of-{ranks}") or not (other / "store.json").is_file():
            continue
        try:
            opened_for(owner, "store_shared", other, create=False)
        except ForeignStore:
            raise
        except KvweaveError as error:
            # Nobody here reads it.
            _log.warning("kvweave store: %s", error)


def _ids(tokens: Tokens | npt.NDArray[np.int32]) -> Ids:
    return np.asarray(tokens, np.uint32)


def _most_alike(texts: Mapping[str, Ids], tokens: Ids) -> str | None:
    """The document whose beginning a text has most of; None where all begin otherwise.

    A chat's template trims what it marks, so a marked text may lack a document's last tokens.
    """
    head, most = tokens[:HEAD], (0, "")
    for name, ids in texts.items():
        if np.array_equal(ids[: len(head)], head):
            shared = min(len(ids), len(tokens))
            apart = np.flatnonzero(ids[:shared] != tokens[:shared])
            most = max(most, (int(apart[0]) if len(apart) else shared, name))
    return most[1] if most[0] else None

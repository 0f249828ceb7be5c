"""What vLLM's workers answer when the knowledge base is asked: methods for `collective_rpc`.

`--worker-extension-cls kvweave.adapters.vllm.segments.extension.KnowledgeBaseWorker`. Errors
travel as data, for vLLM carries only their text from one process to another; `knowledge_base`
makes exceptions of them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvweave.adapters.vllm.segments.document_encoding import checked_tokens
from kvweave.adapters.vllm.segments.knowledge_base import Reply
from kvweave.adapters.vllm.segments.markers import LONGEST, is_text
from kvweave.adapters.vllm.segments.worker import SegmentWorker, SegmentWorkerConnector
from kvweave.cache import FrozenSegment
from kvweave.errors import DeviceUnavailable, InvalidArgument, KvweaveError, Unsupported


class KnowledgeBaseWorker:
    """Mixed into vLLM's worker: every rank does the same with its own heads."""

    vllm_config: Any
    get_model: Callable[[], Any]

    def kvweave_insert(self, name: str, tokens: list[int], namespace: str = "") -> Reply:
        """Encodes a document alone and freezes it under a name; what has the name is replaced."""

        def insert() -> dict[str, Any]:
            config = self.vllm_config.model_config
            _check_names(name, namespace)
            ids = checked_tokens(tokens, config.get_vocab_size(), config.max_model_len)
            worker = _worker()
            worker.store.require_room(name, ids, namespace, worker.yielding())
            worker.expect_document(ids, namespace)
            why = worker.insert(self.get_model(), name, ids, namespace, self.vllm_config)
            entry = _shown(worker.store.cache.frozen_segment(name, namespace))
            if worker.kept is not None:
                entry["kept"] = why is None
            return entry if why is None else {**entry, "not_kept": why}

        return _reply(insert)

    def kvweave_delete(self, name: str, namespace: str = "") -> Reply:
        """Takes an entry out; its blocks stay cached until their room is needed."""

        def delete() -> None:
            _check_names(name, namespace)
            _worker().delete(name, namespace)

        return _reply(delete)

    def kvweave_list(self, namespace: str | None = None) -> Reply:
        """The entries of a namespace, or of all."""

        def found() -> list[dict[str, Any]]:
            _check_names("", "" if namespace is None else namespace)
            return _entries(_worker(), namespace)

        return _reply(found)

    def kvweave_report(self) -> Reply:
        """How the store's bytes changed since the last report: no step tells of documents."""
        return _reply(lambda: _worker().taken_bytes().to_dict())

    def kvweave_store(self) -> Reply:
        """Blocks of the store by what holds them, its evictions and look-ups so far.

        With a folder that keeps documents, what that holds and what came from there too.
        """

        def counts() -> dict[str, Any]:
            worker = _worker()
            return {**worker.store.counts(), **(worker.kept.counts() if worker.kept else {})}

        return _reply(counts)


def _reply(action: Callable[[], Any]) -> Reply:
    try:
        return {"value": action()}
    except KvweaveError as error:
        sides = {"expected": error.expected, "got": error.got}
        return {"error": type(error).__name__, "text": str(error), **sides}


def _worker() -> SegmentWorker:
    connector: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
    if isinstance(connector, SegmentWorkerConnector) and connector.worker is not None:
        if connector.asleep:
            expected, got = "an engine that is awake", "one that sleeps"
            text = f"knowledge base: expected {expected}, got {got}"
            raise DeviceUnavailable(text, expected=expected, got=got)
        connector.worker.look_after_sleep()
        return connector.worker
    text = "knowledge base: expected an engine that reuses segments, got one that does not"
    raise Unsupported(text, expected="kvweave.segment_bytes", got="none")


def _check_names(name: Any, namespace: Any) -> None:
    for what, given in (("name", name), ("namespace", namespace)):
        if not is_text(given):
            expected = f"a string of up to {LONGEST} characters"
            got = "another" if isinstance(given, str) else type(given).__name__
            text = f"{what}: expected {expected}, got {got}"
            raise InvalidArgument(text, expected=expected, got=got)


def _entries(worker: SegmentWorker, namespace: str | None) -> list[dict[str, Any]]:
    """Documents that are frozen, and behind them those that only the folder has."""
    frozen = worker.store.frozen(namespace)
    if worker.kept is None:
        return [_shown(entry) for entry in frozen]
    kept = {(space, name): tokens for space, name, tokens in worker.kept.names(namespace)}
    shown = [_shown(e) | {"kept": (e.namespace, e.name) in kept} for e in frozen]
    here = {(entry.namespace, entry.name) for entry in frozen}
    waiting = dict.fromkeys(("blocks", "resident_blocks", "references"), 0)
    return shown + [
        {"name": name, "namespace": space, "tokens": tokens, **waiting, "kept": True}
        for (space, name), tokens in kept.items()
        if (space, name) not in here
    ]


def _shown(entry: FrozenSegment) -> dict[str, Any]:
    fields = ("name", "namespace", "tokens", "blocks", "resident_blocks", "references")
    return {field: getattr(entry, field) for field in fields}

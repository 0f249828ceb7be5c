"""The knowledge base of an engine, seen from its front: insert, delete, list.

    base = KnowledgeBase(llm.collective_rpc)
    base.insert("handbook", tokens, namespace="acme")

`answer` reads an asynchronous engine's replies:

    answer(await engine.collective_rpc("kvweave_list", args=("acme",)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kvweave import errors

Reply: TypeAlias = dict[str, Any]
"""What a worker answers: `value`, or `error` (a class of `kvweave.errors`) and what it says."""


def answer(replies: Sequence[Reply]) -> Any:
    """The first worker's value.

    Errors: the first typed error that any worker replied with.
    """
    for reply in replies:
        if "error" in reply:
            kind = getattr(errors, str(reply["error"]), errors.KvweaveError)
            raise kind(reply["text"], expected=reply.get("expected"), got=reply.get("got"))
    return replies[0]["value"]


class KnowledgeBase:
    """Documents that stay in the store of an engine until they are deleted.

    `rpc` is the engine's `collective_rpc`; the engine runs with
    `worker_extension_cls="kvweave.adapters.vllm.segments.extension.KnowledgeBaseWorker"`.
    """

    def __init__(self, rpc: Callable[..., Sequence[Reply]]) -> None:
        self._rpc = rpc

    def insert(self, name: str, tokens: Sequence[int], namespace: str = "") -> dict[str, Any]:
        """Encodes a document alone and freezes it; what has the name is replaced.

        Errors: `PoolFull` beyond the store's frozen share, `InvalidArgument` for tokens that are
        none or too many.
        """
        args = (name, [int(token) for token in tokens], namespace)
        entry: dict[str, Any] = answer(self._rpc("kvweave_insert", args=args))
        return entry

    def delete(self, name: str, namespace: str = "") -> None:
        """Takes an entry out.

        Errors: `UnknownSegment` when there is none of that name in that namespace.
        """
        answer(self._rpc("kvweave_delete", args=(name, namespace)))

    def entries(self, namespace: str | None = None) -> list[dict[str, Any]]:
        """Name, namespace, tokens, blocks and resident blocks of the entries."""
        entries: list[dict[str, Any]] = answer(self._rpc("kvweave_list", args=(namespace,)))
        return entries

    def store(self) -> dict[str, Any]:
        """Blocks of the store by what holds them, its evictions and look-ups so far."""
        counts: dict[str, Any] = answer(self._rpc("kvweave_store"))
        return counts

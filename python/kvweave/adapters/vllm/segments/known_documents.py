"""Which documents a worker's store has, told as they come and go: routers send requests there.

A document is the text of a marked segment, or of a knowledge base. It is named by a hash of its
namespace and its tokens, which a router that knows both computes for itself; neither is told.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.cache import KvCache

Change: TypeAlias = tuple[Literal["stored", "removed"], bytes, int]
"""What happened, the hash of the document, and how many of its tokens the store has or had."""

LOOKS_EVERY_S = 1.0
"""What was evicted is looked for that often: it takes a look-up of each document."""


def document_hash(tokens: Sequence[int] | npt.NDArray[np.integer], namespace: str = "") -> bytes:
    """The name of a document, 32 bytes: SHA-256 of the namespace's length and UTF-8, and of ids.

    The length and each id are four bytes, the least significant first.
    """
    named = namespace.encode()
    digest = hashlib.sha256(len(named).to_bytes(4, "little") + named)
    digest.update(np.asarray(tokens, "<u4").tobytes())
    return digest.digest()


@dataclass
class _Known:
    tokens: npt.NDArray[np.int32]
    namespace: str
    found: int


class KnownDocuments:
    """The documents of a store that somebody was told of, under one RoPE regime of its cache."""

    def __init__(
        self, cache: KvCache, clock: Callable[[], float] = time.monotonic, *, regime: int = 0
    ) -> None:
        self._cache, self._clock, self._regime = cache, clock, regime
        self._known: dict[bytes, _Known] = {}
        self._expected: dict[bytes, _Known] = {}
        self._evictions, self._looked = 0, float("-inf")

    def expect(self, tokens: Sequence[int], namespace: str) -> None:
        """A document that the store may have by now, if nothing went wrong."""
        name = document_hash(tokens, namespace)
        if name not in self._known:
            self._expected[name] = _Known(np.asarray(tokens, np.int32), namespace, 0)

    def taken(self) -> list[Change]:
        """What has changed since this was last asked."""
        changes = self._gone()
        for name, document in self._expected.items():
            document.found = self._found(document)
            if document.found:
                self._known[name] = document
                changes.append(("stored", name, document.found))
        self._expected = {}
        return changes

    def _gone(self) -> list[Change]:
        """Documents of which the store has less than was told."""
        now, evictions = self._clock(), int(self._cache.stats()["evictions"])
        if evictions == self._evictions or now < self._looked + LOOKS_EVERY_S:
            return []
        self._evictions, self._looked = evictions, now
        gone = [name for name, one in self._known.items() if self._found(one) < one.found]
        return [("removed", name, self._known.pop(name).found) for name in gone]

    def _found(self, document: _Known) -> int:
        tokens, namespace = document.tokens, document.namespace
        return self._cache.match_segment(tokens, namespace, regime=self._regime)

"""`FinalDocuments`: whose the texts are that are packed finally, and which of them make room.

One that is frozen under a name stays until that is deleted. One that a prompt had brought from a
tier has no name: it is cached, and goes where another one needs its room and nobody reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvweave.cache import KvRequest
from kvweave.errors import PoolFull
from kvweave.runner.kv.final_texts import FinalText, FinalTexts, FormatPages
from kvweave.runner.kv.tables import Int32

Beginning = tuple[str, int, bytes]
"""Namespace and regime of a text, and its tokens up to the end of its first page."""


class FinalDocuments:
    """The documents of a pool whose texts are packed finally.

    `readers`: who reads blocks at the moment, each with its `request` of the books. All calls are
    for whoever computes, or are made while nobody does.
    """

    def __init__(self, final: FinalTexts, readers: Iterable[Any], page_tokens: int) -> None:
        self._final, self._readers, self._page_tokens = final, readers, page_tokens
        # Of documents by namespace and name what they begin with.
        self._named: dict[tuple[str, str], Beginning] = {}
        # Texts that came from elsewhere and have no name.
        self._cached: set[FinalText] = set()
        # Requests that are no reader's, until they are released.
        self._held: list[KvRequest] = []

    # ---- names ----------------------------------------------------------------------------

    def named(self, request: KvRequest, name: str) -> None:
        """Takes note that a request's text has been frozen under a name."""
        self._named[request.namespace, name] = self._beginning_of(request)
        self._cached = {text for text in self._cached if not self.is_named(text.held)}
        self._leave_unnamed()

    def forget(self, namespace: str, name: str) -> None:
        """Lets a document go that is deleted, unless it has another name."""
        if self._named.pop((namespace, name), None) is not None:
            self._leave_unnamed()

    def forget_cached(self, namespace: str) -> None:
        """Lets all go that is cached of a namespace, and that nobody reads."""
        for text in [text for text in self._cached if text.held.namespace == namespace]:
            self._leave(text)
        self.give_back()

    @property
    def cached_blocks(self) -> int:
        """Blocks of documents that have no name; for any thread."""
        return sum(len(text.blocks) for text in tuple(self._cached))

    def is_named(self, request: KvRequest) -> bool:
        """Whether a request's text begins as one that is frozen."""
        return self._beginning_of(request) in self._named.values()

    def _beginning_of(self, request: KvRequest) -> Beginning:
        """What texts that share blocks have in common: a first page, or all of what is shorter."""
        first = np.ascontiguousarray(request.tokens[: self._page_tokens], np.int32)
        return request.namespace, request.regime, first.tobytes()

    def _leave_unnamed(self) -> None:
        for text in self._final.texts:
            if text not in self._cached and not self.is_named(text.held):
                self._final.leave(text)
        self.give_back()

    # ---- room -----------------------------------------------------------------------------

    def hold(self, request: KvRequest) -> None:
        """Says that the blocks of a request are read until it is released."""
        self._held.append(request)

    def give_back(self) -> None:
        """Lets documents go that were deleted and that nobody reads any more."""
        self._held = [request for request in self._held if not request.released]
        self._final.give_back(self._is_read)

    def make_room(self, blocks: int, nbytes: int) -> bool:
        """Whether there is room for a text; those that are cached alone give way to it.

        The ones that were used least recently go first, and none where that would not do.
        """
        self.give_back()
        final = self._final
        idle = [text for text in final.texts if text in self._cached]
        idle = [text for text in idle if not self._is_read(text.blocks)]
        freed = sum(text.nbytes for text in idle)
        most = final.kept_back + sum(len(text.blocks) for text in idle)
        if blocks >= most or final.nbytes - freed + nbytes > final.most_bytes:
            return False
        for text in idle:
            if final.has_room(blocks, nbytes):
                break
            self._leave(text)
            self.give_back()
        return final.has_room(blocks, nbytes)

    def expect_room(self, blocks: int, nbytes: int) -> None:
        """As `make_room`.

        # Errors
        `PoolFull` without room.
        """
        if not self.make_room(blocks, nbytes):
            left = self._final.most_bytes - self._final.nbytes
            raise PoolFull(
                f"packed documents: expected room for {nbytes} bytes beside the pool, got {left}"
            )

    def known(self, tokens: Int32, namespace: str, regime: int) -> KvRequest | None:
        """A request of a text that is here already, if it is."""
        text = self._final.text_of(tokens, namespace, regime)
        if text is None:
            return None
        request = text.held.fork()
        self.hold(request)
        return request

    def bring(
        self,
        tokens: Int32,
        namespace: str,
        regime: int,
        parts: tuple[FormatPages, ...],
        losses: tuple[float, int],
    ) -> KvRequest:
        """As `FinalTexts.bring`, of a text for which room was made; without a name it is cached.

        # Errors
        As there.
        """
        request, text = self._final.bring(tokens, namespace, regime, parts, losses)
        if not self.is_named(request):
            self._cached.add(text)
        self.hold(request)
        return request

    def bring_alone(
        self, blocks: int, parts: tuple[FormatPages, ...], losses: tuple[float, int]
    ) -> KvRequest:
        """The same of so many blocks that nobody finds: they go with the request.

        # Errors
        As there.
        """
        tokens = np.zeros(blocks * self._page_tokens, np.int32)
        request, text = self._final.bring(tokens, "", 0, parts, losses, found=False)
        self.hold(request)
        self._final.leave(text)
        return request

    def _leave(self, text: FinalText) -> None:
        self._cached.discard(text)
        self._final.leave(text)

    def _is_read(self, blocks: Int32) -> bool:
        live = [reader.request for reader in list(self._readers)] + self._held
        return any(
            np.isin(blocks, request.entries()[:, 0]).any()
            for request in live
            if not request.released
        )

"""`FinalDocuments`: whose the texts are that are packed finally, and which of them make room.

One that is frozen under a name stays until that is deleted. One that a prompt had brought from a
tier has no name: it is cached, and goes where another one needs its room and nobody reads it. So is
a segment of a request's text once prompts may find that; until then it goes with whoever reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvweave.cache import KvRequest
from kvweave.runner.kv.final_text import FinalText, FormatData
from kvweave.runner.kv.final_texts import FinalTexts
from kvweave.runner.kv.tables import Int32
from kvweave.runner.kv.text_memory import Size

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
        # Texts that have no name and may be found.
        self._cached: set[FinalText] = set()
        # Segments of requests whose text nobody else finds yet.
        self._lent: set[FinalText] = set()
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
            kept = text in self._cached or text in self._lent
            if not kept and not self.is_named(text.held):
                self._final.leave(text)
        self.give_back()

    # ---- segments of requests -------------------------------------------------------------

    def why_gone(self, held: KvRequest, blocks: Int32, named: bool) -> str:
        """Why a text need not be packed finally any more, or ''."""
        if named:
            return "" if self.is_named(held) else "deleted before it was packed finally"
        wanted = self._final.is_found(held) or self._is_live(blocks)
        return "" if wanted else "nobody reads it any more"

    def lend(self, text: FinalText) -> None:
        """Takes a segment of a request's text, which goes with its readers unless it is found."""
        self._lent.add(text)
        if self._final.is_found(text.held):
            self._cache(text)

    def remembered(self, request: KvRequest, tokens: int) -> None:
        """Says that prompts find the first so many tokens of a request's text from now on."""
        if not self._lent:
            return
        blocks = request.entries()[: tokens // self._page_tokens, 0]
        for text in [text for text in self._lent if np.isin(text.blocks, blocks).all()]:
            self._cache(text)

    def _cache(self, text: FinalText) -> None:
        """Keeps a segment whose text is found for whoever finds it."""
        # It is by what it has committed itself that it can be taken back.
        text.held.commit(text.held.length, text.held.length)
        self._lent.discard(text)
        self._cached.add(text)

    # ---- room -----------------------------------------------------------------------------

    def hold(self, request: KvRequest) -> None:
        """Says that the blocks of a request are read until it is released."""
        self._held.append(request)

    def give_back(self) -> None:
        """Lets documents go that were deleted and that nobody reads any more."""
        self._held = [request for request in self._held if not request.released]
        for text in [text for text in self._lent if not self._is_live(text.blocks)]:
            self._lent.discard(text)
            self._final.leave(text)
        self._final.give_back(self._is_read)

    def make_room(self, blocks: int, sizes: Sequence[Size]) -> bool:
        """Whether there is room for a text; those that are cached alone give way to it.

        The ones that were used least recently go first, and none where that would not do.
        """
        self.give_back()
        final = self._final
        idle = [text for text in final.texts if text in self._cached]
        idle = [text for text in idle if not self._is_live(text.blocks)]
        if not final.has_room(blocks, sizes, idle):
            return False
        while idle and not final.has_room(blocks, sizes):
            # Of the texts of one request the later ones go before those that they go on behind.
            text = next((text for text in idle if not self._is_read(text)), idle[0])
            idle.remove(text)
            self._leave(text)
            self.give_back()
        return final.has_room(blocks, sizes)

    def expect_room(self, blocks: int, sizes: Sequence[Size]) -> None:
        """As `make_room`.

        # Errors
        `PoolFull` without room.
        """
        if not self.make_room(blocks, sizes):
            raise self._final.memory.shortage(sizes)

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
        made: Sequence[FormatData],
        losses: tuple[float, int],
    ) -> KvRequest:
        """As `FinalTexts.bring`, of a text for which room was made; without a name it is cached.

        # Errors
        As there.
        """
        request, text = self._final.bring(tokens, namespace, regime, made, losses)
        if not self.is_named(request):
            self._cached.add(text)
        self.hold(request)
        return request

    def bring_alone(
        self, blocks: int, made: Sequence[FormatData], losses: tuple[float, int]
    ) -> KvRequest:
        """The same of so many blocks that nobody finds: they go with the request.

        # Errors
        As there.
        """
        tokens = np.zeros(blocks * self._page_tokens, np.int32)
        request, text = self._final.bring(tokens, "", 0, made, losses, found=False)
        self.hold(request)
        self._final.leave(text)
        return request

    def _leave(self, text: FinalText) -> None:
        self._cached.discard(text)
        self._final.leave(text)

    def _is_live(self, blocks: Int32) -> bool:
        """Whether any request reads one of some blocks."""
        live = [reader.request for reader in list(self._readers)] + self._held
        return _any_holds(live, blocks)

    def _is_read(self, text: FinalText) -> bool:
        """The same of a text's blocks, and whether another text goes on behind it."""
        others = [other.held for other in self._final.texts if other is not text]
        return self._is_live(text.blocks) or _any_holds(others, text.blocks)


def _any_holds(requests: Iterable[KvRequest], blocks: Int32) -> bool:
    """Whether any of some requests that are not released has one of some blocks."""
    return any(
        np.isin(blocks, request.entries()[:, 0]).any()
        for request in requests
        if not request.released
    )

"""`ExactFirsts`: the first tokens of packed documents, exactly as they were computed.

A document is computed with nothing before it, so its first token is what its rows attend to where
they look for nothing (Xiao et al., 2024, attention sinks): its key and value lie far from all
others, and everybody who reads the document weighs them heavily. Made for the others, a basis and
its codes lose most of them. So they are kept beside the packed pages, and whoever has the document
reads them there. They depend on no token behind them: documents that begin alike have them
together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np
import torch

from kvweave import ops
from kvweave.cache import KvRequest, KvShape
from kvweave.device_memory import needs_memory
from kvweave.payload.pages import Places as Slots
from kvweave.payload.pages import gather
from kvweave.runner.kv.tables import Int32
from kvweave.runner.kv.token_places import Places, no_places, places_of

FIRST_SHARE, LEAST_FIRSTS = 4, 64
"""There is room for one beginning for so many packed blocks, those of 256 tokens; and for so many
beginnings at least, or one for each block."""

Begun = tuple[int, int, str]
"""Where a document is in a prompt that has it from its first token on, and its namespace."""

_Key = tuple[str, int, bytes]
"""Namespace, regime and first tokens of a document."""


def first_rooms(blocks: int) -> int:
    """How many beginnings of documents there is room for beside so many packed blocks."""
    return max(min(blocks, LEAST_FIRSTS), blocks // FIRST_SHARE)


class ExactFirsts:
    """The first tokens of documents, as many as begin unlike each other.

    `data` [1 + rooms, pages of a block, 2, tokens, D] of the exact pages' dtype: of each beginning
    its keys, at positions 0 and on, and values; the first is nobody's. Without room the one that
    was used least recently goes, one that no document brought before all others; texts that begin
    so are read packed from then on. All calls are for whoever computes, or are made while nobody
    does.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        # Which room each has, those that were used last at the end.
        self._rooms: dict[_Key, int] = {}
        # Those that only prompts have, for which no document's gives way.
        self._passing: set[_Key] = set()

    @classmethod
    @needs_memory("first tokens of documents")
    def made(
        cls, rooms: int, shape: KvShape, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> ExactFirsts | None:
        """So many rooms, nobody's among them, for so many first tokens of documents of a geometry.

        None for no rooms.

        # Errors
        `OutOfMemory` where the device has no memory for them.
        """
        if not rooms:
            return None
        sizes = rooms, shape.layers * shape.kv_heads, 2, tokens, shape.head_dim
        return cls(torch.zeros(sizes, dtype=dtype, device=device))

    @property
    def tokens(self) -> int:
        """How many tokens of a document are exact, at most."""
        return self.data.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all rooms."""
        return self.data.nbytes

    @property
    def room_bytes(self) -> int:
        """Bytes of one room."""
        return self.data[0].nbytes

    @property
    def most(self) -> int:
        """How many rooms there are."""
        return len(self.data) - 1

    @property
    def held(self) -> int:
        """How many rooms are taken."""
        return len(self._rooms)

    @property
    def pages(self) -> torch.Tensor:
        """All rooms as blocks of exact pages of `tokens` tokens each."""
        return self.data.flatten(0, 1)

    def block_of(self, text: Int32, namespace: str, regime: int) -> int | None:
        """The block of `pages` in which a document has its first tokens; None where in none."""
        room = self._used(self._key(text, namespace, regime))
        return None if room is None else room * self.data.shape[1]

    def places(
        self, prompt: Int32, begun: Iterable[Begun], regime: int, *, rotates: bool
    ) -> Places:
        """Where a prompt's tokens lie in `pages` [T, 3]; the block of all others is −1.

        `begun`: the documents that it has. `rotates` False reads keys as if they had not moved.
        """
        exact = no_places(len(prompt))
        for start, end, namespace in begun:
            block = self.block_of(prompt[start:end], namespace, regime)
            if block is not None:
                rows = exact[start : min(start + self.tokens, end)]
                rows[:, 0], rows[:, 1] = block, np.arange(len(rows))
                rows[:, 2] = start if rotates else 0
        return exact

    def of_text(self, text: Int32, namespace: str, regime: int) -> torch.Tensor | None:
        """The first tokens of a document [pages, 2, tokens, D], those that it lacks being 0."""
        room = self._used(self._key(text, namespace, regime))
        return None if room is None else self.data[room].clone()

    def keep(self, text: KvRequest, exact: KvRequest, pages: torch.Tensor) -> int:
        """Keeps those of a document as exact pages have them; returns how many they are.

        `text`: a request that has it alone, `exact` one that reads the pages [·, 2, P, D], the
        document's first tokens among them.
        """
        key = self._key(text.tokens, text.namespace, text.regime)
        count = min(self.tokens, text.length)
        self._passing.discard(key)
        if self._used(key) is None:
            block, slot, delta = places_of(exact.entries(), count).T
            assert (block >= 0).all(), "the sink of a text is exact while it is computed"
            at = Slots(np.arange(count, dtype=np.int32), block, slot, delta)
            self._write(key, gather(pages, at, self.data.shape[1]))
        return count

    def put(self, text: Int32, namespace: str, regime: int, firsts: torch.Tensor | None) -> None:
        """Takes those of a document that comes from elsewhere, as `of_text` gave them there.

        Those that are here already stay. None: it brings none.
        """
        key = self._key(text, namespace, regime)
        self._passing.discard(key)
        if firsts is not None and self._used(key) is None:
            self._write(key, firsts)

    def put_passing(self, text: Int32, namespace: str, regime: int, firsts: torch.Tensor) -> None:
        """Takes those of a prompt's text, where documents leave room for them."""
        key = self._key(text, namespace, regime)
        full = self.held == self.most and not self._passing
        if self._used(key) is None and not full:
            self._write(key, firsts)
            self._passing.add(key)

    def forget(self, namespace: str) -> None:
        """Lets all go of a namespace."""
        self._keep_where(lambda of: of != namespace)

    def forget_all_but(self, namespaces: Collection[str]) -> None:
        """Lets all go of other namespaces than some."""
        self._keep_where(lambda of: of in namespaces)

    def _keep_where(self, stays: Callable[[str], bool]) -> None:
        self._rooms = {key: room for key, room in self._rooms.items() if stays(key[0])}
        self._passing &= self._rooms.keys()

    def _key(self, text: Int32, namespace: str, regime: int) -> _Key:
        return namespace, regime, np.asarray(text[: self.tokens], np.int32).tobytes()

    def _used(self, key: _Key) -> int | None:
        """The room of a beginning, which is used now; None where it has none."""
        room = self._rooms.pop(key, None)
        if room is not None:
            self._rooms[key] = room
        return room

    def _write(self, key: _Key, firsts: torch.Tensor) -> None:
        free = np.setdiff1d(np.arange(1, len(self.data)), list(self._rooms.values()))
        if len(free):
            room = int(free[0])
        else:
            oldest = next((of for of in self._rooms if of in self._passing), None)
            gone = next(iter(self._rooms)) if oldest is None else oldest
            self._passing.discard(gone)
            room = self._rooms.pop(gone)
        self.data[room].zero_()
        self.data[room, :, :, : firsts.shape[2]] = firsts.to(self.data.device)
        self._rooms[key] = room


def firsts_counts(firsts: ExactFirsts | None) -> dict[str, int]:
    """`firsts`, how many are kept, of `firsts_most`, in `first_bytes` each."""
    if firsts is None:
        return {"firsts": 0, "firsts_most": 0, "first_bytes": 0}
    most, size = firsts.most, firsts.room_bytes
    return {"firsts": firsts.held, "firsts_most": most, "first_bytes": size}


def add_without_first(
    moments: ops.Moments, cache: torch.Tensor, packs: Int32, pages: int, left_out: int
) -> None:
    """Has moments take exact pages on the host in, but for the first tokens of the first pack.

    cache [·, 2, P, D] and packs as `Moments.add` takes them, of blocks of so many `pages`.
    """
    if left_out:
        size, blocks = cache.shape[2], packs[0, 2:]
        first = torch.cat([cache[block : block + pages] for block in blocks[blocks > 0].tolist()])
        # Vectors that are not finite count for nothing.
        for page, begin in enumerate(range(0, left_out, size)):
            first[page * pages : (page + 1) * pages, :, : left_out - begin] = torch.nan
        first = torch.cat((torch.zeros_like(cache[:1]), first))
        named = packs[:1].copy()
        named[0, 2:] = np.where(blocks > 0, 1 + pages * np.arange(len(blocks)), 0)
        moments.add(first, named)
        packs = packs[1:]
    if len(packs):
        moments.add(cache, packs)

"""`FinalTexts`: texts that are packed by a strategy of their own, beside a pool of one format.

Pages of a pool have one format, so that any block has room for any text. A text that is packed
finally by its loss has one for each layer and KV head (MosaicKV, sections 4.3 and 5.5), and so it
lies in a memory beside it. Its blocks stay its own in the books, so it is found and read as before,
but name no memory: what they had goes to blocks that the pool kept back until then. When nobody
reads it any more its blocks are kept back in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.cache import KvCache, KvRequest, KvShape
from kvweave.runner.kv.final_text import FinalText, FormatData, FormatPages, Int64
from kvweave.runner.kv.tables import Int32
from kvweave.runner.kv.text_memory import Size, TextMemory

NOWHERE = -1


FinalEntries = tuple[FinalText, Int32]
"""A text, and entries [N, 5] whose blocks are numbers in it."""


class FinalTexts:
    """The texts of a pool that are packed finally, and where all blocks of the pool lie.

    `backed`: of the blocks that `cache` counts, besides its null block, so many have memory; the
    others are kept back for as long as no text is final. `memory`: where texts lie. All calls are
    for whoever computes, or are made while nobody does. `version` changes with what is where.
    """

    def __init__(self, cache: KvCache, pages: int, backed: int, memory: TextMemory) -> None:
        self._cache, self._pages = cache, pages
        self.memory = memory
        total = int(cache.stats()["total"])
        self.extra, self._size = total - backed, cache.shape.page_tokens
        # One block more: of a request the first tokens, its prompt, cannot be taken back.
        self._kept_back = cache.admit(np.zeros(self._size, np.int32), reuse="none")
        self._keep_back(self.extra - 1)
        free = np.ones(1 + total, bool)
        free[[0, *self._kept()]] = False
        # Where a block lies, by its number, and of which text it is, at which place.
        self._place = np.full(1 + total, NOWHERE, np.int32)
        self._place[0] = 0
        self._place[free] = pages * np.arange(1, 1 + backed, dtype=np.int32)
        self._text, self._number = np.full((2, 1 + total), NOWHERE, np.int32)
        self._texts: dict[int, FinalText] = {}
        self._left: set[FinalText] = set()
        self._counted = 0
        self.version = 0

    def _keep_back(self, blocks: int) -> None:
        if blocks:
            self._kept_back.append(np.zeros(self._size * blocks, np.int32))

    def _kept(self) -> Int64:
        """The numbers of the blocks that are kept back, in the order in which they came."""
        blocks: Int64 = self._kept_back.entries()[:, 0].astype(np.int64) // self._pages
        return blocks

    @property
    def nbytes(self) -> int:
        """Bytes of all texts that there are."""
        return sum(text.nbytes for text in self._texts.values())

    @property
    def texts(self) -> tuple[FinalText, ...]:
        """All that there are, those that were used last at the end."""
        return tuple(self._texts.values())

    @property
    def kept_back(self) -> int:
        """Blocks that are counted as held and are nobody's."""
        return len(self._kept())

    @property
    def blocks(self) -> int:
        """Blocks of texts that are packed finally."""
        return sum(len(text.blocks) for text in self._texts.values())

    # ---- where blocks lie -----------------------------------------------------------------

    def rows(self, blocks: Int32) -> Int32:
        """The first pages in the pool's memory of blocks [N] of no text that is final."""
        found: Int32 = self._place[blocks // self._pages]
        assert (found != NOWHERE).all(), "blocks have memory until their text is final"
        return found

    def are_final(self, blocks: Int32) -> npt.NDArray[np.bool_]:
        """Which of blocks [N] are of a text that is packed finally."""
        final: npt.NDArray[np.bool_] = self._text[blocks // self._pages] != NOWHERE
        return final

    def _used(self, which: int) -> FinalText:
        """A text by its number, which is used now."""
        text = self._texts[which] = self._texts.pop(which)
        return text

    def split(self, entries: Int32) -> tuple[Int32, list[FinalEntries]]:
        """Entries [N, 5] of the pool's memory, and those of texts that are packed finally."""
        at = entries[:, 0] // self._pages
        texts = self._text[at]
        own = entries[texts == NOWHERE].copy()
        own[:, 0] = self._place[at[texts == NOWHERE]]
        final = []
        for which in np.unique(texts[texts != NOWHERE]).tolist():
            some = entries[texts == which].copy()
            some[:, 0] = self._number[at[texts == which]]
            final.append((self._used(which), some))
        return own, final

    def unpack(
        self, packs: Int32, into: torch.Tensor, ranks: tuple[int, int] | None = None
    ) -> None:
        """Writes what blocks of final texts stand for into exact pages, `packs` as for the pool.

        `ranks`: of the pages of a block those from one to below another, else all.
        """
        at = packs[:, 0] // self._pages
        texts = self._text[at]
        for which in np.unique(texts).tolist():
            some = texts == which
            numbers, tokens, exact = self._number[at[some]], packs[some, 1], packs[some, 2:]
            for part in self._used(which).parts:
                part.unpack(numbers, tokens, into, exact, ranks)

    def more_bytes(self, blocks: Int32, block_bytes: int) -> int:
        """How many bytes more than in the pool blocks [N] take; fewer are below 0."""
        texts, counts = np.unique(self._text[blocks // self._pages], return_counts=True)
        more = 0
        for which, count in zip(texts.tolist(), counts.tolist(), strict=True):
            if which != NOWHERE:
                text = self._texts[which]
                more += count * text.nbytes // len(text.blocks) - count * block_bytes
        return more

    # ---- texts that come and go -----------------------------------------------------------

    def has_room(
        self, blocks: int, sizes: Sequence[Size], without: Collection[FinalText] = ()
    ) -> bool:
        """Whether a text of so many blocks and sizes may be packed finally, some others gone."""
        kept_back = self.kept_back + sum(len(text.blocks) for text in without)
        gone = {place for text in without for place in text.places}
        return blocks < kept_back and self.memory.fits(sizes, gone)

    def _placed(self, made: Sequence[FormatData]) -> tuple[FormatPages, ...]:
        """The pages of a text where they lie from now on: all of them or none.

        # Errors
        `PoolFull` without room.
        """
        sizes, moves = [each.sizes for each in made], self.memory.moves
        places = iter(self.memory.take([size for some in sizes for size in some]))
        parts = tuple(
            FormatPages(self.memory, each.format, each.ranks, tuple(islice(places, len(some))))
            for each, some in zip(made, sizes, strict=True)
        )
        try:
            if self.memory.moves != moves:
                self.version += 1
                for text in self.texts:
                    for part in text.parts:
                        part.note_basis()
            for part, each in zip(parts, made, strict=True):
                part.fill(each)
                part.note_basis()
        except BaseException:
            self._give_places(parts)
            raise
        return parts

    def _give_places(self, parts: Iterable[FormatPages]) -> None:
        self.memory.give(place for part in parts for place in part.places)

    def take(
        self,
        held: KvRequest,
        blocks: Int32,
        made: Sequence[FormatData],
        losses: tuple[float, int],
    ) -> FinalText:
        """Puts a text in the place of its pages, whose memory goes to other blocks.

        `held` has its `blocks`, and none behind them; `losses`: `most_lost` and `over_bound`.
        Whoever reads these blocks reads the text from now on; `version` says that it is so.

        # Errors
        `PoolFull` without room; nothing has changed then.
        """
        parts = self._placed(made)
        text = FinalText(held, parts, *losses, blocks)
        count = len(blocks)
        at = blocks.astype(np.int64) // self._pages
        freed = self._kept()[-count:]
        self._kept_back.truncate(self._kept_back.length - count * self._size)
        self._place[freed], self._place[at] = self._place[at], NOWHERE
        self._enter(text, at)
        return text

    def bring(
        self,
        tokens: Int32,
        namespace: str,
        regime: int,
        made: Sequence[FormatData],
        losses: tuple[float, int],
        *,
        found: bool = True,
    ) -> tuple[KvRequest, FinalText]:
        """A text that comes as it was packed finally, and a request that has it alone.

        Its blocks come from those that are kept back, so no page of the pool goes for it. `losses`:
        `most_lost` and `over_bound`. Others find it, unless `found` is False.

        # Errors
        As `take` and `KvCache.admit`; nothing has changed then.
        """
        parts = self._placed(made)
        count = -(-len(tokens) // self._size)
        freed = self._kept()[-count:]
        self._kept_back.truncate(self._kept_back.length - count * self._size)
        request = None
        try:
            request = self._cache.admit(tokens, namespace=namespace, reuse="none", regime=regime)
            if found:
                request.commit(len(tokens), len(tokens))
            held = request.fork()
            text = FinalText(held, parts, *losses, blocks=held.entries()[:, 0])
        except BaseException:
            if request is not None:
                # It may be found already, and has nothing in it.
                request.retract()
                request.release()
            self._keep_again(freed)
            self._give_places(parts)
            raise
        at = text.blocks.astype(np.int64) // self._pages
        self._give_memory(at, freed)
        self._enter(text, at)
        return request, text

    def _enter(self, text: FinalText, at: Int64) -> None:
        """Has whoever reads blocks, which have no memory, read a text."""
        self._text[at], self._number[at] = self._counted, np.arange(len(at))
        self._texts[self._counted] = text
        self._counted += 1
        self.version += 1

    def text_of(self, tokens: Int32, namespace: str, regime: int) -> FinalText | None:
        """The text of these tokens that can be found, if there is one."""
        for text in self._texts.values():
            held = text.held
            known = (held.namespace, held.regime, held.length) == (namespace, regime, len(tokens))
            if known and text not in self._left and np.array_equal(held.tokens, tokens):
                return text
        return None

    def leave(self, text: FinalText) -> None:
        """Has a text be found by nobody any more; it goes when nobody reads it."""
        if text not in self._left:
            text.held.retract()
            self._left.add(text)

    def is_found(self, held: KvRequest) -> bool:
        """Whether prompts find all of the text that a request has."""
        known, regime = held.namespace, held.regime
        return self._cache.match_prefix(held.tokens, known, regime=regime) >= held.length

    def give_back(self, is_read: Callable[[FinalText], bool]) -> None:
        """Lets go of texts that left and nobody reads; their blocks are kept back again."""
        # One that goes may have held another that waits for it.
        while gone := [
            (which, text)
            for which, text in self._texts.items()
            if text in self._left and not is_read(text)
        ]:
            for which, text in gone:
                self._let_go(which, text)

    def _let_go(self, which: int, text: FinalText) -> None:
        self._left.discard(text)
        del self._texts[which]
        at = text.blocks.astype(np.int64) // self._pages
        self._text[at] = self._number[at] = NOWHERE
        text.held.release()
        self._give_places(text.parts)
        self._keep_again(at)
        self.version += 1

    def _keep_again(self, freed: Int64) -> None:
        """Keeps as many blocks back as were freed, which have no memory."""
        self._keep_back(len(freed))
        # Those that came may have memory, which is that of others then.
        self._give_memory(self._kept()[-len(freed) :], freed)

    def _give_memory(self, came: Int64, freed: Int64) -> None:
        """Gives what memory blocks have that came to those that were freed and came not."""
        places = self._place[came]
        places = places[places != NOWHERE]
        self._place[came] = NOWHERE
        self._place[freed[~np.isin(freed, came)]] = places


def extra_blocks(most_bytes: int, least: int) -> int:
    """Blocks that are counted beside a pool's for texts of so many bytes, of `least` each."""
    return max(1, most_bytes // least)


def make_books(
    shape: KvShape, blocks: int, memory: TextMemory | None, least: int, **settings: Any
) -> tuple[KvCache, FinalTexts | None]:
    """What counts so many blocks of packed pages, and texts of other formats, if there are any.

    Beside these go as many blocks as their memory holds of those of `least` bytes, the smallest.
    `settings` are `KvCache`'s own.
    """
    if memory is None:
        return KvCache(shape, blocks=blocks, memory=False, **settings), None
    extra = extra_blocks(memory.most_bytes, least)
    cache = KvCache(shape, blocks=blocks + extra, memory=False, **settings)
    backed = int(cache.stats()["total"]) - extra
    return cache, FinalTexts(cache, shape.layers * shape.kv_heads, backed, memory)

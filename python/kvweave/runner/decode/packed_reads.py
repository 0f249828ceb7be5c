"""What decode steps read of packed pages: each row all that lies behind what it reads exactly.

A row at position i reads the sink and the newest tokens exactly, by the window that the exact pool
keeps for it. Packed pages are asked for the rest as if by the row `RECENT_TOKENS` earlier, so that
a step changes no entry: those of a request change when a page of it has been packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.errors import PoolFull
from kvweave.ops import RopeTable, Table, Workspace
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner.decode.chosen_texts import ChosenTexts, Listed
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.entry_room import EntryRoom
from kvweave.runner.decode.final_reads import FinalReads
from kvweave.runner.decode.packed_choice import ChosenPacked, PackedChoice, Ranked, chosen_at_most
from kvweave.runner.decode.text_pages import TextPages
from kvweave.runner.kv.final_texts import FinalEntries
from kvweave.runner.kv.packed_pool import RECENT_TOKENS, SINK_TOKENS, PackedPool
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.kv.states import States, merged_states
from kvweave.runner.kv.tables import Int32


@dataclass(frozen=True)
class PackedStep:
    """What B requests read at positions i32 [B]: packed tokens, and exact ones beside documents.

    `chosen`: what heads choose of the former, where any do. `final`: what they read of texts that
    are packed by strategies of their own.
    """

    pool: PackedPool
    positions: torch.Tensor
    packed: Listed
    aside: Listed | None
    chosen: ChosenPacked | None = None
    final: FinalReads | None = None

    def merged(
        self,
        layer: int,
        q: torch.Tensor,
        rope: RopeTable,
        exact: States,
        workspace: Workspace | None,
    ) -> States:
        """Attention and lse of queries q [B, H, D] over all; `exact` is that over exact pages."""
        of = self.pool.layers[layer]
        called = q, self.positions
        entries, offsets = self.packed
        known: dict[str, Any] = {"entry_offsets": offsets, "workspace": workspace}
        states, heads = [exact], self.pool.heads
        if self.chosen is not None and heads.chooses(layer):
            states += self.chosen.states(layer, called, self.packed, rope, workspace)
            reach = heads.unranked(layer)
            reads = reach is not None
        else:
            reach, reads = heads.others(layer), True
        if reads:
            kv = self.pool.read(layer, of, rope, reach)
            states += [ops.attend_packed(*called, entries, kv, **known)]
        if self.final is not None:
            states += self.final.states(layer, called, rope, workspace)
        if self.aside is not None:
            entries, known["entry_offsets"] = self.aside
            kept, count = self.pool.exact, self.pool.kv_heads
            reach = heads.others(layer)
            own = ops.PagedKv(kept, layer, count, of.scale, rope, None, of.softcap, reach)
            states += [ops.attend_decode(*called, entries, own, **known)]
        return merged_states(*states)


@dataclass(frozen=True)
class PackedRoom:
    """Where the entries of a batch lie: of packed tokens, and of exact ones beside documents.

    There is no room for the latter before a request has any.
    """

    pool: PackedPool
    packed: EntryRoom
    aside: EntryRoom | None = None

    def step(self, positions: Table, listed: tuple[int, int] | None = None) -> PackedStep:
        """What rows at positions i32 [B] read behind what they read exactly.

        `listed`: entries that there are in each room, where that may be said.
        """
        asked = (torch.as_tensor(positions) - RECENT_TOKENS).clamp_(min=0)
        ends = listed or (None, None)

        def of(room: EntryRoom, end: int | None) -> Listed:
            return room.entries[:end], room.of_batch(len(asked))

        aside = None if self.aside is None else of(self.aside, ends[1])
        return PackedStep(self.pool, asked, of(self.packed, ends[0]), aside)


@dataclass(frozen=True, eq=False)
class PackedTables:
    """Where a batch finds what it reads of packed pages: a step that was captured knows these.

    `final` and `chosen` as `PackedStep` has them.
    """

    room: PackedRoom
    final: FinalReads | None
    chosen: ChosenPacked | None

    @property
    def ranked(self) -> Ranked:
        """By which budgets heads choose anew."""
        return () if self.chosen is None else self.chosen.ranked

    def lies_at(self, other: PackedTables) -> bool:
        """Whether all of it lies where another has it."""
        of_texts = self.final is other.final and self.chosen is other.chosen
        return self.room is other.room and of_texts

    def step(self, positions: Table, listed: tuple[int, int] | None = None) -> PackedStep:
        """As `PackedRoom.step`, with all that there is beside the pool's own pages."""
        step = self.room.step(positions, listed)
        return replace(step, final=self.final, chosen=self.chosen)


class PackedReads:
    """The packed pages of a batch that decodes together.

    Their entries stay where they are while there is room, so that a step can be captured.
    """

    def __init__(self, pool: PackedPool) -> None:
        self.pool = pool
        self._batch: Sequence[Decoding] = ()
        # Steps until a page of any of them is full, and whether what the next one needs is packed.
        self._rests, self._ahead = 0, False
        self._room = PackedRoom(pool, EntryRoom.of(1, 1, pool))
        # What the batch reads of final texts, if any, where the last that did had it, where the
        # texts' pages lie, and which version of these that is.
        self._final: FinalReads | None = None
        self._final_room: FinalReads | None = None
        self._pages: TextPages | None = None
        self._version = 0
        # Of which entries that is, and what steps know of all, by how many requests have tables and
        # which budgets rank.
        self._of_texts: Sequence[Sequence[FinalEntries]] = ()
        self._tables: dict[tuple[int, Ranked], PackedTables] = {}
        # Where heads that choose find what they choose among, beside such texts.
        self._texts: ChosenTexts | None = None
        # Entries of each of the batch, packed and aside, and whose packed ones are to be made anew.
        self._packed: list[Int32] = []
        self._aside: list[Int32] = []
        self._stale: set[int] = set()
        # Entries of the batch, packed and aside, and whether they lie in the room.
        self._listed, self._is_listed = (0, 0), False
        # Packed entries of each of the batch, those of final texts among them.
        self._counts = np.zeros(0, np.int64)
        self._choice = PackedChoice(pool) if pool.heads.budgets else None

    def forget(self, sequence: Decoding) -> None:
        """Lets go of a request, and of the batch that it was of: another one is seated next."""
        self.seat(())
        self._of_texts = ()
        if self._choice is not None:
            self._choice.forget(sequence)

    def seat(self, batch: Sequence[Decoding]) -> None:
        """Makes these the batch of the next step, or says that something of theirs has changed."""
        self._batch, self._rests, self._ahead, self._is_listed = batch, 0, False, False
        self._packed = [np.zeros((0, 5), np.int32)] * len(batch)
        self._aside = [_packed(sequence).step_entries(SINK_TOKENS) for sequence in batch]
        self._stale = set(range(len(batch)))

    def pack(self) -> None:
        """Packs what pages the batch has filled, before its next step.

        # Errors
        `PoolFull` without room, whose `request` says for which of them.
        """
        if self._ahead:
            self._ahead = False
        elif self._rests > 0:
            self._rests -= 1
        else:
            self._pack_full()

    @property
    def is_due(self) -> bool:
        """Whether a page of the batch is full behind the step that is launched."""
        return self._rests == 0 and not self._ahead

    def prepare(self) -> None:
        """Packs what is full behind the step that is launched, while its tokens are awaited.

        Where there is no room for that the next step says so.
        """
        with suppress(PoolFull):
            self._pack_full()
            self._ahead = True

    def _pack_full(self) -> None:
        lacks = []
        for row, sequence in enumerate(self._batch):
            packed, length = _packed(sequence), sequence.request.length
            before = packed.tokens
            try:
                packed.pack(sequence.request, length)
            except PoolFull as error:
                error.request = row
                raise
            finally:
                if packed.tokens != before:
                    self._stale.add(row)
                    self._is_listed = False
            lacks.append(packed.full_at - length)
        self._rests = min(lacks) - 1

    def are_read(self, positions: Int32) -> bool:
        """Whether any row at positions i32 [B] reads anything packed."""
        return bool(len(positions)) and int(positions.max()) - RECENT_TOKENS >= SINK_TOKENS

    def step(self, positions: Table, at: Int32) -> PackedStep:
        """What the batch's rows at positions i32 [B] read, which on the host are `at`."""
        return self.tables(at, len(self._batch)).step(positions, self._listed)

    def tables(self, at: Int32, requests: int) -> PackedTables:
        """What the batch's rows at positions i32 [B] read, among tables of so many requests.

        By the same budgets the same object as long as nothing of it lies elsewhere.
        """
        room, chosen = self._current_room(requests), None
        if self._choice is not None:
            chosen = self._choice.step(self._batch, at, self._counts, self._texts, requests)
        made = PackedTables(room, self._final, chosen)
        last = self._tables.get((requests, made.ranked))
        if last is None or not last.lies_at(made):
            self._tables[requests, made.ranked] = last = made
        return last

    def _current_room(self, requests: int) -> PackedRoom:
        """Where the batch's entries lie, brought up to date, with offsets of so many requests."""
        room, final = self._room, self.pool.final
        if final is not None and final.version != self._version:
            self._version, self._is_listed, self._of_texts = final.version, False, ()
        of_texts = final is None or requests == len(self._of_texts)
        if self._is_listed and requests <= room.packed.requests and of_texts:
            return room
        for row in self._stale:
            self._packed[row] = _packed(self._batch[row]).entries()
        self._stale.clear()
        packed, aside = self._packed, self._aside
        self._counts = np.array([len(entries) for entries in packed], np.int64)
        if final is not None:
            split = [final.split(entries) for entries in packed]
            self._read_texts([some for _, some in split], packed, requests)
            packed = [entries for entries, _ in split]
        counts = sum(map(len, packed)), sum(map(len, aside))
        fits = room.packed.fits(counts[0], requests)
        if counts[1] or room.aside is not None:
            fits &= room.aside is not None and room.aside.fits(counts[1], requests)
        if not fits:
            room = self._room = self._more_room(counts, requests)
        room.packed.write(packed)
        if room.aside is not None:
            room.aside.write(aside)
        self._listed, self._is_listed = counts, True
        return room

    def _read_texts(
        self, some: list[Sequence[FinalEntries]], packed: Sequence[Int32], requests: int
    ) -> None:
        """Has the batch read these entries of final texts, of all that it has packed."""
        nobody = requests - len(some)
        some += [()] * nobody
        if not _are_same(some, self._of_texts):
            texts = [text for those in some for text, _ in those]
            self._of_texts = some
            self._pages = TextPages.of(self.pool, texts, self._pages)
            self._final = None
            if texts:
                reads = FinalReads.of(self.pool, some, self._pages, before=self._final_room)
                self._final = self._final_room = reads
        if self._choice is not None:
            assert self._pages is not None
            entries = [*packed, *[np.zeros((0, 5), np.int32)] * nobody]
            known = entries, some, self._pages, self.pool
            self._texts = ChosenTexts.of(*known, before=self._texts)

    def _more_room(self, counts: tuple[int, int], requests: int) -> PackedRoom:
        """Room for so many entries, and so much more that nothing moves before all are done."""
        before = self._room
        ends = [s.request.length + s.remaining for s in self._batch]
        known = [_packed(sequence).tokens for sequence in self._batch]
        pages = sum(
            -(-end // PAGE_TOKENS) - at // PAGE_TOKENS for end, at in zip(ends, known, strict=True)
        )
        requests = max(requests, before.packed.requests)
        most = max(counts[0] + pages, len(before.packed.entries))
        aside = None
        if counts[1] or before.aside is not None:
            least = 0 if before.aside is None else len(before.aside.entries)
            aside = EntryRoom.of(max(counts[1], least), requests, self.pool)
        return PackedRoom(self.pool, EntryRoom.of(most, requests, self.pool), aside)


def _are_same(
    some: Sequence[Sequence[FinalEntries]], others: Sequence[Sequence[FinalEntries]]
) -> bool:
    """Whether requests read the same entries of the same texts."""
    if len(some) != len(others):
        return False
    return all(
        len(own) == len(its)
        and all(a is b and np.array_equal(x, y) for (a, x), (b, y) in zip(own, its, strict=True))
        for own, its in zip(some, others, strict=True)
    )


def _packed(sequence: Decoding) -> PackedPrefix:
    assert sequence.packed is not None
    return sequence.packed


def prepare_final(pool: PackedPool) -> None:
    """Asks a GPU for what steps need once a text of a pool is packed finally.

    # Errors
    `OutOfMemory` without memory for it.
    """
    FinalReads.prepare(pool)
    if pool.heads.budgets:
        ChosenTexts.prepare(pool, chosen_at_most(pool))

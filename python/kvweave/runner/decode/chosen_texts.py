"""What heads that choose read of texts that are packed by strategies of their own.

They choose among all packed entries of a request, by bounds of the exact keys, whatever is packed
how. So what they chose stays right when a text is packed finally. What was chosen is then read part
by part: of the pool's pages, and of each text format by format, each head in the one that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.ops import Reach, RopeTable, Workspace
from kvweave.runner.decode.entry_room import EntryRoom
from kvweave.runner.decode.final_reads import FinalRead
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.final_texts import FinalEntries, FinalText
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.states import States
from kvweave.runner.kv.tables import Int32, send_index

Listed = tuple[torch.Tensor, torch.Tensor]
"""Entries i32 [N, 5] of B requests and offsets of their tables."""

IN_POOL = 0
"""Whose entries are in the pool's format; those of texts are the numbers from 1 on."""


@dataclass(frozen=True, eq=False)
class ChosenTexts:
    """All packed entries of a batch, as heads choose among them, and where each is read.

    Entries of the `room` name blocks of the books. `begins` i64 [B]: where those of a request
    begin. `whose` i64 [N]: the text that an entry is of, and `numbers` i64 [N]: which of that
    text's entries of the request it is. `reads`: of each text and format what the batch reads.
    """

    room: EntryRoom
    begins: torch.Tensor
    whose: torch.Tensor
    numbers: torch.Tensor
    reads: tuple[tuple[int, FinalRead], ...]

    @staticmethod
    def of(
        packed: Sequence[Int32],
        final: Sequence[Sequence[FinalEntries]],
        reads: Sequence[FinalRead],
        pool: PackedPool,
        before: ChosenTexts | None = None,
    ) -> ChosenTexts:
        """Of the entries of requests, those of their texts, and what is read of these.

        Where the same is read as `before`, and there is room, it lies there: that one is returned.
        """
        texts = dict.fromkeys(text for some in final for text, _ in some)
        named = {text: 1 + at for at, text in enumerate(texts)}
        whose, numbers = [], []
        for entries, some in zip(packed, final, strict=True):
            own = _whose(entries, some, named)
            # The n-th of each text's entries, and of those of the pool.
            order = np.argsort(own, kind="stable")
            begins = np.searchsorted(own[order], own[order])
            number = np.empty(len(own), np.int64)
            number[order] = np.arange(len(own)) - begins
            whose.append(own)
            numbers.append(number)
        known = tuple((named[read.text], read) for read in reads)
        count, requests = sum(map(len, packed)), len(packed)
        if before is None or not before._serves(known, count, requests):
            room = EntryRoom.of(count, requests, pool)
            index = torch.zeros((2, len(room.entries)), dtype=torch.int64, device=pool.device)
            before = ChosenTexts(room, index.new_zeros(requests), index[0], index[1], known)
        before._write(packed, np.concatenate(whose), np.concatenate(numbers))
        return before

    def _serves(
        self, reads: tuple[tuple[int, FinalRead], ...], entries: int, requests: int
    ) -> bool:
        """Whether it has room for so many entries of as many requests, of which these are read."""
        alike = len(reads) == len(self.reads) and all(
            number == other and read is its
            for (number, read), (other, its) in zip(reads, self.reads, strict=True)
        )
        return alike and requests == len(self.begins) and self.room.fits(entries, requests)

    def _write(self, packed: Sequence[Int32], whose: Int64, numbers: Int64) -> None:
        """Writes the entries of requests, one behind the other, and whose they are."""
        self.room.write(packed)
        begins = np.cumsum([0, *map(len, packed[:-1])], dtype=np.int64)
        for to, part in ((self.begins, begins), (self.whose, whose), (self.numbers, numbers)):
            to[: len(part)].copy_(send_index(to.device, part))

    @property
    def listed(self) -> Listed:
        """The entries, and offsets of the requests' tables."""
        return self.room.entries, self.room.of_batch(len(self.begins))

    def states(
        self,
        layer: int,
        pool: PackedPool,
        chosen: tuple[torch.Tensor, torch.Tensor],
        called: tuple[torch.Tensor, torch.Tensor],
        own: Listed,
        reaches: tuple[Reach, Reach],
        rope: RopeTable,
        workspace: Workspace | None,
    ) -> Iterator[States]:
        """Attention and lse of `called`, queries and positions, over what was chosen, part by part.

        `chosen`: numbers of entries [B, G, W] and how many count [B, G]. `own`: the entries in the
        pool. `reaches`: how what is chosen is listed, and how heads read it in the pool.
        """
        listing, in_pool = reaches
        of = pool.layers[layer]
        whose, numbers = self._looked_up(*chosen)
        # Where each part lies, how its heads read it, and which heads these are.
        parts: list[tuple[int, Listed, ops.PackedKv, torch.Tensor | None]]
        parts = [(IN_POOL, own, pool.read(layer, of, rope, in_pool), None)]
        for text, read in self.reads:
            reach = read.pages.choosing[layer]
            if reach is not None:
                count = pool.kv_heads
                pages = read.pages.pages
                kv = ops.PackedKv(pages, 0, count, of.scale, rope, None, of.softcap, reach)
                listed = torch.as_tensor(read.entries), torch.as_tensor(read.offsets)
                parts.append((text, listed, kv, read.pages.chosen_by[layer]))
        for text, (entries, offsets), kv, those in parts:
            theirs = whose == text
            if those is not None:
                theirs &= those[None, :, None]
            some, selected = _those(theirs, numbers)
            gathered, ends = ops.gather_entries(
                some, selected, entries, entry_offsets=offsets, reach=listing
            )
            yield ops.attend_packed(*called, gathered, kv, entry_offsets=ends, workspace=workspace)

    def _looked_up(
        self, chosen: torch.Tensor, selected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whose each chosen entry [B, G, W] is, −1 of what does not count, and its number there."""
        at = (self.begins[:, None, None] + chosen).clamp_(0, len(self.whose) - 1)
        counts = torch.arange(chosen.shape[-1], device=chosen.device) < selected[..., None]
        return torch.where(counts, self.whose[at], -1), self.numbers[at]


def _whose(
    entries: Int32, some: Sequence[FinalEntries], named: dict[FinalText, int]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The text of each entry, by its name; blocks of the books."""
    own = np.full(len(entries), IN_POOL, np.int64)
    for text, _ in some:
        own[np.isin(entries[:, 0], text.blocks)] = named[text]
    return own


def _those(theirs: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of numbers [B, G, W] some, in their order at the beginning, and how many i32 [B, G]."""
    order = (~theirs).to(torch.uint8).argsort(dim=-1, stable=True)
    counts = theirs.sum(-1, dtype=torch.int32)
    first = torch.arange(theirs.shape[-1], device=theirs.device) < counts[..., None]
    return torch.where(first, numbers.gather(-1, order), 0).to(torch.int32), counts

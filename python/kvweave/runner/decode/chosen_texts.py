"""What heads that choose read of texts that are packed by strategies of their own.

They choose among all packed entries of a request, by bounds of the exact keys, whatever is packed
how. So what they chose stays right when a text is packed finally. What was chosen is then read part
by part: of the pool's pages, and of all texts format by format, each head in the one that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.device_memory import needs_memory
from kvweave.ops import Reach, RopeTable, Workspace
from kvweave.runner.decode.entry_room import EntryRoom
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.decode.text_pages import IN_POOL, Layers, TextPages, joined
from kvweave.runner.kv.final_texts import FinalEntries
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.states import States
from kvweave.runner.kv.tables import Int32, send_index

Listed = tuple[torch.Tensor, torch.Tensor]
"""Entries i32 [N, 5] of B requests and offsets of their tables."""

_UNREAD = -1
"""The form of a number that counts for nothing."""


@dataclass(frozen=True, eq=False)
class ChosenTexts:
    """All packed entries of a batch, as heads choose among them, and where each is read.

    Entries of the `room` name blocks of the books. `begins` i64 [B]: where those of a request
    begin. `whose` i64 [N]: the text that an entry is of, by its row in `texts`, and `numbers` i64
    [N]: of which block of it, or which of the request's entries in the pool. `layers`: of each form
    of `texts` those in which any head that chooses reads it.
    """

    room: EntryRoom
    begins: torch.Tensor
    whose: torch.Tensor
    numbers: torch.Tensor
    texts: TextPages
    layers: Layers

    @staticmethod
    def of(
        packed: Sequence[Int32],
        final: Sequence[Sequence[FinalEntries]],
        texts: TextPages,
        pool: PackedPool,
        before: ChosenTexts | None = None,
    ) -> ChosenTexts:
        """All entries of requests, `packed`, among them those of texts, `final`.

        `texts`: where these have their pages. Where there is room `before`, and as much is read, it
        lies there: that one is returned.
        """
        whose, numbers = [], []
        for entries, some in zip(packed, final, strict=True):
            own, number = np.full(len(entries), IN_POOL, np.int64), np.zeros(len(entries), np.int64)
            for text, its in some:
                at = np.isin(entries[:, 0], text.blocks)
                own[at], number[at] = texts.named[text], its[:, 0]
            in_pool = own == IN_POOL
            number[in_pool] = np.arange(in_pool.sum())
            whose.append(own)
            numbers.append(number)
        layers = texts.layers(pool.heads.budget_of >= 0)
        count, requests = sum(map(len, packed)), len(packed)
        if before is None or not before._serves(texts, layers, count, requests):
            room = EntryRoom.of(count, requests, pool)
            index = torch.zeros((2, len(room.entries)), dtype=torch.int64, device=pool.device)
            rows = index.new_zeros(requests), index[0], index[1]
            before = ChosenTexts(
                room, *rows, texts, joined(layers, {} if before is None else before.layers)
            )
        before._write(packed, np.concatenate(whose), np.concatenate(numbers))
        return before

    @staticmethod
    @needs_memory("entries of packed texts")
    def prepare(pool: PackedPool, width: int) -> None:
        """Looks up so many entries that every head has chosen of a text that is nobody's.

        As `FinalReads.prepare`: for kernels of torch that a GPU loads when first asked for them.

        # Errors
        `OutOfMemory` as `of`.
        """
        room, heads = EntryRoom.of(1, 1, pool), pool.kv_heads
        index = torch.zeros((2, len(room.entries)), dtype=torch.int64, device=pool.device)
        rows = index.new_zeros(1), index[0], index[1]
        made = ChosenTexts(room, *rows, TextPages(pool, 2), {})
        chosen = torch.zeros((1, heads, width), dtype=torch.int32, device=pool.device)
        selected = torch.full_like(chosen[..., 0], width)
        forms, numbers, pages = made._looked_up(0, chosen, selected)
        for among in ((numbers,), (chosen, pages)):
            _those(forms == IN_POOL, *among)

    def _serves(self, texts: TextPages, layers: Layers, entries: int, requests: int) -> bool:
        """Whether it has room for so many entries of as many requests, read in these layers."""
        reads = texts is self.texts and joined(layers, self.layers) == self.layers
        return reads and requests == len(self.begins) and self.room.fits(entries, requests)

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
        reaches: tuple[Reach, Reach, Reach],
        rope: RopeTable,
        workspace: Workspace | None,
    ) -> Iterator[States]:
        """Attention and lse of `called`, queries and positions, over what was chosen, part by part.

        `chosen`: numbers of entries [B, G, W] and how many count [B, G]. `own`: the entries in the
        pool. `reaches`: how what is chosen is listed, how heads read it in the pool, and how where
        entries name pages of their own.
        """
        listing, in_pool, by_page = reaches
        of, count = pool.layers[layer], pool.kv_heads
        forms, numbers, pages = self._looked_up(layer, *chosen)
        known: dict[str, Any] = {"reach": listing}
        (some,), selected = _those(forms == IN_POOL, numbers)
        gathered, ends = ops.gather_entries(some, selected, own[0], entry_offsets=own[1], **known)
        kv = pool.read(layer, of, rope, in_pool)
        yield ops.attend_packed(*called, gathered, kv, entry_offsets=ends, workspace=workspace)
        entries, known["entry_offsets"] = self.listed
        for form, layers in self.layers.items():
            if not layers[layer]:
                continue
            (some, there), selected = _those(forms == form, chosen[0], pages)
            gathered, ends = ops.gather_entries(some, selected, entries, **known)
            gathered[:, 0].copy_(there.flatten())
            data = pool.text_memory.pages(self.texts.formats[form - 1])
            kv = ops.PackedKv(data, 0, count, of.scale, rope, None, of.softcap, by_page)
            yield ops.attend_packed(*called, gathered, kv, entry_offsets=ends, workspace=workspace)

    def _looked_up(
        self, layer: int, chosen: torch.Tensor, selected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each chosen entry [B, G, W] its form, its number in the pool, and its page elsewhere.

        The form of what does not count is `_UNREAD`.
        """
        at = (self.begins[:, None, None] + chosen).clamp_(0, len(self.whose) - 1)
        whose, numbers = self.whose[at], self.numbers[at]
        heads = torch.arange(chosen.shape[1], device=chosen.device)[None, :, None]
        forms, firsts, steps = (table[whose, layer, heads] for table in self.texts.tables)
        counts = torch.arange(chosen.shape[-1], device=chosen.device) < selected[..., None]
        return torch.where(counts, forms, _UNREAD), numbers, firsts + numbers * steps


def _those(theirs: torch.Tensor, *numbers: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Of numbers [B, G, W] some, in their order at the beginning, and how many i32 [B, G]."""
    order = (~theirs).to(torch.uint8).argsort(dim=-1, stable=True)
    counts = theirs.sum(-1, dtype=torch.int32)
    first = torch.arange(theirs.shape[-1], device=theirs.device) < counts[..., None]
    found = [torch.where(first, each.gather(-1, order), 0).to(torch.int32) for each in numbers]
    return found, counts

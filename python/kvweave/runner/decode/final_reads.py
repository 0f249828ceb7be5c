"""What decode steps read of texts that are packed by strategies of their own: a launch a format.

Heads of a layer have pages of several formats, and in another text of others. So for each format
every KV head of a request has a table of its own, of its pages in all texts of the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.device_memory import needs_memory, sent
from kvweave.ops import Reach, RopeTable, Table, Workspace
from kvweave.power_of_two import power_of_two
from kvweave.runner.decode.text_pages import Layers, TextPages, joined
from kvweave.runner.kv.final_texts import FinalEntries
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.states import States
from kvweave.runner.kv.tables import Int32

_AT_ONCE = 1 << 21
"""So many heads of entries are looked at at once."""
_MUCH = 8192
"""So many heads of entries are sorted as those of long texts: torch has other kernels for few."""


@dataclass(frozen=True, eq=False)
class FormatRead:
    """Where entries of the pages of one format lie, by its number in `TextPages.forms`.

    `entries` i32 [N, 5] name pages; `offsets` i32 [L, M · G + 1]: of a table for each KV head of
    each request, layer by layer. `layers` [L]: in which of them any head reads this format.
    """

    form: int
    entries: torch.Tensor
    offsets: torch.Tensor
    layers: tuple[bool, ...]

    def write(self, entries: torch.Tensor, counts: torch.Tensor) -> None:
        """Writes entries, and how many those of each table are, i64 [L, B · G]."""
        ends = counts.flatten().cumsum(0).view(counts.shape)
        tables = counts.shape[1]
        self.entries[: len(entries)].copy_(entries)
        self.offsets[0, 0] = 0
        self.offsets[1:, 0].copy_(ends[:-1, -1])
        self.offsets[:, 1 : 1 + tables].copy_(ends)
        # Requests beyond these have none.
        self.offsets[:, 1 + tables :].copy_(ends[:, -1:])


class FinalReads:
    """What the heads of a batch that read all read of final texts: `reads`, a format each.

    It stays where it is while there is room.
    """

    def __init__(self, pool: PackedPool, reads: tuple[FormatRead, ...]) -> None:
        self.pool, self.reads = pool, reads
        heads = np.zeros((pool.kv_heads, 4), np.int32)
        heads[:, 0] = np.arange(pool.kv_heads)
        self._reach = Reach(pool.kv_heads, heads)

    @staticmethod
    @needs_memory("entries of packed texts")
    def of(
        pool: PackedPool,
        listed: Sequence[Sequence[FinalEntries]],
        texts: TextPages,
        before: FinalReads | None,
    ) -> FinalReads:
        """What requests read: `listed` of each are its texts and entries of these.

        Where all of it has room `before`, it lies there, and that one is returned. Entries are 20
        bytes a page and layer's KV head, beside the bytes of the arena.

        # Errors
        `OutOfMemory` where the device has none for them.
        """
        heads = pool.heads.reading & (pool.heads.budget_of < 0)
        layers = texts.layers(heads)
        made = _Listed.of(listed, texts, torch.from_numpy(heads).to(pool.device))
        tables = {form: made.tables(form) for form in layers}
        needed = {form: len(entries) for form, (entries, _) in tables.items()}
        if before is None or not before._serves(layers, needed, len(listed)):
            before = _with_room(pool, layers, needed, len(listed), before)
        nobodys = made.no_tables
        for read in before.reads:
            read.write(*tables.get(read.form, nobodys))
        return before

    @staticmethod
    @needs_memory("entries of packed texts")
    def prepare(pool: PackedPool) -> None:
        """Lists a text that is nobody's, once in each format: one that is short, then a long one.

        A GPU loads torch's kernels when they are first asked for, some tenth of a second, for which
        those who decode would wait behind the first text. It sorts much by others than little.

        # Errors
        `OutOfMemory` as `of`.
        """
        texts, every = TextPages(pool, 2), torch.ones(pool.heads.reading.shape, dtype=torch.bool)
        for count in (1, -(-_MUCH // every.numel())):
            entries = torch.zeros((count, 5), dtype=torch.int32, device=pool.device)
            whose = torch.ones(count, dtype=torch.int64, device=pool.device)
            known = entries, whose, torch.zeros_like(whose), 1, texts
            listed = _Listed(*known, every.to(pool.device))
            for form in range(1, 1 + len(pool.final_formats)):
                texts.forms[1] = form
                found, counts = listed.tables(form)
                layers = {form: (True,) * len(pool.layers)}
                for read in _with_room(pool, layers, {form: len(found)}, 1, None).reads:
                    read.write(found, counts)

    @property
    def layers(self) -> Layers:
        """By form the layers in which any head reads it."""
        return {read.form: read.layers for read in self.reads}

    def _serves(self, layers: Layers, needed: dict[int, int], requests: int) -> bool:
        """Whether there is room for so many entries by form, read in these layers."""
        tables = requests * self.pool.kv_heads
        return joined(layers, self.layers) == self.layers and all(
            needed.get(read.form, 0) <= len(read.entries) and tables < read.offsets.shape[1]
            for read in self.reads
        )

    def states(
        self,
        layer: int,
        rows: tuple[torch.Tensor, Table],
        rope: RopeTable,
        workspace: Workspace | None,
    ) -> Iterator[States]:
        """Attention and lse of queries [B, H, D] and their positions, format by format."""
        of, count, memory = self.pool.layers[layer], self.pool.kv_heads, self.pool.text_memory
        for read in self.reads:
            if not read.layers[layer]:
                continue
            pages = memory.pages(self.pool.final_formats[read.form - 1])
            kv = ops.PackedKv(pages, 0, count, of.scale, rope, None, of.softcap, self._reach)
            ends = read.offsets[layer, : 1 + len(rows[0]) * count]
            yield ops.attend_packed(
                *rows, read.entries, kv, entry_offsets=ends, workspace=workspace
            )


def _with_room(
    pool: PackedPool,
    layers: Layers,
    needed: dict[int, int],
    requests: int,
    before: FinalReads | None,
) -> FinalReads:
    """Room for what is to be read, or somewhat more, and for what was read before."""
    known = {} if before is None else {read.form: read for read in before.reads}
    tables = pool.kv_heads * power_of_two(requests)
    tables = max([tables, *(read.offsets.shape[1] - 1 for read in known.values())])
    reads = []
    for form, of_layers in joined(layers, {} if before is None else before.layers).items():
        count = max(needed.get(form, 1), len(known[form].entries) if form in known else 1)
        entries = torch.zeros((power_of_two(count), 5), dtype=torch.int32, device=pool.device)
        offsets = entries.new_zeros((len(pool.layers), 1 + tables))
        reads.append(FormatRead(form, entries, offsets, of_layers))
    return FinalReads(pool, tuple(reads))


@dataclass(frozen=True, eq=False)
class _Listed:
    """The entries i32 [N, 5] of B requests, of texts `whose` i64 [N], by request i64 [N].

    `heads` bool [L, G]: which read them.
    """

    entries: torch.Tensor
    whose: torch.Tensor
    request: torch.Tensor
    requests: int
    texts: TextPages
    heads: torch.Tensor

    @staticmethod
    def of(
        listed: Sequence[Sequence[FinalEntries]], texts: TextPages, heads: torch.Tensor
    ) -> _Listed:
        """Those of requests, of which `listed` are the texts and their entries."""
        parts: list[Int32] = [np.zeros((0, 5), np.int32)]
        index = [np.zeros((2, 0), np.int64)]
        for request, those in enumerate(listed):
            if not those:
                continue
            some = np.concatenate([entries for _, entries in those])
            rows = [texts.named[text] for text, _ in those]
            whose = np.repeat(rows, [len(entries) for _, entries in those])
            # Entries of a table are in the order of their positions.
            order = np.argsort(some[:, 3], kind="stable")
            parts.append(some[order])
            index.append(np.stack((whose[order], np.full(len(order), request))))
        device = heads.device
        whose, of = np.concatenate(index, 1)
        both = sent(whose, device), sent(of, device)
        return _Listed(sent(np.concatenate(parts), device), *both, len(listed), texts, heads)

    @property
    def no_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `tables`, of a format that nobody reads."""
        layers, heads = self.heads.shape
        return self.entries[:0], self.whose.new_zeros((layers, self.requests * heads))

    def tables(self, form: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of the pages of a form, table by table, and how many each has [L, B · G]."""
        layers, heads = self.heads.shape
        at_once = max(1, _AT_ONCE // max(1, len(self.entries) * heads))
        parts = [
            self._tables(form, first, min(layers, first + at_once))
            for first in range(0, layers, at_once)
        ]
        return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])

    def _tables(self, form: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of layers [first, end)."""
        forms, firsts, steps = (
            table[:, first:end].index_select(0, self.whose)
            for table in (self.texts.forms, self.texts.firsts, self.texts.steps)
        )
        wanted = (forms == form) & self.heads[first:end]
        entry, layer, head = wanted.nonzero(as_tuple=True)
        tables = self.requests * self.heads.shape[1]
        table = layer * tables + self.request[entry] * self.heads.shape[1] + head
        order = table.argsort(stable=True)
        entry, pages = entry[order], firsts[wanted][order]
        pages = pages + steps[wanted][order] * self.entries[entry, 0]
        found = self.entries.index_select(0, entry)
        found[:, 0] = pages
        counts = torch.bincount(table, minlength=(end - first) * tables)
        return found, counts.view(end - first, tables)

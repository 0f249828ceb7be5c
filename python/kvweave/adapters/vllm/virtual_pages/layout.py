"""Which heads share a block, how many blocks a virtual page takes, and what it is charged.

G KV heads in each of L layers, P tokens a page. Heads of one class keep the same tokens, and choose
as many pages of them or none. Their pages, one a (layer, head), are dealt into blocks of one size
for all classes: a class then has one table a block of a page, and a free block serves any class.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvweave.adapters.vllm.backend.attention_span import AttentionSpan
from kvweave.adapters.vllm.heads.class_map import HeadClass
from kvweave.adapters.vllm.top_k.map import ALL
from kvweave.errors import Unsupported
from kvweave.spare_slots import slots_for

# What a table costs, as a share of a page's memory: each is a gather in every step.
TABLE_COST = 0.01


@dataclass(frozen=True)
class PageLayout:
    """`of_head` [L, G]: the class of each head, as an index of `spans`; P = `page_tokens`.

    Of several `ranks` each has as many neighbouring heads of every layer. All have the tables of
    the one that needs most of a class: vLLM's scheduler knows one layout.

    `budgets`: how many pages the heads of each class choose in a decode step, or `ALL`. Bounds of
    a page of such a head take `bound_share` of the page. `spills`: their pages may lie in the
    host's memory, beside slots on the device. They choose anew when a request begins a page, if it
    is `paced`, or in every step.
    """

    page_tokens: int
    spans: tuple[AttentionSpan, ...]
    of_head: tuple[tuple[int, ...], ...]
    ranks: int = 1
    budgets: tuple[int, ...] = (ALL,)
    bound_share: Fraction = Fraction(0)
    spills: bool = False
    paced: bool = False

    @property
    def layers(self) -> int:
        """L."""
        return len(self.of_head)

    @property
    def kv_heads(self) -> int:
        """G of a rank."""
        return len(self.of_head[0]) // self.ranks

    def heads_of(self, layer: int, rank: int) -> tuple[int, ...]:
        """The classes of a rank's heads of a layer."""
        return self.of_head[layer][rank * self.kv_heads : (rank + 1) * self.kv_heads]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Heads of each class, over all layers: arena pages that it needs for a virtual page."""
        found = [
            Counter(number for layer in range(self.layers) for number in self.heads_of(layer, rank))
            for rank in range(self.ranks)
        ]
        return tuple(max(of[number] for of in found) for number in range(len(self.spans)))

    @cached_property
    def block_pages(self) -> int:
        """Arena pages of a block: what wastes least, tables being charged too."""

        def cost(size: int) -> tuple[float, int]:
            parts = [-(-count // size) for count in self.counts]
            waste = sum(parts) * size / sum(self.counts) - 1
            return waste + TABLE_COST * sum(parts), size

        return min({-(-count // parts) for count in self.counts for parts in range(1, 9)}, key=cost)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Blocks of each class for a virtual page; its tables."""
        return tuple(-(-count // self.block_pages) for count in self.counts)

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """The class of each table."""
        return tuple(number for number, parts in enumerate(self.parts) for _ in range(parts))

    @cached_property
    def choosing(self) -> tuple[int, ...]:
        """The tables of heads that choose pages."""
        return tuple(table for table, number in enumerate(self.tables) if self.budgets[number])

    @property
    def step_tables(self) -> int:
        """Tables of a request in a step: where heads choose, the last one names bounds."""
        return len(self.tables) + bool(self.choosing)

    @property
    def bound_rows(self) -> int:
        """Bounds of a virtual page: one for each page of the blocks of heads that choose."""
        return len(self.choosing) * self.block_pages

    def bound_row(self, table: int) -> int:
        """Where the bounds of a table's block begin among those of a virtual page."""
        return self.choosing.index(table) * self.block_pages

    @property
    def bound_pages(self) -> Fraction:
        """What the bounds of a virtual page take, in pages of a head."""
        return self.bound_rows * self.bound_share

    @cached_property
    def slots(self) -> int:
        """Pages of a head that have room on the device once the others lie in the host's memory."""
        return slots_for(max(self.budgets)) if self.spills else 0

    def home_blocks(self, host_bytes: int, page_bytes: int) -> int:
        """Virtual pages that so many bytes of the host have room for; pages of a head have these.

        Of each lie there all pages of the blocks of heads that choose.
        """
        return host_bytes // (self.bound_rows * page_bytes)

    @property
    def head_slots(self) -> int:
        """What a virtual page is charged, in pages of a head per layer: what stays on the device.

        That are whole heads that do not choose, and all bounds, which take half of it at most. So
        there are never fewer virtual pages than what they hold could fill the arena with.
        """
        whole = sum(
            count
            for number, count in enumerate(self.counts)
            if self.spans[number].window is None and not (self.spills and self.budgets[number])
        )
        least = -(-2 * self.bound_pages // self.layers)
        return int(max(1, (whole + self.bound_pages) // self.layers, least))

    def arena_pages(self, virtual_pages: int) -> int:
        """Pages of the arena that so many virtual pages pay for, the null page 0 among them."""
        bounds = -(-virtual_pages * self.bound_pages // 1)
        return virtual_pages * self.layers * self.head_slots - int(bounds)

    def sink_pages(self, number: int) -> int:
        """Virtual pages at the start of a request that a class never gives up."""
        return -(-self.spans[number].sink // self.page_tokens)

    def first_seen(self, number: int, computed: int) -> int:
        """The first virtual page behind the sink that rows from `computed` on see any of."""
        window = self.spans[number].window
        if window is None:
            return 0
        seen = max(computed - window + 1, 0) // self.page_tokens
        return max(seen, self.sink_pages(number))

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        """Most blocks that a request of so many tokens holds, `in_flight` not yet settled."""
        pages = -(-tokens // self.page_tokens)
        most = 0
        for number, (span, parts) in enumerate(zip(self.spans, self.parts, strict=True)):
            kept = pages
            if span.window is not None:
                # A window may start inside a page.
                seen = -(-(span.window - 1 + in_flight) // self.page_tokens) + 1
                kept = min(pages, self.sink_pages(number) + seen)
            most += kept * parts
        return most

    def charged(self, tokens: int, in_flight: int) -> int:
        """Arena pages of a layer, on average, that `most_blocks` and the null block take.

        At least what the request's virtual pages pay for: these must be had too.
        """
        blocks = self.most_blocks(tokens, in_flight) + 1
        # Of what virtual pages pay for, bounds take their part.
        of_page = self.layers - self.bound_pages / self.head_slots
        pages = int(-(-blocks * self.block_pages // of_page))
        return max(pages, -(-tokens // self.page_tokens) * self.head_slots)

    def head_rows(self, layer: int, rank: int = 0) -> npt.NDArray[np.int32]:
        """What a rank's heads of a layer read and write: i32 [G, 4], table, page, window, sink."""
        earlier = (self.heads_of(other, rank) for other in range(layer))
        before = Counter(number for heads in earlier for number in heads)
        rows = []
        for number in self.heads_of(layer, rank):
            part, page = divmod(before[number], self.block_pages)
            before[number] += 1
            window, sink = self.spans[number]
            rows.append([sum(self.parts[:number]) + part, page, window or 0, sink])
        return np.array(rows, np.int32)

    def with_bounds(self, share: Fraction, *, spills: bool, paced: bool = False) -> PageLayout:
        """The same, of heads whose bounds take so much and whose pages may leave the device."""
        spills = spills and bool(self.choosing)
        return replace(self, bound_share=share, spills=spills, paced=spills and paced)


def layout_of(classes: list[list[HeadClass]], page_tokens: int, ranks: int = 1) -> PageLayout:
    """The layout of a head map: `classes` [L, G] as `heads.class_map.read_classes` has them.

    Errors: `Unsupported` for ranks that do not share a layer's heads equally.
    """
    heads = len(classes[0])
    if heads % ranks:
        expected = f"a divisor of {heads} KV heads beside a head map"
        text = f"tensor_parallel_size: expected {expected}, got {ranks}"
        raise Unsupported(text, expected=expected, got=str(ranks))
    known: list[tuple[AttentionSpan, int]] = []
    of_head = []
    for layer in classes:
        numbers = []
        for head in layer:
            kept = _kept_by(head)
            if kept not in known:
                known.append(kept)
            numbers.append(known.index(kept))
        of_head.append(tuple(numbers))
    spans, budgets = zip(*known, strict=True)
    return PageLayout(page_tokens, spans, tuple(of_head), ranks, budgets)


def _kept_by(head: HeadClass) -> tuple[AttentionSpan, int]:
    """What a head sees, and how many pages of it a decode step reads."""
    if head["kind"] == "window":
        return AttentionSpan(int(head["recent"]), int(head["sink"])), ALL
    return AttentionSpan(), int(head["pages"]) if head["kind"] == "top_k" else ALL

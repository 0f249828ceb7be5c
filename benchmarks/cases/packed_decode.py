"""What a decode step takes over packed pages on a GPU, beside the same text exact and in fp8.

One layer of Llama-3.1-8B's shape. Exact pages are filled, packed from there in each format, and
attended: bf16, fp8 (the same numbers rounded), INT4, INT8, and top-r and planes in random bases,
one for each KV head's keys and values. A way's floor is reading its bytes once, by the read ceiling
of the same process; "bf16 ÷ this" is how much sooner it is done.

"10 % of the blocks" is a step that scores packed blocks by their mean keys, selects the best tenth
for each KV head, gathers their entries and attends to them; "of an earlier choice" attends alone.
Their floor is reading mean keys, where there are any to read, and what is selected.

Packing has the floor of reading exact pages and writing packed ones. "a full buffer" are 64 tokens
of all layers and heads of a model, as one request fills them while it decodes.

Every call is a graph of its own; the L2 cache holds nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch

from kvweave import ops
from kvweave.lab.bench.ceilings import Ceilings, measure
from kvweave.lab.bench.device_timing import FULL, QUICK, DeviceClock, Effort, replayed
from kvweave.lab.bench.pages import PAGE, Shape
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import Timing
from kvweave.ops.packed_kv import Preset

SHAPES = (
    # requests, tokens of each
    (1, 32_768),
    (1, 131_072),
    (1, 1_048_576),
    (4, 32_768),
    (16, 4_096),
    (16, 32_768),
    (16, 131_072),
)
LLAMA = Shape("Llama-3.1-8B, one layer", 1, 32, 8, 128)
SMALL = Shape("D = 64, one layer", 1, 16, 8, 64)
PACKED_PAGE = 64
BUFFER_PAGES = 32 * LLAMA.kv_heads
"""Of all layers and heads of the model."""
SELECTED = 10
"""Of so many blocks one is selected."""
NAMED: tuple[Preset, ...] = get_args(Preset)
BITS = {
    3.0: ((8, 1 / 8), (4, 5 / 16), (2, 3 / 8)),
    2.5: ((8, 1 / 16), (4, 5 / 16), (2, 3 / 8)),
}
"""By the bits of a channel on average: how many so much of a random basis' channels have."""
STEPS = {8: 0.0308, 4: 0.3352, 2: 0.9957}
"""The steps that lose least of a normal number of spread 1 (Max, 1960)."""
Call = Callable[[], Any]


def formats(dim: int) -> dict[str, ops.PackedFormat]:
    """What text is packed in."""
    named = {name: ops.packed_format(name, dim) for name in NAMED}
    for group in (2, 4):
        named[f"quarter-bf16, groups of {group}"] = ops.PackedFormat(
            "top-r", dim, kept=dim // 4, group=group, numbers="bf16"
        )
    return named


def random_bases(
    pages: int, of: ops.PackedFormat, generator: torch.Generator
) -> torch.Tensor | None:
    """Random rotations for so many pages of a block, without means; None where none is needed."""
    if of.basis_rows is None:
        return None
    dim, device = of.head_dim, generator.device
    turned = torch.linalg.qr(
        torch.randn(1, pages, 2, dim, dim, generator=generator, device=device)
    ).Q
    means = torch.zeros_like(turned[..., :1, :])
    if of.kind == "top-r":
        return torch.cat((means, turned), -2).contiguous()
    bits = torch.zeros(dim, device=device)
    step, first = torch.ones(dim, 1, device=device), 0
    for each, share in BITS[4 * of.token_bytes / dim]:
        channels = slice(first, first + round(share * dim))
        bits[channels], step[channels], first = each, STEPS[each], channels.stop
    rows = (means, bits.expand_as(means), turned * step, turned / step)
    return torch.cat(rows, -2).contiguous()


@dataclass(frozen=True)
class Text:
    """B requests of T tokens, exact and packed, and one row of each."""

    shape: Shape
    requests: int
    tokens: int
    exact: ops.PagedKv
    fp8: ops.PagedKv
    packed: dict[str, ops.PackedKv]
    packs: torch.Tensor
    bounds: torch.Tensor
    q: torch.Tensor
    positions: torch.Tensor
    workspace: ops.Workspace

    @property
    def title(self) -> str:
        return f"{self.shape.name}, {self.requests} × {self.tokens} tokens"

    @classmethod
    def of(
        cls, shape: Shape, requests: int, tokens: int, names: Collection[str] | None = None
    ) -> Text:
        """Random numbers, packed in the named formats, or in all."""
        generator = torch.Generator("cuda").manual_seed(tokens)
        blocks = requests * tokens // PAGE
        heads, dim, each = shape.kv_heads, shape.head_dim, PACKED_PAGE // PAGE
        # Before the first block lies the null block.
        size = (heads * (blocks + 1), 2, PAGE, dim)
        cache = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
        order = heads * (1 + torch.randperm(blocks, generator=generator, device="cuda"))
        count = blocks // each
        targets = heads * (1 + torch.randperm(count, generator=generator, device="cuda"))
        full = torch.full((count,), PACKED_PAGE, device="cuda")
        packs = torch.cat((targets[:, None], full[:, None], order.view(count, each)), 1).int()
        bounds = torch.zeros(heads * (count + 1), 3, dim, device="cuda")
        ops.bound_packed(cache, bounds, packs, pages=heads, page_tokens=PACKED_PAGE)
        rope, packed = shape.rope(), {}
        for name, of in formats(dim).items():
            if names is not None and name not in names:
                continue
            bases = random_bases(heads, of, generator)
            pages = ops.PackedPages.zeros(heads * (count + 1), of, "cuda", bases=bases)
            ops.pack_pages(cache, pages, packs, pages=heads)
            packed[name] = ops.PackedKv(pages, 0, heads, dim**-0.5, rope)
        exact = ops.PagedKv(cache, 0, heads, dim**-0.5, rope)
        q = torch.randn(requests, shape.heads, dim, generator=generator, device="cuda")
        return cls(
            shape,
            requests,
            tokens,
            exact,
            replace(exact, cache=cache.to(torch.float8_e4m3fn), kv_scales=(1.0, 1.0)),
            packed,
            packs,
            bounds,
            q.bfloat16(),
            torch.full((requests,), tokens - 1, dtype=torch.int32, device="cuda"),
            ops.Workspace("cuda"),
        )

    def table(self, blocks: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of full blocks, each request's one after the other, and their offsets."""
        each = self.tokens // page
        place = page * (torch.arange(len(blocks), device="cuda", dtype=torch.int32) % each)
        nothing = torch.zeros_like(place)
        entries = torch.stack((blocks.int(), nothing, nothing + page, place, nothing), 1)
        offsets = torch.arange(self.requests + 1, dtype=torch.int32, device="cuda") * each
        return entries, offsets

    def attend(self, kv: ops.PagedKv) -> Callable[[], torch.Tensor]:
        entries, offsets = self.table(self.packs[:, 2:].flatten(), PAGE)
        given = (self.q, self.positions, entries, kv)
        named: dict[str, Any] = {"entry_offsets": offsets, "workspace": self.workspace}
        return lambda: ops.attend_decode(*given, **named)[0]

    def attend_packed(self, name: str) -> Callable[[], torch.Tensor]:
        entries, offsets = self.table(self.packs[:, 0], PACKED_PAGE)
        given = (self.q, self.positions, entries, self.packed[name])
        named: dict[str, Any] = {"entry_offsets": offsets, "workspace": self.workspace}
        return lambda: ops.attend_packed(*given, **named)[0]

    def choose(self) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Entries and offsets of the blocks that each KV head selects."""
        heads, blocks = self.shape.kv_heads, self.tokens // PACKED_PAGE
        entries, offsets = self.table(self.packs[:, 0], PACKED_PAGE)
        scale, rope = self.shape.head_dim**-0.5, self.exact.rope
        pages = ops.BoundedPages(
            self.bounds, PACKED_PAGE, 0, heads, scale, rope, score="mean", shared="sum"
        )
        rows = self.requests * heads
        budgets = torch.full((rows,), blocks // SELECTED, dtype=torch.int32, device="cuda")

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            scores, counts = ops.score_pages(
                self.q, entries, pages, entry_offsets=offsets, width=blocks
            )
            chosen, selected = ops.select_pages(
                scores.view(rows, -1), counts.view(-1), budgets, most=blocks // SELECTED
            )
            of_heads = (chosen.view(self.requests, heads, -1), selected.view(-1, heads))
            return ops.gather_entries(*of_heads, entries, entry_offsets=offsets)

        return call

    def attend_selected(self, name: str, *, chosen: bool) -> Callable[[], torch.Tensor]:
        """Attention to what is selected, in the call or, `chosen`, before it."""
        heads = self.shape.kv_heads
        own = ops.Reach(
            2 * heads, np.array([(2 * head, head, 0, 0) for head in range(heads)], np.int32)
        )
        kv, choose = replace(self.packed[name], reach=own), self.choose()
        before = choose()

        def call() -> torch.Tensor:
            entries, offsets = before if chosen else choose()
            named: dict[str, Any] = {"entry_offsets": offsets, "workspace": self.workspace}
            return ops.attend_packed(self.q, self.positions, entries, kv, **named)[0]

        return call

    def pack(self, name: str) -> Callable[[], None]:
        pages, packed = self.shape.kv_heads, self.packed[name].pages
        return lambda: ops.pack_pages(self.exact.cache, packed, self.packs, pages=pages)

    @property
    def rows_bytes(self) -> float:
        """Of queries and results."""
        return 2.0 * 2 * self.q.numel()

    @property
    def exact_bytes(self) -> float:
        return 2.0 * 2 * self.requests * self.tokens * self.shape.kv_heads * self.shape.head_dim

    @property
    def packed_pages(self) -> int:
        return self.requests * self.tokens // PACKED_PAGE * self.shape.kv_heads

    def packed_bytes(self, name: str) -> float:
        return float(self.packed_pages * self.packed[name].pages.format.page_bytes)

    def selected_bytes(self, name: str) -> float:
        """Of a tenth of the blocks; a basis is read for each thread block and not counted."""
        each = self.tokens // PACKED_PAGE
        return self.packed_bytes(name) * (each // SELECTED) / each

    @property
    def mean_bytes(self) -> float:
        """Of the mean keys of all blocks."""
        return 4.0 * self.packed_pages * self.shape.head_dim

    def check(self, name: str) -> None:
        """The last request against torch over what its packed pages stand for."""
        count = self.tokens // PACKED_PAGE
        packed = self.packed[name].pages
        expect(packed.data.shape[1] == packed.format.page_bytes, "expected the formula's bytes")
        targets = self.packs[-count:, 0].long()
        rows = self.packs[-count:].clone()
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        size = (heads * (count + 1), 2, PACKED_PAGE, dim)
        back = torch.empty(size, device="cuda")
        places = heads * torch.arange(1, count + 1, device="cuda", dtype=torch.int32)
        there = torch.stack((targets.int(), rows[:, 1], places), 1)
        ops.unpack_pages(packed, back, there, pages=heads)
        both = back[heads:].view(count, heads, 2, PACKED_PAGE, dim).permute(2, 1, 0, 3, 4)
        k, v = both.reshape(2, heads, self.tokens, dim)
        asked = self.q[-1].float().view(heads, -1, dim)
        weights = (asked @ k.mT * dim**-0.5).softmax(-1)
        got = self.attend_packed(name)()[-1].view_as(asked)
        wanted = weights @ v
        worst = float((got - wanted).abs().max() / wanted.abs().max())
        expect(worst < 2e-2, f"{name}: expected a difference below 2e-2, got {worst}")


def run(quick: bool) -> list[Row]:
    device = torch.device("cuda")
    clock, effort = DeviceClock(device), QUICK if quick else FULL
    ceilings = measure(clock, device, effort)
    rows = [
        Row("reading", ceilings.read / 1e12, "TB/s", None, {}),
        Row("a launch", ceilings.launch_s * 1e6, "µs", None, {}),
    ]
    for sizes in SHAPES[:2] if quick else SHAPES:
        rows += _attended(Text.of(LLAMA, *sizes), clock, effort, ceilings)
    if not quick:
        rows += _attended(Text.of(SMALL, 16, 32_768), clock, effort, ceilings)
    return [*rows, *_buffer(clock, effort, ceilings)]


def _attended(text: Text, clock: DeviceClock, effort: Effort, ceilings: Ceilings) -> list[Row]:
    for name in text.packed:
        text.check(name)
    calls: dict[str, tuple[Call, float]] = {
        "bf16": (text.attend(text.exact), text.exact_bytes),
        "fp8": (text.attend(text.fp8), text.exact_bytes / 2),
    }
    for name in text.packed:
        calls[name] = (text.attend_packed(name), text.packed_bytes(name))
    for name in ("int4", "half-int4", "quarter-bf16", "planes-3"):
        read = text.selected_bytes(name)
        of = f"{name}, 10 % of the blocks"
        calls[of] = (text.attend_selected(name, chosen=False), read + text.mean_bytes)
        calls[f"{of} of an earlier choice"] = (text.attend_selected(name, chosen=True), read)
    timed = clock.time({name: replayed(call) for name, (call, _) in calls.items()}, effort)
    dense = timed["bf16"].median_s
    rows = []
    for name, (_, count) in calls.items():
        floor = (count + text.rows_bytes) / ceilings.read
        beside = {
            "floor µs": floor * 1e6,
            "share of reading": floor / timed[name].median_s,
            "bf16 ÷ this": dense / timed[name].median_s,
            "bytes of bf16 ÷ this": text.exact_bytes / count,
        }
        rows.append(_row(f"{text.title}: {name}", timed[name], beside))
    return [*rows, *_packing(text, clock, effort, ceilings)]


def _packing(text: Text, clock: DeviceClock, effort: Effort, ceilings: Ceilings) -> list[Row]:
    """All of a text's pages of a layer, packed at once."""
    packing = clock.time({name: replayed(text.pack(name)) for name in text.packed}, effort)
    rows = []
    for name, timing in packing.items():
        floor = (text.exact_bytes + text.packed_bytes(name)) / ceilings.copy
        beside = {"floor µs": floor * 1e6, "share of copying": floor / timing.median_s}
        rows.append(_row(f"{text.title}: pack {name}", timing, beside))
    return rows


def _buffer(clock: DeviceClock, effort: Effort, ceilings: Ceilings) -> list[Row]:
    """64 tokens of a whole model, of one request and of 16."""
    rows = []
    for requests in (1, 16):
        for name, of in formats(LLAMA.head_dim).items():
            timing = clock.time({"pack": replayed(buffer(requests, name))}, effort)["pack"]
            count = requests * BUFFER_PAGES * (4 * PACKED_PAGE * LLAMA.head_dim + of.page_bytes)
            beside = {"floor µs": count / ceilings.copy * 1e6}
            rows.append(_row(f"a full buffer of {requests}: pack {name}", timing, beside))
    return rows


def buffer(requests: int, name: str) -> Callable[[], None]:
    """Packs 64 tokens of a whole model, of so many requests, in a format."""
    generator = torch.Generator("cuda").manual_seed(PACKED_PAGE)
    each, of = PACKED_PAGE // PAGE, formats(LLAMA.head_dim)[name]
    size = (BUFFER_PAGES * (requests * each + 1), 2, PAGE, LLAMA.head_dim)
    cache = torch.randn(size, device="cuda").bfloat16()
    order = torch.arange(1, requests * each + 1, device="cuda").view(requests, each)
    targets = torch.arange(1, requests + 1, device="cuda")[:, None]
    columns = (BUFFER_PAGES * targets, targets * 0 + PACKED_PAGE, BUFFER_PAGES * order)
    packs = torch.cat(columns, 1).int()
    bases = random_bases(BUFFER_PAGES, of, generator)
    packed = ops.PackedPages.zeros(BUFFER_PAGES * (requests + 1), of, "cuda", bases=bases)
    return lambda: ops.pack_pages(cache, packed, packs, pages=BUFFER_PAGES)


def _row(name: str, timing: Timing, beside: dict[str, Any]) -> Row:
    return Row(name, timing.median_s * 1e6, "µs", timing.p95_s * 1e6, beside)

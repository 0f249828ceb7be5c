"""What a decode step takes to choose its pages on a GPU: scores by bounds, and the best of them.

`select_pages` beside what others have for the best K of a row: see `benchmarks.cases.top_k_peers`.
All get rows that are full; a peer that is not here, or does not do a shape, says why in its row. A
row's floor is reading it once.

`score_pages` beside the floor of reading bounds: two vectors a page and KV head, of f32, of the
queries' bf16, which are half of that, or of e4m3, a quarter. Then a layer of a decode step: pages
chosen by bounds of f32 and attended to, those of an earlier choice attended to, with and without an
estimate of the others by their means (the floor being reading those), and all of them.

Every call is a graph of its own; the L2 cache holds nothing of it. "warm" repeats it in one graph,
where the scores lie in the L2 cache as they do behind `score_pages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from benchmarks.cases.top_k_peers import peers, reason
from kvweave import ops
from kvweave.lab.bench.ceilings import Ceilings, measure
from kvweave.lab.bench.device_timing import FULL, QUICK, DeviceClock, Effort, replayed
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import Timing

SELECTED = (
    # rows, scores of a row, pages of each, the microseconds that the design asks for
    (256, 8192, 64, 8.0),
    (256, 8192, 256, 8.0),
    (64, 8192, 64, 6.0),
    (64, 8192, 256, 6.0),
    (64, 8192, 1024, None),
    (320, 640, 64, None),
    (320, 640, 128, None),
    (256, 8192, 1024, None),
    (256, 8192, 4096, None),
    (8, 8192, 256, None),
    (8, 65536, 256, None),
    (1, 8192, 256, None),
    (1, 65536, 256, None),
)
LAYERS = (
    # requests, tokens of each, pages that a head reads; one layer of Llama-3.1-8B's shape
    (40, 10_240, 64),
    (40, 10_240, 128),
    (8, 131_072, 128),
    (1, 131_072, 64),
)
PAGE, KV_HEADS, HEADS, DIM = 16, 8, 32, 128
SINK, RECENT = 1, 2
OWN_TABLES = ops.Reach(
    2 * KV_HEADS, np.array([(2 * head, head, 0, 0) for head in range(KV_HEADS)], np.int32)
)
REPEATED = 20


@dataclass(frozen=True)
class Choice:
    """Full rows of scores f32 [R, S] of which each selects `most`."""

    scores: torch.Tensor
    most: int
    counts: torch.Tensor = field(init=False)
    budgets: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, width = self.scores.shape
        for name, number in (("counts", width), ("budgets", self.most)):
            table = torch.full((rows,), number, dtype=torch.int32, device=self.scores.device)
            object.__setattr__(self, name, table)

    def ours(self, sink: int = SINK, recent: int = RECENT) -> torch.Tensor:
        named = {"sink": sink, "recent": recent, "most": self.most}
        return ops.select_pages(self.scores, self.counts, self.budgets, **named)[0]

    def check(self, name: str, call: Callable[[], torch.Tensor]) -> None:
        """Whether a call finds the best, told by their scores: others break ties as they like."""
        wanted = torch.topk(self.scores, self.most).values
        got = self.scores.gather(1, call().long()).sort(descending=True).values
        expect(torch.equal(got, wanted), f"{name}: expected the {self.most} best of each row")


@dataclass(frozen=True)
class Layer:
    """One layer of a decode step: queries over tables of bounded pages, of which each head reads
    `most`."""

    requests: int
    tokens: int
    most: int
    q: torch.Tensor
    positions: torch.Tensor
    entries: torch.Tensor
    offsets: torch.Tensor
    bounds: ops.BoundedPages
    keys: ops.BoundedPages
    rounded: ops.BoundedPages
    kv: ops.PagedKv
    means: ops.PageMeans
    budgets: torch.Tensor
    workspace: ops.Workspace

    @classmethod
    def of(cls, requests: int, tokens: int, most: int) -> Layer:
        generator = torch.Generator("cuda").manual_seed(tokens)
        each = tokens // PAGE
        blocks = requests * each
        random = {"generator": generator, "device": "cuda"}
        order = KV_HEADS * torch.randperm(blocks, **random)
        place = PAGE * (torch.arange(blocks, device="cuda") % each)
        nothing = torch.zeros_like(place)
        columns = (order, nothing, nothing + PAGE, place, nothing)
        cache = torch.empty(
            blocks * KV_HEADS, 2, PAGE, DIM, dtype=torch.bfloat16, device="cuda"
        ).normal_(generator=generator)
        bounds = torch.empty(len(cache), 3, DIM, device="cuda")
        held = torch.stack((KV_HEADS * torch.arange(blocks, device="cuda"), *columns[1:3]), 1)
        # Block 0 is nobody's elsewhere, and its bounds are never computed.
        bounds[:KV_HEADS] = 0.0
        ops.bound_pages(cache, ops.PageBounds(bounds, held.int()), pages=KV_HEADS)
        fp8 = torch.zeros(len(cache), 2, DIM, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.zeros(len(cache), dtype=torch.uint8, device="cuda")
        ops.bound_pages(cache, ops.PageBounds(fp8, held.int(), scales=scales), pages=KV_HEADS)
        table = ops.RopeTable(np.ones((1, DIM // 2), np.float32))
        scale = DIM**-0.5
        bounded = ops.BoundedPages(bounds, PAGE, 0, KV_HEADS, scale, table)
        return cls(
            requests,
            tokens,
            most,
            torch.randn(requests, HEADS, DIM, **random).bfloat16(),
            torch.full((requests,), tokens - 1, dtype=torch.int32, device="cuda"),
            torch.stack(columns, 1).int(),
            each * torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
            bounded,
            replace(bounded, bounds=bounds[:, :2].bfloat16().contiguous()),
            replace(bounded, bounds=fp8, scales=scales),
            ops.PagedKv(cache, 0, KV_HEADS, scale, table),
            ops.PageMeans(cache.mean(2), PAGE, 0, KV_HEADS, scale, table),
            torch.full((requests * KV_HEADS,), most, dtype=torch.int32, device="cuda"),
            ops.Workspace("cuda"),
        )

    @property
    def bytes(self) -> float:
        """That scores read: least and greatest key of each page and KV head."""
        return float(self.requests * (self.tokens // PAGE) * KV_HEADS * 2 * DIM * 4)

    @property
    def means_bytes(self) -> float:
        """That an estimate reads: mean key and value of each page that a head has not read."""
        left = self.tokens // PAGE - self.most
        return float(self.requests * left * KV_HEADS * 2 * DIM * 2)

    def score(self) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.tokens // PAGE
        given = (self.q, self.entries, self.bounds)
        return ops.score_pages(*given, entry_offsets=self.offsets, width=width)

    def score_by_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by bounds of bf16, which are exact of keys of bf16."""
        given = (self.q, self.entries, self.keys)
        return ops.score_pages(*given, entry_offsets=self.offsets, width=self.tokens // PAGE)

    def score_in_fp8(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by bounds of e4m3, which are rounded outwards."""
        given = (self.q, self.entries, self.rounded)
        return ops.score_pages(*given, entry_offsets=self.offsets, width=self.tokens // PAGE)

    def select(self) -> tuple[torch.Tensor, torch.Tensor]:
        scores, counts = self.score()
        rows, listed = scores.flatten(0, 1), counts.flatten()
        named = {"sink": SINK, "recent": RECENT, "most": self.most}
        pages, selected = ops.select_pages(rows, listed, self.budgets, **named)
        return pages.view(self.requests, KV_HEADS, -1), selected.view(self.requests, KV_HEADS)

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.gather_entries(*self.select(), self.entries, entry_offsets=self.offsets)

    def attend(self, entries: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Of the heads to tables of their own."""
        given = (self.q, self.positions, entries, replace(self.kv, reach=OWN_TABLES))
        return ops.attend_decode(*given, entry_offsets=offsets, workspace=self.workspace)[0]

    def attend_and_estimate(self, entries: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The same, and the means of all other pages."""
        known = {"workspace": self.workspace}
        given = (self.q, self.positions, entries, replace(self.kv, reach=OWN_TABLES))
        attended = ops.attend_decode(*given, entry_offsets=offsets, **known)
        read = ops.ReadEntries(entries, offsets, OWN_TABLES)
        listed = (self.q, attended, self.entries, self.means)
        return ops.estimate_pages(*listed, entry_offsets=self.offsets, read=read, **known)[0]

    def choose_and_attend(self) -> torch.Tensor:
        return self.attend(*self.gather())

    def part(self, requests: int) -> Layer:
        """The same layer for the first so many of its requests."""
        return replace(
            self,
            requests=requests,
            q=self.q[:requests],
            positions=self.positions[:requests],
            offsets=self.offsets[: requests + 1],
            budgets=self.budgets[: requests * KV_HEADS],
        )

    def attend_to_all(self) -> torch.Tensor:
        given = (self.q, self.positions, self.entries, self.kv)
        return ops.attend_decode(*given, entry_offsets=self.offsets, workspace=self.workspace)[0]

    def check(self) -> None:
        """The first request's scores, and what it attends to, against torch."""
        scores, _ = self.score()
        apart = float((self.score_by_keys()[0] - scores).abs().max())
        expect(apart < 1e-3, f"score_pages by keys: expected the same within 1e-3, got {apart}")
        less = float((scores - self.score_in_fp8()[0]).max())
        expect(less < 1e-3, f"score_pages in fp8: expected no less by more than 1e-3, got {less}")
        pages, _ = self.select()
        first = self.entries[: self.tokens // PAGE, 0].long()
        heads = torch.arange(KV_HEADS, device="cuda")
        rows = first[None] + heads[:, None]
        asked = self.q[0].float().view(KV_HEADS, -1, DIM)
        bounds = self.bounds.bounds[rows, :2]
        wanted = (asked[:, :, None, None] * bounds[:, None]).amax(3).sum(-1).amax(1)
        worst = float((scores[0] - wanted * self.kv.scale).abs().max())
        expect(worst < 1e-3, f"score_pages: expected a difference below 1e-3, got {worst}")
        cache = self.kv.cache[rows.gather(1, pages[0].long())].float()
        k, v = (cache[:, :, side].flatten(1, 2) for side in (0, 1))
        weights = (asked @ k.mT * self.kv.scale).softmax(-1)
        worst = float((self.choose_and_attend()[0].view_as(asked) - weights @ v).abs().max())
        expect(worst < 2e-2, f"attend_decode: expected a difference below 2e-2, got {worst}")
        left = torch.ones(rows.shape, dtype=torch.bool, device="cuda")
        left.scatter_(1, pages[0].long(), value=False)
        means = self.means.means[rows].float()
        logits = (asked @ means[:, :, 0].mT * self.kv.scale + math.log(PAGE)).masked_fill(
            ~left[:, None], -torch.inf
        )
        weights = torch.cat((asked @ k.mT * self.kv.scale, logits), -1).softmax(-1)
        wanted = weights @ torch.cat((v, means[:, :, 1]), 1)
        estimated = self.attend_and_estimate(*self.gather())[0].view_as(asked)
        worst = float((estimated - wanted).abs().max())
        expect(worst < 2e-2, f"estimate_pages: expected a difference below 2e-2, got {worst}")


def run(quick: bool) -> list[Row]:
    device = torch.device("cuda")
    clock, effort = DeviceClock(device), QUICK if quick else FULL
    ceilings = measure(clock, device, effort)
    rows = [
        Row("reading", ceilings.read / 1e12, "TB/s", None, {}),
        Row("a launch", ceilings.launch_s * 1e6, "µs", None, {}),
    ]
    for shape in SELECTED[:3] if quick else SELECTED:
        rows += _selected(shape, clock, effort, ceilings)
    for sizes in LAYERS[:1] if quick else LAYERS:
        rows += _scored(Layer.of(*sizes), clock, effort, ceilings)
    return rows


def _selected(
    shape: tuple[int, int, int, float | None],
    clock: DeviceClock,
    effort: Effort,
    ceilings: Ceilings,
) -> list[Row]:
    rows, width, most, wanted = shape
    generator = torch.Generator("cuda").manual_seed(width)
    choice = Choice(torch.randn(rows, width, generator=generator, device="cuda"), most)
    choice.check("select_pages", lambda: choice.ours(0, 0))
    calls: dict[str, Callable[[], Any]] = {"ours": replayed(choice.ours)}
    missing = {}
    for name, call in peers(choice.scores, choice.counts, most).items():
        if isinstance(call, str):
            missing[f"{name}: no"] = call
            continue
        # A peer that cannot do a shape, or be captured, says so in its row.
        try:
            choice.check(name, call)
            calls[name] = replayed(call)
        except Exception as error:
            missing[f"{name}: no"] = reason(error)
    timed = clock.time(calls, effort)
    warm = _warm(choice.ours, clock, effort)
    floor = rows * width * 4 / ceilings.read
    beside: dict[str, Any] = {
        "floor µs": floor * 1e6,
        "warm µs": warm * 1e6,
        **({} if wanted is None else {"asked for µs": wanted}),
        **{f"{name} µs": timed[name].median_s * 1e6 for name in calls if name != "ours"},
        **missing,
    }
    return [_row(f"select {rows} × {width}, {most}", timed["ours"], beside)]


def _scored(layer: Layer, clock: DeviceClock, effort: Effort, ceilings: Ceilings) -> list[Row]:
    layer.check()
    kept = layer.gather()
    calls: dict[str, Callable[[], Any]] = {
        "score": layer.score,
        "score by bf16": layer.score_by_keys,
        "score by fp8": layer.score_in_fp8,
        "score, select": layer.select,
        "score, select, gather, attend": layer.choose_and_attend,
        "attend to what was chosen": lambda: layer.attend(*kept),
        "attend to it, estimate the rest": lambda: layer.attend_and_estimate(*kept),
        "attend to all": layer.attend_to_all,
    }
    timed = clock.time({name: replayed(call) for name, call in calls.items()}, effort)
    floor, dense = layer.bytes / ceilings.read, timed["attend to all"].median_s
    beside: dict[str, dict[str, Any]] = {name: {} for name in calls}
    beside["score"] = {
        "floor µs": floor * 1e6,
        "share of reading": floor / timed["score"].median_s,
    }
    for name, part in (("score by bf16", 2), ("score by fp8", 4)):
        beside[name] = {
            "floor µs": floor / part * 1e6,
            "share of reading": floor / part / timed[name].median_s,
        }
    chosen, estimated = "attend to what was chosen", "attend to it, estimate the rest"
    for name in ("score, select, gather, attend", chosen, estimated):
        beside[name] = {"all ÷ this": dense / timed[name].median_s}
    more = timed[estimated].median_s - timed[chosen].median_s
    beside[estimated] |= {
        "estimate µs": more * 1e6,
        "floor µs": layer.means_bytes / ceilings.read * 1e6,
    }
    title = f"{layer.requests} × {layer.tokens} tokens, {layer.most} pages"
    return [_row(f"{title}: {name}", timing, beside[name]) for name, timing in timed.items()]


def at_cadence(layer: Layer, every: int, clock: DeviceClock, effort: Effort) -> list[Row]:
    """What a layer's scores, choice and attention take where a quarter is ranked at every step.

    All are ranked in one of `every` steps, by bounds of the keys' dtype as steps on a GPU have
    them. A quarter of the requests scores as many pages as a quarter of the heads of each does.
    Beside it, attention to all pages.
    """
    layer.check()
    layer = replace(layer, bounds=layer.keys)
    kept, quarter = layer.gather(), layer.part(max(1, layer.requests // 4))

    def some() -> torch.Tensor:
        quarter.gather()
        return layer.attend(*kept)

    calls = {"a quarter": some, "everybody": layer.choose_and_attend, "all": layer.attend_to_all}
    timed = clock.time({name: replayed(call) for name, call in calls.items()}, effort)
    seconds = {name: timing.median_s for name, timing in timed.items()}
    mean = (seconds["a quarter"] * (every - 1) + seconds["everybody"]) / every
    beside = {
        "all ÷ this": seconds["all"] / mean,
        "a quarter ranked µs": seconds["a quarter"] * 1e6,
        "everybody ranked µs": seconds["everybody"] * 1e6,
        "attend to all µs": seconds["all"] * 1e6,
    }
    title = f"{layer.requests} × {layer.tokens} tokens, {layer.most} pages"
    return [Row(f"a layer of {title}, at the paper's cadence", mean * 1e6, "µs", None, beside)]


def _warm(call: Callable[[], Any], clock: DeviceClock, effort: Effort) -> float:
    """Seconds of one of many calls in a graph, one after the other."""

    def many() -> None:
        for _ in range(REPEATED):
            call()

    timed = clock.time({"many": replayed(many)}, effort)
    return timed["many"].median_s / REPEATED


def _row(name: str, timing: Timing, beside: dict[str, Any]) -> Row:
    return Row(name, timing.median_s * 1e6, "µs", timing.p95_s * 1e6, beside)

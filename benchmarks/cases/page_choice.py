"""What a decode step takes to choose its pages on a GPU: scores by bounds, and the best of them.

`select_pages` beside what others have for the best K of a row: `torch.topk` (unsorted, and with
the indices sorted, which is what a table of pages needs), `flashinfer.top_k` and vLLM's
`persistent_topk`, where these can be imported. None of them takes a budget a row, keeps ties or
the first and last pages; all get rows that are full. A row's floor is reading it once.

`score_pages` beside the floor of reading bounds: two vectors of f32 a page and KV head. A layer's
whole choice, both launches, is timed as one.

Every call is a graph of its own; the L2 cache holds nothing of it. "warm" repeats it in one graph,
where the scores lie in the L2 cache as they do behind `score_pages`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

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
    (320, 640, 64, None),
    (320, 640, 128, None),
    (256, 8192, 1024, None),
    (256, 8192, 4096, None),
    (8, 65536, 256, None),
)
SCORED = (
    # requests, tokens of each; pages of 16 tokens, 8 KV heads of 4 query heads, D 128
    (40, 10_240),
    (8, 131_072),
    (1, 131_072),
)
PAGE, KV_HEADS, HEADS, DIM = 16, 8, 32, 128
SINK, RECENT, PAGES = 1, 2, 64
REPEATED = 20
VLLM_K = (512, 1024, 2048)
VLLM_WORKSPACE = 1 << 20


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

    def torch_topk(self) -> torch.Tensor:
        return torch.topk(self.scores, self.most, sorted=False).indices

    def torch_sorted(self) -> torch.Tensor:
        return self.torch_topk().sort().values

    def peers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Others' calls that this machine has, by name."""
        found: dict[str, Callable[[], torch.Tensor]] = {
            "torch.topk": self.torch_topk,
            "torch.topk, sorted": self.torch_sorted,
        }
        if find_spec("flashinfer") is not None:
            top_k = import_module("flashinfer").top_k
            found["flashinfer.top_k"] = lambda: top_k(self.scores, self.most)[1]
        if find_spec("vllm") is not None and self.most in VLLM_K:
            import_module("vllm._custom_ops")
            found["vllm persistent_topk"] = self._vllm()
        return found

    def _vllm(self) -> Callable[[], torch.Tensor]:
        rows, width = self.scores.shape
        device = self.scores.device
        chosen = torch.empty(rows, self.most, dtype=torch.int32, device=device)
        space = torch.zeros(VLLM_WORKSPACE, dtype=torch.uint8, device=device)

        def call() -> torch.Tensor:
            given = (self.scores, self.counts, chosen, space, self.most, width)
            torch.ops._C.persistent_topk(*given)
            return chosen

        return call

    def check(self, name: str, call: Callable[[], torch.Tensor]) -> None:
        """Whether a call finds the best, told by their scores: others break ties as they like."""
        wanted = torch.topk(self.scores, self.most).values
        got = self.scores.gather(1, call().long()).sort(descending=True).values
        expect(torch.equal(got, wanted), f"{name}: expected the {self.most} best of each row")


@dataclass(frozen=True)
class Layer:
    """One layer of a decode step: queries over tables of bounds."""

    requests: int
    tokens: int
    q: torch.Tensor
    entries: torch.Tensor
    offsets: torch.Tensor
    pages: ops.BoundedPages
    budgets: torch.Tensor

    @classmethod
    def of(cls, requests: int, tokens: int) -> Layer:
        generator = torch.Generator("cuda").manual_seed(tokens)
        each = tokens // PAGE
        blocks = requests * each
        random = {"generator": generator, "device": "cuda"}
        order = KV_HEADS * torch.randperm(blocks, **random)
        place = PAGE * (torch.arange(blocks, device="cuda") % each)
        nothing = torch.zeros_like(place)
        entries = torch.stack((order, nothing, nothing + PAGE, place, nothing), 1).int()
        keys = torch.randn(blocks * KV_HEADS, 3, DIM, **random)
        bounds = torch.stack((keys.amin(1), keys.amax(1), keys.mean(1)), 1)
        del keys
        table = ops.RopeTable(np.ones((1, DIM // 2), np.float32))
        return cls(
            requests,
            tokens,
            torch.randn(requests, HEADS, DIM, **random).bfloat16(),
            entries,
            each * torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
            ops.BoundedPages(bounds, PAGE, 0, KV_HEADS, DIM**-0.5, table),
            torch.full((requests * KV_HEADS,), PAGES, dtype=torch.int32, device="cuda"),
        )

    @property
    def bytes(self) -> float:
        """That have to be read: least and greatest key of each page and KV head."""
        return float(self.requests * (self.tokens // PAGE) * KV_HEADS * 2 * DIM * 4)

    def score(self) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.tokens // PAGE
        given = (self.q, self.entries, self.pages)
        return ops.score_pages(*given, entry_offsets=self.offsets, width=width)

    def choose(self) -> torch.Tensor:
        scores, counts = self.score()
        rows, listed = scores.flatten(0, 1), counts.flatten()
        named = {"sink": SINK, "recent": RECENT, "most": PAGES}
        return ops.select_pages(rows, listed, self.budgets, **named)[0]

    def check(self) -> None:
        """The first request's scores against torch."""
        scores, _ = self.score()
        first = self.entries[: self.tokens // PAGE, 0].long()
        heads = torch.arange(KV_HEADS, device="cuda")
        bounds = self.pages.bounds[first[None] + heads[:, None], :2]
        asked = self.q[0].float().view(KV_HEADS, -1, 1, 1, DIM)
        wanted = (asked * bounds[:, None]).amax(3).sum(-1).amax(1) * self.pages.scale
        worst = float((scores[0] - wanted).abs().max())
        expect(worst < 1e-3, f"score_pages: expected a difference below 1e-3, got {worst}")


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
    for requests, tokens in SCORED[:1] if quick else SCORED:
        rows += _scored(Layer.of(requests, tokens), clock, effort, ceilings)
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
    calls: dict[str, Callable[[], Any]] = {"ours": choice.ours}
    refused = {}
    for name, call in choice.peers().items():
        # A peer that cannot do a shape says so in its row.
        try:
            choice.check(name, call)
            calls[name] = call
        except Exception as error:
            refused[f"{name}: no"] = f"{type(error).__name__}: {error}"[:80]
    timed = clock.time({name: replayed(call) for name, call in calls.items()}, effort)
    warm = _warm(choice.ours, clock, effort)
    floor = rows * width * 4 / ceilings.read
    beside: dict[str, Any] = {
        "floor µs": floor * 1e6,
        "warm µs": warm * 1e6,
        **({} if wanted is None else {"asked for µs": wanted}),
        **{f"{name} µs": timed[name].median_s * 1e6 for name in calls if name != "ours"},
        **refused,
    }
    return [_row(f"select {rows} × {width}, {most}", timed["ours"], beside)]


def _scored(layer: Layer, clock: DeviceClock, effort: Effort, ceilings: Ceilings) -> list[Row]:
    layer.check()
    calls: dict[str, Callable[[], Any]] = {"score": layer.score, "score + select": layer.choose}
    timed = clock.time({name: replayed(call) for name, call in calls.items()}, effort)
    floor = layer.bytes / ceilings.read
    name = f"{layer.requests} × {layer.tokens} tokens"
    return [
        _row(
            f"{what}, {name}",
            timing,
            {"floor µs": floor * 1e6, "share of reading": floor / timing.median_s},
        )
        for what, timing in timed.items()
    ]


def _warm(call: Callable[[], Any], clock: DeviceClock, effort: Effort) -> float:
    """Seconds of one of many calls in a graph, one after the other."""

    def many() -> None:
        for _ in range(REPEATED):
            call()

    timed = clock.time({"many": replayed(many)}, effort)
    return timed["many"].median_s / REPEATED


def _row(name: str, timing: Timing, beside: dict[str, Any]) -> Row:
    return Row(name, timing.median_s * 1e6, "µs", timing.p95_s * 1e6, beside)

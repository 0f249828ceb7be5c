"""A whole decode step of a model whose heads all choose their pages, beside one that reads all.

A model of Llama-3.1-8B's shape with random weights decodes over an arena of random keys and values:
nobody computes the prompts, whose KV is as random as the weights. *all* reads everything. *64
pages* and *128 pages* are head maps of nothing but such heads, ranked every 16 steps: a step in
which nobody is ranked, one in which all are, and what a step takes on average. *all join* is the
step at whose start the bounds of all pages are computed. *Estimated* are pages that are not read,
by their means, in every step. *Over the host* has all pages but those that are read in the host's
memory: a step in which requests are ranked brings what they newly choose from there, *all join*
what they choose and the keys of all pages; *mirrored* copies pages there as they fill, *fp8* has
them there in half the bytes, and *late* are rankings that take effect late, so that no step waits
for what it chooses. *A quarter at every step* is the paper's cadence: one KV head in four is ranked
at every step, the others every 16. Where requests are *in turns*, they have joined
one after the other, so that some of them are ranked in every step.

Times are of whole steps as an engine takes them: tokens appended, tables sent, the captured graph,
the next tokens brought to the host. Contenders run one after the other in one process, over the
same arena, with the same requests.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.cases.page_choice import Layer, at_cadence
from benchmarks.device.models import random_model
from kvweave.cache import HeadClassMap, KvCache, KvRequest, KvShape
from kvweave.lab.bench.device_timing import FULL, QUICK, DeviceClock
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise
from kvweave.runner.decode import Decoder, Decoding, Sampling
from kvweave.runner.kv.beside_host import HostMemory
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.host_pool import HostPool, make_host_pools
from kvweave.runner.model.fused_norms import with_fused_norms
from kvweave.runner.model.joined_layers import with_joined_products
from kvweave.runner.model.model_spec import KV_DTYPES, ModelSpec, describe
from kvweave.runner.model.rope import Rotary

PAGE, EVERY = 16, 16
PAGES = (64, 128)
MODEL = "Llama-3.1-8B"
WARM_STEPS = 2 * EVERY + 4
"""Steps until both graphs of a batch are captured: each at its second time."""


@dataclass(frozen=True)
class Load:
    """So many requests of so many tokens, in so many layers of the model.

    `in_turns`: they join within the first EVERY steps, as evenly as their number allows.
    """

    requests: int
    tokens: int
    layers: int
    in_turns: bool = False

    def title(self) -> str:
        turns = ", in turns" if self.in_turns else ""
        return f"{self.requests} × {self.tokens}{turns}, {self.layers} layers"

    def pages(self, kv_heads: int, steps: int) -> int:
        """Pages of an arena that holds them, and `steps` more tokens of each.

        Of slabs that several head groups share a 32nd may be left over.
        """
        blocks = self.requests * (-(-(self.tokens + steps) // PAGE) + 1) + 1
        return (blocks + blocks // 32) * self.layers * kv_heads


def host_memory(size: int, copies: str | None) -> HostMemory:
    """What decoding over so many bytes of the host's is asked for; without `copies` there is none.

    Requests are spilled as soon as they can be: these steps are about what that costs.
    """
    if copies is None:
        return HostMemory()
    return HostMemory(
        size,
        copies="mirror" if copies == "mirror" else "spill",
        dtype="fp8" if copies == "fp8" else None,
        arrivals="late" if copies == "late" else "exact",
        free_share=1.0,
    )


def bounds_bytes(decoder: Decoder) -> int:
    """Bytes of the device that bounds take beside the arena, and other vectors of pages."""
    chosen = [slots.chosen for slots in decoder._slots if slots.chosen is not None]
    return sum(group.bounds.nbytes for of in chosen for group in of.groups)


LOADS = (
    Load(40, 10_240, 32),
    Load(40, 10_240, 32, in_turns=True),
    # 128K tokens of eight requests in all 32 layers are 137 GB.
    Load(8, 131_072, 16),
    Load(1, 131_072, 32),
)
CADENCE = (
    (Load(40, 10_240, 32), (64, 128)),
    (Load(8, 131_072, 16), (128,)),
)
"""Loads and the pages that heads read of them, 1024 and 2048 tokens (FlexiCache, Figure 7)."""

HALF = tuple(replace(load, requests=max(1, load.requests // 2)) for load in LOADS)
"""For a card of 80 GB."""


def run(quick: bool) -> list[Row]:
    """Rows of these loads."""
    return _run(quick, LOADS)


def run_half(quick: bool) -> list[Row]:
    """Rows of half as many requests."""
    return _run(quick, HALF)


def run_cadence(quick: bool) -> list[Row]:
    """Rows of the paper's cadence, of a layer and of whole steps: see `CADENCE`."""
    clock, effort = DeviceClock(torch.device("cuda")), QUICK if quick else FULL
    rows = []
    for load, budgets in CADENCE[:1] if quick else CADENCE:
        for budget in budgets:
            layer = Layer.of(load.requests, load.tokens, budget)
            rows += at_cadence(layer, EVERY, clock, effort)
            del layer
            torch.cuda.empty_cache()
    return rows + cadence_rows(random_model(MODEL), CADENCE[:1] if quick else CADENCE, 2)


@torch.inference_mode()
def cadence_rows(
    model: Any, loads: Sequence[tuple[Load, tuple[int, ...]]], periods: int
) -> list[Row]:
    """Whole steps of each load under its budgets at the paper's cadence, and dense ones."""
    whole = as_a_runner_has_it(describe(model))
    steps, rows = WARM_STEPS + (periods + 2) * EVERY, []
    arena = arena_of(whole, [load for load, _ in loads], steps)
    for load, budgets in loads:
        spec = replace(whole, layers=whole.layers[: load.layers])
        pages = arena[: load.pages(whole.kv_heads, steps)]
        dense = Stepped.of(spec, pages, load, None, steps).rows(periods, None)
        rows += dense
        for budget in budgets:
            some = Stepped.of(spec, pages, load, budget, steps, unstable_every=4)
            rows += some.rows(periods, dense[0].value)
            del some
    return rows


def _run(quick: bool, whole: Sequence[Load]) -> list[Row]:
    loads = (Load(8, 10_240, 4), Load(8, 10_240, 4, in_turns=True)) if quick else whole
    copies = ("spill", "fp8", "late") if quick else ("spill", "mirror", "fp8", "late")
    periods = 2 if quick else 8
    return rows_of(random_model(MODEL), loads, PAGES, periods, copies)


@torch.inference_mode()
def rows_of(
    model: Any,
    loads: Sequence[Load],
    budgets: Sequence[int],
    periods: int,
    copies: Sequence[str] = ("spill",),
) -> list[Row]:
    """Every load under every budget and none, `periods` times EVERY steps of each.

    `copies`: which pages are copied to the host, one way after the other; "fp8" spills them so,
    and with "late" rankings take effect late.
    """
    whole = as_a_runner_has_it(describe(model))
    steps = WARM_STEPS + (periods + 2) * EVERY
    arena = arena_of(whole, loads, steps)
    rows = []
    for load in loads:
        spec = replace(whole, layers=whole.layers[: load.layers])
        pages = arena[: load.pages(whole.kv_heads, steps)]
        dense = Stepped.of(spec, pages, load, None, steps).rows(periods, None)
        rows += dense
        for budget in budgets:
            rows += Stepped.of(spec, pages, load, budget, steps).rows(periods, dense[0].value)
        estimated = Stepped.of(spec, pages, load, budgets[0], steps, estimate=True)
        rows += estimated.rows(periods, dense[0].value)
        del estimated
        for how in copies:
            over = Stepped.of(spec, pages, load, budgets[0], steps, host_copies=how)
            rows += over.rows(periods, dense[0].value)
            over.release()
            del over
    return rows


def as_a_runner_has_it(spec: ModelSpec) -> ModelSpec:
    """The model as a `Runner` takes its layers apart on a GPU."""
    if spec.device.type != "cuda":
        return spec
    return with_joined_products(with_fused_norms(spec))


def choosing(
    spec: ModelSpec,
    pages: int,
    whole_every: int = 0,
    estimate: bool = False,
    unstable_every: int = 0,
    rerank_every: int = EVERY,
) -> HeadClassMap:
    """A map of heads that read so many pages, and estimate the others or not.

    Of every `whole_every` KV heads one is whole, another one from layer to layer; 0 is for none. Of
    every `unstable_every` one is ranked at every step instead.
    """
    kind = {"kind": "top_k", "pages": pages, "rerank_every": rerank_every, "estimate": estimate}
    chooses = {"class": kind, "reach": "global", "stability": "stable"}
    often = {"class": {**kind, "rerank_every": 1}, "reach": "global", "stability": "unstable"}
    whole = {"class": {"kind": "full"}, "reach": "global", "stability": "unstable"}
    every, other = (whole_every, whole) if whole_every else (unstable_every, often)

    def labels(layer: int, head: int) -> dict[str, Any]:
        if not every:
            return chooses
        return other if head % every == layer % min(every, spec.kv_heads) else chooses

    places = [(at, head) for at in range(len(spec.layers)) for head in range(spec.kv_heads)]
    made = {
        "schema_version": 1,
        "model_fingerprint": spec.fingerprint,
        "layers": len(spec.layers),
        "kv_heads": spec.kv_heads,
        "heads": [{"layer": at, "head": h, **labels(at, h)} for at, h in places],
    }
    return HeadClassMap.from_json(json.dumps(made))


def arena_of(spec: ModelSpec, loads: Sequence[Load], steps: int) -> torch.Tensor:
    """Random keys and values for the largest of some loads, and so many tokens more of each."""
    most = max(load.pages(spec.kv_heads, steps) for load in loads)
    sizes = (most, 2, PAGE, spec.head_dim)
    return torch.empty(sizes, dtype=spec.dtype, device=spec.device).normal_()


@dataclass
class Stepped:
    """A batch that decodes under one budget, None for everything, over the host's memory or not.

    `estimate`: what is not read is estimated. `unstable_every`: of so many heads one is ranked at
    every step.
    """

    load: Load
    budget: int | None
    decoder: Decoder
    requests: list[KvRequest]
    batch: list[Decoding]
    estimate: bool = False
    unstable_every: int = 0

    @staticmethod
    def of(
        spec: ModelSpec,
        pages: torch.Tensor,
        load: Load,
        budget: int | None,
        steps: int,
        host_copies: str | None = None,
        drafts: int = 0,
        estimate: bool = False,
        unstable_every: int = 0,
    ) -> Stepped:
        """The requests of a load; with `drafts` a decoder that drafts by the budget."""
        # What the contender before has left is in the way of what this one makes.
        gc.collect()
        if spec.device.type == "cuda":
            torch.cuda.empty_cache()
        heads = None
        if budget is not None:
            heads = choosing(spec, budget, 0, estimate, unstable_every)
        shape = KvShape(len(spec.layers), spec.kv_heads, spec.head_dim, PAGE, KV_DTYPES[spec.dtype])
        cache = KvCache(shape, external=pages, heads=heads, fingerprint=spec.fingerprint)
        rotary = Rotary(spec)
        host = make_host_pools(cache, pages, host_memory(pages.nbytes, host_copies))
        reads = HeadReads(spec, cache, host=host, verified=drafts > 0)
        decoder = Decoder(reads, rotary, pages, drafts)
        positions, tokens = rotary.table(load.tokens + steps), np.zeros(load.tokens, np.int32)
        requests = [cache.admit(tokens, reuse="none") for _ in range(load.requests)]
        known = positions, Sampling(), steps, spec.device
        batch = [
            Decoding(
                request,
                *known,
                tokens=[1],
                host={group: HostPages(pool, request) for group, pool in host.items()},
            )
            for request in requests
        ]
        return Stepped(load, budget, decoder, requests, batch, estimate, unstable_every)

    def step(self, batch: list[Decoding]) -> float:
        """Seconds of one step of a batch, whose tokens are then on the host."""
        start = time.perf_counter()
        said = self.decoder.step(batch)
        taken = time.perf_counter() - start
        expect(len(said) == len(batch), f"expected {len(batch)} tokens, got {len(said)}")
        return taken

    def rows(self, periods: int, dense_ms: float | None) -> list[Row]:
        """What steps of the batch take, beside a dense one."""
        self.warm()
        times = np.asarray([self.step(self.batch) for _ in range(periods * EVERY)])
        self.check()
        what = "all" if self.budget is None else f"{self.budget} pages"
        what += ", estimated" if self.estimate else ""
        what += ", a quarter at every step" if self.unstable_every == 4 else ""
        if self.host_pools:
            pool = self.host_pools[0]
            what += ", over the host" + (", mirrored" if pool.mirrors else "")
            what += "" if pool.scales is None else ", fp8"
            what += "" if pool.late is None else ", late"
        name = f"{self.load.title()}: {what}"
        if self.budget is None:
            timing = summarise(times.tolist())
            return [Row(name, timing.median_s * 1e3, "ms", timing.p95_s * 1e3, {})]
        # A period is as long as any other, and begins with whoever joined first.
        by_phase = np.median(times.reshape(periods, EVERY), axis=0)
        mean = float(by_phase.mean()) * 1e3
        beside: dict[str, Any] = {} if dense_ms is None else {"all ÷ this": dense_ms / mean}
        if not self.load.in_turns:
            beside["nobody ranked ms"] = float(np.sort(by_phase)[: EVERY - 1].mean()) * 1e3
            beside["all ranked ms"] = float(by_phase.max()) * 1e3
            beside["all join ms"] = self.join() * 1e3
        beside["bounds GB"] = bounds_bytes(self.decoder) / 1e9
        beside["KV GB"] = sum(request.kv_bytes()[0] for request in self.requests) / 1e9
        return [Row(name, mean, "ms", float(np.percentile(times, 95)) * 1e3, beside)]

    def warm(self) -> None:
        """Steps until all have joined and what they launch is captured."""
        if self.load.in_turns:
            for turn in range(1, EVERY):
                self.step(self.batch[: max(1, turn * len(self.batch) // EVERY)])
        else:
            self.step(self.batch)
        if self.host_pools and self.host_pools[0].arena.is_cuda:
            # Pages that are being copied to the host leave at the next rankings.
            torch.cuda.synchronize()
        for _ in range(WARM_STEPS):
            self.step(self.batch)

    @property
    def host_pools(self) -> list[HostPool]:
        return list(self.decoder.heads.host.values())

    def release(self) -> None:
        """Gives the host's memory back to whoever comes next."""
        self.decoder.forget()
        for sequence in self.batch:
            for pages in sequence.host.values():
                pages.release()

    def join(self) -> float:
        """Seconds of a step whose requests all come anew; graphs that know it are there."""
        self.decoder.forget()
        return self.step(self.batch)

    def check(self) -> None:
        """Whether steps were captured on a GPU, and each of the requests said a token in each."""
        graphs = self.decoder.graphs
        if graphs is not None:
            known = [size for size in graphs._sizes.values() if size.rows >= len(self.batch)]
            expect(graphs.capturable, "expected steps that are captured, got a model that waits")
            expect(any(s.graph is not None for s in known), "expected a graph, got none")
        lengths = {
            request.length - len(s.tokens)
            for request, s in zip(self.requests, self.batch, strict=True)
        }
        expected = {self.load.tokens - 1}
        expect(lengths == expected, f"expected a token a step, got lengths {lengths}")
        self.decoder.heads.cache.check()
        for pool in self.host_pools:
            expect(pool.pinned or not pool.arena.is_cuda, "expected pinned memory, got pageable")
            most = max(sequence.host[pool.budget.group].count for sequence in self.batch)
            expect(most > 0, "expected pages in host memory, got none")

"""A whole decode step over INT4 pages beside one over exact pages.

A model of Llama-3.1-8B's shape with random weights, some of its layers; prompts of random tokens
are prefilled by a `Runner(kv_dtype="int4")` and by one without, one after the other in one process.
Times are of whole steps as an engine takes them: pages packed as they fill, tokens appended, tables
sent, the captured graph, the next tokens brought to the host. A page of a request is full at every
64th step; requests have prompts of unlike lengths, so that pages fill at different steps.

Before them a prompt of 64K tokens alone, see `packed_prefill`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.cases.packed_prefill import of_each_format
from benchmarks.device.models import random_model
from kvweave import Runner, Sampling
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise
from kvweave.runner.decode import Decoding
from kvweave.runner.prefill.prefilled import Prefill

PAGE = 64
WARM_STEPS = 4


@dataclass(frozen=True)
class Load:
    """So many requests of about so many tokens, in so many layers of a model."""

    model: str
    layers: int
    requests: int
    tokens: int

    @property
    def title(self) -> str:
        return f"{self.model}, {self.layers} layers, {self.requests} × {self.tokens}"

    def lengths(self) -> list[int]:
        """Tokens of each prompt: about a page's worth apart in all."""
        return [self.tokens - at * PAGE // self.requests for at in range(self.requests)]


ON_GPU = (
    Load("Llama-3.1-8B", 8, 16, 32_768),
    Load("Llama-3.1-8B", 8, 40, 10_240),
    Load("Llama-3.1-8B", 8, 1, 131_072),
)
QUICK = (Load("Llama-3.1-8B", 2, 4, 4096),)
ON_CPU = (Load("small Llama", 2, 2, 512),)


def run(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    loads = (QUICK if quick else ON_GPU) if on_gpu else ON_CPU
    device = "cuda" if on_gpu else "cpu"
    rows = of_each_format(quick)
    for load in loads:
        model = random_model(load.model, device, layers=load.layers)
        exact = stepped(model, load, None, 2 * PAGE)
        packed = stepped(model, load, "int4", 2 * PAGE)
        for row in (exact, packed):
            row.of["exact ÷ this"] = exact.value / row.value
        rows += [exact, packed]
    return rows


@torch.inference_mode()
def stepped(model: torch.nn.Module, load: Load, kv_dtype: str | None, steps: int) -> Row:
    """What so many steps of a load take, over pages of one kind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    limit = steps + WARM_STEPS + 1
    room = load.requests * (load.tokens + limit + 2 * PAGE)
    runner = Runner(model, max_tokens=room, kv_dtype=kv_dtype, check=False, progress=False)
    random = np.random.default_rng(load.tokens)
    batch, held = [], []
    for length in load.lengths():
        tokens = random.integers(0, runner.spec.vocabulary, length).tolist()
        done = runner.prefill(tokens, "prefix", reserve_tokens=limit, remember=False)
        known = done.positions, Sampling(), limit, runner.spec.device
        batch.append(Decoding(done.request, *known, tokens=[1], packed=done.kv.packed))
        held.append(done)
    times = timed(runner, batch, steps)
    expect(
        runner._decoder.graphs is None or is_captured(runner),
        "expected steps that are captured, got none",
    )
    timing = summarise(times)
    gigabytes = sum(map(bytes_of, held)) / 1e9
    for done in held:
        done.release()
    runner._decoder.forget()
    runner.close()
    what = "exact" if kv_dtype is None else kv_dtype
    beside = {"KV GB": gigabytes, "worst ms": max(times) * 1e3}
    return Row(f"{load.title}: {what}", timing.median_s * 1e3, "ms", timing.p95_s * 1e3, beside)


def timed(
    runner: Runner, batch: Sequence[Decoding], steps: int, warm: int = WARM_STEPS
) -> list[float]:
    """Seconds of so many steps of a batch, behind some in which what they launch is captured."""
    times = []
    for _ in range(warm + steps):
        start = time.perf_counter()
        said = runner._decoder.step(batch)
        times.append(time.perf_counter() - start)
        for sequence, token in zip(batch, said.tolist(), strict=True):
            sequence.tokens.append(token)
    return times[warm:]


def is_captured(runner: Runner) -> bool:
    """Whether steps that a runner has taken were replayed from a graph."""
    graphs = runner._decoder.graphs
    if graphs is None or not graphs.capturable:
        return False
    return any(size.graph is not None for size in graphs._sizes.values())


def bytes_of(done: Prefill) -> int:
    """Bytes of all blocks that a request holds, exact and packed."""
    packed = done.kv.packed
    return sum(done.request.kv_bytes()) + (0 if packed is None else sum(packed.kv_bytes()))

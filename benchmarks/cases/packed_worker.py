"""Decode steps while the host packs a document finally, beside the same steps while it does not.

A model of Llama-3.1-8B's shape with random weights, some of its layers. Requests decode in an
engine; a document is encoded between two of its steps, and a thread of the host sums up its
moments, chooses its bases and packs it anew (MosaicKV, section 5.4) while they go on. Steps are
those of `Engine.step`, by the host's clock: tokens appended, tables sent, the captured graph, the
next tokens brought to the host. What is quiet is measured before the document came and behind its
switch, half each.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.device.models import random_model
from kvweave import Runner
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise
from kvweave.runner import Engine

KV_DTYPE = "half-int4"
WARM_STEPS = 4


@dataclass(frozen=True)
class Load:
    """`requests` of so many `tokens` that decode, and a document, in some layers of a model.

    Of each kind so many `steps` are timed.
    """

    model: str
    layers: int
    requests: int
    tokens: int
    document: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.model}, {self.layers} layers, {self.requests} × {self.tokens}"


# A document of that shape has a basis of its own from 10 561 tokens on.
ON_GPU = Load("Llama-3.1-8B", 8, 16, 8192, 12_288, 200)
QUICK = Load("tiny Llama", 2, 2, 256, 2560, 4)


def run(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    load = ON_GPU if on_gpu and not quick else QUICK
    model = random_model(load.model, "cuda" if on_gpu else "cpu", layers=load.layers)
    return stepped(model, load)


def stepped(model: Any, load: Load) -> list[Row]:
    """What steps of a load take in quiet and beside the thread."""
    random = np.random.default_rng(load.tokens)
    words = model.config.vocab_size
    answer = 4 * load.steps
    # Exact pages, a sixteenth of it, have a chunk of the document beside all windows.
    room = 8 * (load.requests * (load.tokens + answer + 256) + 2 * load.document)
    runner = Runner(model, max_tokens=room, kv_dtype=KV_DTYPE, check=False, progress=False)
    with closing(runner), closing(runner.engine()) as engine:
        prompts = random.integers(0, words, (load.requests, load.tokens))
        asked = [engine.submit(one.tolist(), max_new_tokens=answer, stop=()) for one in prompts]
        while not all(request.tokens for request in asked):
            engine.step()
        steps_of(engine, WARM_STEPS)
        before = steps_of(engine, load.steps // 2)
        report = runner.encode(random.integers(0, words, load.document).tolist(), "document")
        packing = report.packing
        assert packing is not None
        beside = steps_of(engine, load.steps)
        expect(packing.waiting, f"expected steps beside the thread, got {packing}")
        runner.flush()
        expect(packing.basis == "own", f"expected a document packed finally, got {packing}")
        quiet = before + steps_of(engine, load.steps // 2)
        expect(not any(request.ended for request in asked), "expected requests that decode on")
    rows = []
    for what, times in (("in quiet", quiet), ("a document is packed finally", beside)):
        timing = summarise(times)
        of = {"worst ms": 1e3 * max(times)}
        name = f"{load.title}, {KV_DTYPE}: {what}"
        rows.append(Row(name, 1e3 * timing.median_s, "ms", 1e3 * timing.p95_s, of))
    rows[1].of["÷ quiet"] = rows[1].value / rows[0].value
    return rows


def steps_of(engine: Engine, count: int) -> list[float]:
    """Seconds of so many steps, each of which says a token of every request."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times

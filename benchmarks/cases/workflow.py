"""Agents in a ring, each with a text of its own that all its prompts begin with.

KVFlow's setting (its section 2): by the time it is an agent's turn again, the others have computed
theirs, and of a cache with room for some of the texts the least recently used order has given up
the very one that is next. The same steps over runners with room for a share of the texts: the
default order, the order by cost without a word, the same told by a `Workflow`; and over one with
room for all of them. Of each, a step's median time (prompt and answer) behind the first round, and
the share of the texts' tokens that steps found.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.device.models import random_model
from kvweave import Runner, Workflow
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise
from kvweave.models import load_smollm2


@dataclass(frozen=True)
class Ring:
    """So many agents with texts of so many tokens, tasks and answers behind them."""

    agents: int
    text: int
    task: int
    answer: int
    rounds: int

    def names(self) -> list[str]:
        return [f"agent {number}" for number in range(self.agents)]

    def room(self, texts: float) -> int:
        """Tokens that so many texts take, beside one request."""
        return int(texts * self.text) + self.text + self.task + self.answer


ON_GPU = Ring(10, 8192, 256, 32, 6)
ON_CPU = Ring(10, 1024, 64, 8, 4)
QUICK = Ring(4, 128, 16, 2, 3)
SHARES = (0.5, 0.8)


def run(quick: bool) -> list[Row]:
    if torch.cuda.is_available():
        name, ring = "Llama-3.1-8B", QUICK if quick else ON_GPU
        model: Any = random_model(name)
    else:
        name, ring = "SmolLM2-135M", QUICK if quick else ON_CPU
        model = load_smollm2()[0]
    label = f"{name}, {ring.agents} agents of {ring.text} tokens"
    rows = []
    for share in SHARES:
        room = f"room for {share * ring.agents:.3g}"
        plain = stepped(model, ring, share, "lru")
        rows.append(row(f"{label}, {room}: least recently used", *plain, plain[0]))
        for title, told in (("by cost", False), ("told by a workflow", True)):
            found = stepped(model, ring, share, "cost-aware", told)
            rows.append(row(f"{label}, {room}: {title}", *found, plain[0]))
    whole = stepped(model, ring, 1.2, "lru")
    expect(whole[1] == 1.0, f"expected all texts found where all have room, got {whole[1]}")
    rows.append(row(f"{label}, room for all", *whole, plain[0]))
    return rows


def row(name: str, times: list[float], share: float, plain: list[float]) -> Row:
    taken = summarise(times)
    ratio = summarise(plain).median_s / taken.median_s
    mean = sum(plain) / sum(times)
    beside = {"found": share, "LRU ÷ this": ratio, "LRU ÷ this, all steps": mean}
    return Row(name, taken.median_s, "s", taken.p95_s, beside)


def stepped(
    model: Any, ring: Ring, share: float, eviction: str, told: bool = False
) -> tuple[list[float], float]:
    """Seconds of each step behind the first round, and the share of the texts that they found."""
    room = ring.room(share * ring.agents)
    runner = Runner(model, max_tokens=room, eviction=eviction, check=False, progress=False)
    random = np.random.default_rng(0)
    vocabulary = runner.spec.vocabulary
    texts = {name: random.integers(0, vocabulary, ring.text).tolist() for name in ring.names()}
    then = dict(zip(ring.names(), ([*ring.names()[1:], ring.names()[0]]), strict=True))
    flow = Workflow(runner, texts, {one: [next_] for one, next_ in then.items()}) if told else None
    times, found = [], []
    for agent in ring.names() * ring.rounds:
        prompt = [*texts[agent], *random.integers(0, vocabulary, ring.task).tolist()]
        with nullcontext() if flow is None else flow.step(agent):
            start = time.perf_counter()
            said = runner.generate(prompt, max_new_tokens=ring.answer, stop=())
            times.append(time.perf_counter() - start)
        found.append(min(said.report.reused_prefix, ring.text) / ring.text)
    runner.close()
    return times[ring.agents :], float(np.mean(found[ring.agents :]))

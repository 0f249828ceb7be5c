"""An engine under load: tokens a second, the first token, and the time between two of them.

Random weights at the shape of a known model, prompts of random tokens that share nothing, answers
of a fixed length. *at once*: all requests are there at the start. *Poisson*: they come at a mean
rate, as fast as the engine above got through its own, less a fifth. *beside*: some requests decode,
then a long prompt comes; their time between tokens is that of before and of while it is prefilled.

On the CPU, where arithmetic does not depend on the batch, a request of the load has to say what it
says alone; everywhere each has to say all of its tokens, and all blocks have to come back.

`python -m benchmarks.cases.engine_load --json FILE [--task '{"requests": 40}']` writes a run for
`python -m benchmarks.report.record FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvweave
from benchmarks.device.models import random_model
from benchmarks.heard import Heard, figures, gaps, spread
from benchmarks.report.record import of_device
from kvweave.lab.bench.rows import Row, expect
from kvweave.runner import Engine, EngineRequest

CASE = "engine_load"
ARENA_SHARE = 0.9
"""Of a device's memory, what weights and arena take together."""
WORKING = 4 * 2**30
"""Bytes of it that a step needs besides."""


@dataclass(frozen=True)
class Task:
    """What is asked of an engine.

    `requests` of between `span` tokens each say `answer` tokens; a step computes `chunk` tokens of
    a prompt at most, and as many in all. Beside a prompt of `long` tokens, `talkers` decode, and a
    step computes `long_chunk` tokens of it. `rate` in requests a second (0: from the first load).
    `max_tokens` sizes the arena where the model lies on the CPU.
    """

    model: str = "Llama-3.1-8B"
    requests: int = 100
    span: tuple[int, int] = (10_000, 30_000)
    answer: int = 500
    chunk: int = 16_384
    rate: float = 0.0
    talkers: int = 16
    long: int = 100_000
    long_chunk: int = 2048
    running: int = 256
    max_tokens: int = 0
    seed: int = 0


ON_CPU = Task("small Llama", 16, (200, 600), 32, 256, 0.0, 4, 2000, 256, 16, 16_384)
QUICK = Task("tiny Llama", 4, (24, 60), 6, 64, 0.0, 2, 200, 64, 16, 16_384)


@dataclass
class Asked(Heard):
    """One request of an engine, and what was heard of it."""

    request: EngineRequest = field(kw_only=True)

    def listen(self, now: float) -> None:
        """Takes note of what has been said since."""
        self.at.extend(now for _ in self.request.take())


class Load:
    """One runner, and what is heard of the requests of its engines."""

    def __init__(self, task: Task) -> None:
        self.task = task
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = random_model(task.model, device, dtype)
        self.runner = kvweave.Runner(model, progress=False, **self._room())
        self.vocabulary = model.config.vocab_size
        draws = np.random.default_rng(task.seed)
        self.lengths = draws.integers(*task.span, task.requests).tolist()
        self.draws = draws

    def _room(self) -> dict[str, Any]:
        if self.task.max_tokens:
            return {"max_tokens": self.task.max_tokens}
        free, total = torch.cuda.mem_get_info()
        return {"arena_bytes": int(free - (1 - ARENA_SHARE) * total - WORKING)}

    def engine(self, chunk: int) -> Engine:
        """An engine whose steps compute so many tokens of prompts."""
        running = self.task.running
        pages = self.runner.cache.shape.page_tokens
        budget = max(chunk, running + 4 * pages)
        return self.runner.engine(token_budget=budget, chunk_tokens=chunk, max_running=running)

    def submit(self, engine: Engine, tokens: int, answer: int) -> Asked:
        """A request of its own random tokens."""
        prompt = self.draws.integers(0, self.vocabulary, tokens).astype(np.int32)
        came = time.perf_counter()
        request = engine.submit(prompt, "full", max_new_tokens=answer, stop=(), remember=False)
        return Asked(tokens, came, request=request)

    def check(self, heard: Sequence[Asked], answers: Sequence[int]) -> None:
        """Everybody has said everything, and nobody holds anything."""
        said = [len(one.request.result().tokens) for one in heard]
        expect(said == list(answers), f"expected {answers} tokens, got {said}")
        expect(said == [len(one.at) for one in heard], "expected to hear each token once")
        self.runner.cache.check()
        held = self.runner.cache.stats()["held"]
        expect(held == 0, f"expected all blocks back, got {held} held")

    def check_alone(self) -> None:
        """A request says the same among others as alone, where arithmetic allows."""
        if self.runner.spec.device.type != "cpu":
            return
        prompts = [self.draws.integers(0, self.vocabulary, n).tolist() for n in self.lengths[:3]]
        how = {"max_new_tokens": self.task.answer, "stop": (), "remember": False}
        with closing(self.engine(self.task.chunk)) as engine:
            asked = [engine.submit(prompt, "full", **how) for prompt in prompts]
            engine.run()
        alone = self.runner.generate(prompts[0], "full", **how)
        expect(asked[0].result().tokens == alone.tokens, "expected what it says alone")

    # ---- loads ------------------------------------------------------------------------------

    def come(self, gaps: Sequence[float]) -> tuple[list[Asked], dict[str, int]]:
        """Requests that come one by one, so many seconds after one another."""
        heard: list[Asked] = []
        with closing(self.engine(self.task.chunk)) as engine:
            due = time.perf_counter() + np.cumsum(gaps)
            while len(heard) < len(due) or engine.live:
                while len(heard) < len(due) and due[len(heard)] <= time.perf_counter():
                    length = self.lengths[len(heard)]
                    heard.append(self.submit(engine, length, self.task.answer))
                if not engine.live:
                    time.sleep(max(0.0, due[len(heard)] - time.perf_counter()))
                    continue
                engine.step()
                now = time.perf_counter()
                for one in heard:
                    if len(one.at) < self.task.answer:
                        one.listen(now)
            counted = engine.metrics()
        self.check(heard, [self.task.answer] * len(heard))
        return heard, {name: counted[name] for name in ("preempted", "steps")}

    def beside(self) -> tuple[list[float], list[float], float]:
        """Gaps between tokens without and beside a long prompt, and that one's first token."""
        task, low = self.task, self.task.span[0]
        # More than they come to say before the long prompt is done.
        endless = 2000 + 4 * (task.long // task.long_chunk)
        with closing(self.engine(task.long_chunk)) as engine:
            talkers = [self.submit(engine, low, endless) for _ in range(task.talkers)]
            while not all(one.request.tokens for one in talkers):
                engine.step()
            quiet = self._gaps(engine, talkers, steps=100)
            long = self.submit(engine, task.long, 1)
            loud = self._gaps(engine, talkers, until=long)
        self.check([long], [1])
        return quiet, loud, long.at[0] - long.came

    def _gaps(
        self, engine: Engine, talkers: Sequence[Asked], until: Asked | None = None, steps: int = 0
    ) -> list[float]:
        for one in talkers:
            one.request.take()
            one.at = [time.perf_counter()]
        while steps > 0 or (until is not None and not until.request.ended):
            engine.step()
            now = time.perf_counter()
            for one in (*talkers, *([] if until is None else [until])):
                one.listen(now)
            steps -= 1
        return gaps(talkers)


def rows_of(task: Task) -> list[Row]:
    """All loads of a task, one after the other."""
    load = Load(task)
    load.check_alone()
    # The first steps of every size are captured, or tuned, here.
    warm = replace(task, requests=min(4, task.requests), answer=min(8, task.answer))
    load.task = warm
    load.come([0.0] * warm.requests)
    load.task = task
    shape = f"{task.model}, {task.requests} of {task.span[0]} to {task.span[1]}, {task.answer} out"
    heard, counted = load.come([0.0] * task.requests)
    rows = list(figures(f"{shape}, at once", heard, counted))
    rate = task.rate or 0.8 * rows[0].of["requests/s"]
    # The same arrivals for whoever is measured at this rate.
    apart = np.random.default_rng(task.seed + 1).exponential(1 / rate, task.requests).tolist()
    heard, counted = load.come(apart)
    rows += figures(f"{shape}, Poisson at {rate:.3g}/s", heard, counted)
    quiet, loud, first = load.beside()
    many = f"{task.model}, {task.talkers} of {task.span[0]} decode"
    rows.append(spread(f"{many}: between tokens", quiet, "ms", 1e3))
    beside = f"{many} beside a prompt of {task.long} in chunks of {task.long_chunk}"
    rows.append(spread(f"{beside}: between tokens", loud, "ms", 1e3))
    rows.append(Row(f"{beside}: its first token", first, "s", None, {}))
    return rows


def run(quick: bool) -> list[Row]:
    if torch.cuda.is_available():
        return rows_of(replace(QUICK, max_tokens=16_384) if quick else Task())
    return rows_of(QUICK if quick else ON_CPU)


def main(words: list[str] | None = None) -> int:
    """Runs one task on the machine it is called on, and writes it down."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.cases.{CASE}", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the run")
    parser.add_argument("--task", type=json.loads, default={}, help="fields of Task, as JSON")
    chosen = parser.parse_args(words)
    known = {one.name for one in fields(Task)}
    if unknown := set(chosen.task) - known:
        parser.error(f"--task: expected some of {', '.join(sorted(known))}, got {unknown}")
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.task.items()}
    rows = rows_of(replace(Task() if torch.cuda.is_available() else ON_CPU, **given))
    for row in rows:
        print(f"{row.name}: {row.value:.4g} {row.unit}, p95 {row.p95}, {row.of}")
    if chosen.json:
        chosen.json.write_text(json.dumps(of_device(CASE, rows), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvweave
from benchmarks.device.models import random_model
from benchmarks.heard import Heard, figures
from benchmarks.load import (
    AT_ONCE,
    POISSON,
    Callers,
    answers_of,
    arrivals,
    beside,
    come,
    lengths_of,
    longest_answer,
    shape_of,
)
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

    `requests` of between `span` tokens each say `answer` tokens, or between two numbers of them; a
    step computes `chunk` tokens of a prompt at most, and as many in all. Beside a prompt of `long`
    tokens, `talkers` decode, and a step computes `long_chunk` tokens of it. `rate` in requests a
    second (0: from the first load). The arena is of `arena_bytes`, or of `max_tokens` where the
    model lies on the CPU; of what a GPU has where both are 0. `layers` of the model, 0 for all.
    For `host_load`: `copies`, which pages are copied to the host, one way after the other, with
    `host_bytes` of its memory (0: six times the arena); `whole`, whether there is one that reads
    all; `ways`, how requests come. For `packed_load`: `packed`, the formats of packed pages.
    """

    model: str = "Llama-3.1-8B"
    requests: int = 100
    span: tuple[int, int] = (10_000, 30_000)
    answer: int | tuple[int, int] = 500
    chunk: int = 16_384
    rate: float = 0.0
    talkers: int = 16
    long: int = 100_000
    long_chunk: int = 2048
    running: int = 256
    max_tokens: int = 0
    arena_bytes: int = 0
    layers: int = 0
    seed: int = 0
    copies: tuple[str, ...] = ("spill",)
    host_bytes: int = 0
    whole: bool = True
    ways: tuple[str, ...] = (AT_ONCE, POISSON)
    packed: tuple[str, ...] = ("int4",)


ON_CPU = Task("small Llama", 16, (200, 600), 32, 256, 0.0, 4, 2000, 256, 16, 16_384)
QUICK = Task("tiny Llama", 4, (24, 60), 6, 64, 0.0, 2, 200, 64, 16, 16_384)


def model_of(task: Task) -> Any:
    """The model of a task, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return random_model(task.model, device, dtype, layers=task.layers)


class Load:
    """One runner of a model, and what is heard of the requests of its engines.

    `how`: what the runner is asked for besides.
    """

    def __init__(self, task: Task, model: Any, **how: Any) -> None:
        self.task = task
        self.runner = kvweave.Runner(model, progress=False, **self._room(), **how)
        self.vocabulary = model.config.vocab_size
        self.draws = np.random.default_rng(task.seed)
        self.lengths = lengths_of(task, task.seed)

    def _room(self) -> dict[str, Any]:
        if self.task.arena_bytes:
            return {"arena_bytes": self.task.arena_bytes}
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

    def callers(
        self,
        engine: Engine,
        asked: dict[str, EngineRequest],
        look: Callable[[Engine], None] | None = None,
    ) -> Callers:
        """Callers of an engine, whose requests go into `asked`, each of its own random tokens.

        `look` is called behind each step.
        """
        speaking: dict[str, EngineRequest] = {}

        def add(tokens: int, answer: int) -> str:
            prompt = self.draws.integers(0, self.vocabulary, tokens).astype(np.int32)
            how: dict[str, Any] = {"max_new_tokens": answer, "stop": (), "remember": False}
            name = str(len(asked))
            asked[name] = speaking[name] = engine.submit(prompt, "full", **how)
            return name

        def step() -> Iterator[tuple[str, int]]:
            engine.step()
            if look is not None:
                look(engine)
            for name, request in list(speaking.items()):
                yield name, len(request.take())
                if request.ended:
                    del speaking[name]

        return Callers(add, step, lambda: engine.live > 0)

    def check(
        self, asked: Sequence[EngineRequest], heard: Sequence[int], answers: Sequence[int]
    ) -> None:
        """Everybody has said everything, and nobody holds anything."""
        said = [len(request.result().tokens) for request in asked]
        expect(said == list(answers), f"expected {answers} tokens, got {said}")
        expect(said == list(heard), f"expected to hear each token once, got {heard}")
        self.runner.cache.check()
        held = self.runner.cache.stats()["held"]
        expect(held == 0, f"expected all blocks back, got {held} held")

    def check_alone(self) -> None:
        """A request says the same among others as alone, where arithmetic allows."""
        if self.runner.spec.device.type != "cpu":
            return
        prompts = [self.draws.integers(0, self.vocabulary, n).tolist() for n in self.lengths[:3]]
        how: dict[str, Any] = {"stop": (), "remember": False}
        how["max_new_tokens"] = longest_answer(self.task)
        with closing(self.engine(self.task.chunk)) as engine:
            asked = [engine.submit(prompt, "full", **how) for prompt in prompts]
            engine.run()
        alone = self.runner.generate(prompts[0], "full", **how)
        expect(asked[0].result().tokens == alone.tokens, "expected what it says alone")

    # ---- loads ------------------------------------------------------------------------------

    def come(
        self, apart: Sequence[float], look: Callable[[Engine], None] | None = None
    ) -> tuple[list[Heard], dict[str, int]]:
        """Requests that come one by one, so many seconds after one another; `look` as `callers`."""
        asked: dict[str, EngineRequest] = {}
        answers = answers_of(self.task, self.task.seed)
        with closing(self.engine(self.task.chunk)) as engine:
            callers = self.callers(engine, asked, look)
            heard = come(callers, self.lengths, answers, apart)
            counted = engine.metrics()
        self.check(list(asked.values()), [len(one.at) for one in heard], answers)
        return heard, {name: counted[name] for name in ("preempted", "steps")}

    def beside(self) -> list[Row]:
        """The time between tokens without and beside a long prompt, and that one's first token."""
        asked: dict[str, EngineRequest] = {}
        with closing(self.engine(self.task.long_chunk)) as engine:
            task = replace(self.task, chunk=self.task.long_chunk)
            rows = list(beside(self.callers(engine, asked), task))
        self.check(list(asked.values())[-1:], [1], [1])
        return rows

    def warm(self) -> None:
        """A few short answers: the first steps of a size are captured, or tuned, by them."""
        task = self.task
        few = replace(task, requests=min(4, task.requests), answer=min(8, longest_answer(task)))
        self.task = few
        self.come([0.0] * few.requests)
        self.task = task


def rows_of(task: Task) -> list[Row]:
    """All loads of a task, one after the other."""
    load = Load(task, model_of(task))
    load.check_alone()
    load.warm()
    heard, counted = load.come([0.0] * task.requests)
    rows = list(figures(f"{shape_of(task)}, at once", heard, counted))
    rate, apart = arrivals(task, rows[0], task.seed)
    heard, counted = load.come(apart)
    rows += figures(f"{shape_of(task)}, Poisson at {rate:.3g}/s", heard, counted)
    return rows + load.beside()


def run(quick: bool) -> list[Row]:
    if torch.cuda.is_available():
        return rows_of(replace(QUICK, max_tokens=16_384) if quick else Task())
    return rows_of(QUICK if quick else ON_CPU)


def main(words: list[str] | None = None) -> int:
    """Runs one task on the machine it is called on, and writes it down."""
    task = Task() if torch.cuda.is_available() else ON_CPU
    return carry_out((CASE, __doc__), rows_of, task, words)


def carry_out(
    named: tuple[str, str | None],
    rows_of: Callable[[Task], list[Row]],
    task: Task,
    words: list[str] | None,
) -> int:
    """A task, some of its fields as the command line says; prints its rows and keeps them.

    `named`: the case, and what its help says.
    """
    case, about = named
    parser = argparse.ArgumentParser(prog=f"benchmarks.cases.{case}", description=about)
    parser.add_argument("--json", type=Path, help="file for the run")
    parser.add_argument("--task", type=json.loads, default={}, help="fields of Task, as JSON")
    chosen = parser.parse_args(words)
    known = {one.name for one in fields(Task)}
    if unknown := set(chosen.task) - known:
        parser.error(f"--task: expected some of {', '.join(sorted(known))}, got {unknown}")
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.task.items()}
    rows = rows_of(replace(task, **given))
    for row in rows:
        print(f"{row.name}: {row.value:.4g} {row.unit}, p95 {row.p95}, {row.of}")
    if chosen.json:
        chosen.json.write_text(json.dumps(of_device(case, rows), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

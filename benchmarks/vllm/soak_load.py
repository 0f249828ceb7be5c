"""A mixed load on one engine in this process: what all soaks do, whatever their engine has."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.soak.asked import WEIGHTS, Asked, Author
from benchmarks.soak.log_watch import LogWatch
from benchmarks.soak.memory import MIB, Memory
from benchmarks.vllm.device import has_gpu
from benchmarks.vllm.soak_engine import REQUESTS, Steps, said, sampling

ABORT, RESET = 0.03, 0.01
"""Chances, in a step: a request is aborted, prefix caches are reset."""


class MixedLoad(ABC):
    """A load on an engine; what ended is written to `path`, one JSON object a line.

    `events` must have happened: it takes up to `patience` times its seconds for that. Every
    `drain_s` the engine is left to end all it has. Answers are `longer` times as long as asked for.
    """

    events: ClassVar[Sequence[str]]
    patience: ClassVar[int]
    drain_s: ClassVar[float]
    longer: ClassVar[int] = 1
    weights: ClassVar[Mapping[str, int]] = WEIGHTS

    def __init__(self, llm: Any, seed: int, path: Path) -> None:
        self.llm, self.engine, self.path = llm, llm.llm_engine, path
        self.author, self.steps = Author(seed, weights=self.weights), Steps(llm)
        self.numbers = np.random.default_rng([seed, 1])
        self.asked: dict[str, Asked] = {}
        self.happened: Counter[str] = Counter()
        self.memory = Memory()
        self.complaints: list[str] = []
        self.answers = 0

    @property
    def never(self) -> list[str]:
        """What has not happened yet."""
        return [what for what in self.events if not self.happened[what]]

    def mix(self, records: Any, seconds: float, start: float) -> None:
        """So many seconds of it, drained every now and then."""
        while (past := time.monotonic() - start) < seconds or (
            self.never and past < self.patience * seconds
        ):
            level = int(self.numbers.integers(2, 2 * REQUESTS))
            until = time.monotonic() + self.drain_s
            while time.monotonic() < until:
                while len(self.asked) < level:
                    self.ask()
                self.step(records)
                self.chance()
            self.drain(records, time.monotonic() - start)

    def ask(self) -> None:
        """One more request."""
        asked = self.author.request()
        asked.answer *= self.longer
        self.happened["second turns"] += asked.before is not None
        prompt = {"prompt_token_ids": asked.tokens}
        self.engine.add_request(asked.name, prompt, sampling(asked))
        self.asked[asked.name] = asked

    def step(self, records: Any = None) -> None:
        """One step of the engine, and what ended in it."""
        for output in self.engine.step():
            if not output.finished:
                continue
            asked, noted = self.asked.pop(output.request_id), self.steps.taken(output.request_id)
            found = said(output)
            self.happened["preempted"] += noted["preempted"]
            reasons = Counter(one["reason"] for one in found["answers"])
            self.answers += reasons.total()
            self.happened["stopped"] += reasons["stop"]
            self.ended_with(asked, found["answers"])
            self.author.answered(asked, found["answers"][0]["tokens"])
            print(json.dumps({**asdict(asked), **found, **noted}), file=records)

    @abstractmethod
    def ended_with(self, asked: Asked, answers: list[dict[str, Any]]) -> None:
        """Hears what a request was answered."""

    @abstractmethod
    def chance(self) -> None:
        """What else may happen in a step."""

    def abort(self) -> None:
        """One of the requests goes."""
        name = str(self.numbers.choice(list(self.asked)))
        self.engine.abort_request([name])
        self.happened["preempted"] += self.steps.taken(name)["preempted"]
        del self.asked[name]
        self.happened["aborted"] += 1

    def end_all(self, records: Any) -> None:
        """Ends all there is."""
        while self.engine.has_unfinished_requests():
            self.step(records)
        # What ended last is said to the workers with the next step.
        self.step(records)

    @abstractmethod
    def left(self) -> list[str]:
        """What is held although all has ended, and what was told wrongly of it."""

    def drain(self, records: Any, at: float) -> None:
        """Ends all there is; then nothing may be left, and a GPU's engine sleeps and wakes."""
        self.end_all(records)
        if self.asked:
            self.complaints.append(f"{len(self.asked)} requests without an end: {self.asked}")
            self.asked.clear()
        self.complaints += [f"at {at:.0f} s: {left}" for left in self.left()]
        if not self.engine.reset_prefix_cache():
            self.complaints.append(f"at {at:.0f} s: prefix caches were not reset")
        self.sleep()
        self.memory.look(at)

    def sleep(self) -> None:
        """Sleeps and wakes where that does anything."""
        if has_gpu():
            self.llm.sleep(level=1)
            self.llm.wake_up()
            self.happened["slept"] += 1

    @abstractmethod
    def run(self, seconds: float) -> None:
        """So many seconds of it, and what is looked at in the end."""


def watched(made: MixedLoad, seconds: float) -> dict[str, Any]:
    """Runs a load: what happened, what should not have, and how memory grew."""
    begun = time.monotonic()
    with closing(LogWatch()) as logs:
        made.run(seconds)
    memory = made.memory
    return {
        "complaints": [*made.complaints, *logs.errors],
        "seconds": time.monotonic() - begun,
        "answers": made.answers,
        "happened": dict(made.happened),
        "MiB": [round(size / MIB, 1) for size in memory.resident],
        "growth MiB": round(memory.growth(memory.resident) / MIB, 2),
        "objects": memory.objects,
    }


def request_of(record: dict[str, Any]) -> Asked:
    """The request that a record is of."""
    return Asked(**{name: record[name] for name in Asked.__dataclass_fields__})


def answered_alone(llm: Any, asked: Asked) -> dict[str, Any]:
    """What an engine says to one request that nothing else is computed beside."""
    prompt = {"prompt_token_ids": asked.tokens}
    llm.llm_engine.add_request(asked.name, prompt, sampling(asked))
    found: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        found += llm.llm_engine.step()
    return said(found[0])

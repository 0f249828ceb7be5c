"""Loads of an engine, whoever's it is: what comes when, and what its callers hear.

`load`: requests that come all at once, then at a mean rate. `beside`: some decode, then a long
prompt comes, of which a step computes `chunk` tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.heard import Heard, figures, gaps, spread
from kvweave.lab.bench.rows import Row

AT_ONCE, POISSON = "at once", "Poisson"
"""Ways in which requests come."""


class Loaded(Protocol):
    """What a load asks of its task: `cases.engine_load` and `vllm.engine` have theirs."""

    @property
    def model(self) -> str: ...
    @property
    def requests(self) -> int: ...
    @property
    def span(self) -> tuple[int, int]: ...
    @property
    def answer(self) -> int | tuple[int, int]: ...
    @property
    def chunk(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def talkers(self) -> int: ...
    @property
    def long(self) -> int: ...
    @property
    def ways(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Callers:
    """An engine: `add(tokens, answer)` returns a request's name; `step()` who said how much."""

    add: Callable[[int, int], str]
    step: Callable[[], Iterator[tuple[str, int]]]
    busy: Callable[[], bool]


def come(
    engine: Callers, lengths: Sequence[int], answers: Sequence[int], apart: Sequence[float]
) -> list[Heard]:
    """Requests that come one by one, so many seconds after one another.

    Each has one of the `lengths`, and says as many tokens as `answers` has of it.
    """
    heard: dict[str, Heard] = {}
    due = time.perf_counter() + np.cumsum(apart)
    while len(heard) < len(due) or engine.busy():
        while len(heard) < len(due) and due[len(heard)] <= time.perf_counter():
            length, answer = lengths[len(heard)], answers[len(heard)]
            came = time.perf_counter()
            heard[engine.add(length, answer)] = Heard(length, came)
        if not engine.busy():
            time.sleep(max(0.0, due[len(heard)] - time.perf_counter()))
            continue
        listen(engine, heard)
    return list(heard.values())


def listen(engine: Callers, heard: dict[str, Heard]) -> None:
    """One step, and who said something in it."""
    said = list(engine.step())
    now = time.perf_counter()
    for name, count in said:
        heard[name].at.extend([now] * count)


def load(engine: Callers, task: Loaded) -> Iterator[Row]:
    """All at once, then at a mean rate: what was given, or four fifths of what all at once gave."""
    lengths, answers = lengths_of(task), answers_of(task)
    at_once = None
    if AT_ONCE in task.ways:
        heard = come(engine, lengths, answers, [0.0] * task.requests)
        at_once, *others = figures(f"{shape_of(task)}, at once", heard, {})
        yield from (at_once, *others)
    if POISSON in task.ways:
        rate, apart = arrivals(task, at_once)
        heard = come(engine, lengths, answers, apart)
        yield from figures(f"{shape_of(task)}, Poisson at {rate:.3g}/s", heard, {})


def shape_of(task: Loaded) -> str:
    """What a load is called."""
    said = task.answer if isinstance(task.answer, int) else _to(task.answer)
    return f"{task.model}, {task.requests} of {_to(task.span)}, {said} out"


def _to(span: tuple[int, int]) -> str:
    return f"{span[0]} to {span[1]}"


def lengths_of(task: Loaded, seed: int = 0) -> list[int]:
    """Tokens of each prompt, the same for every engine."""
    lengths: list[int] = np.random.default_rng(seed).integers(*task.span, task.requests).tolist()
    return lengths


def answers_of(task: Loaded, seed: int = 0) -> list[int]:
    """Tokens that each request says, the same for every engine."""
    if isinstance(task.answer, int):
        return [task.answer] * task.requests
    draws = np.random.default_rng(seed + 2)
    answers: list[int] = draws.integers(*task.answer, task.requests, endpoint=True).tolist()
    return answers


def longest_answer(task: Loaded) -> int:
    """Tokens of the longest answer that may be asked for."""
    return task.answer if isinstance(task.answer, int) else task.answer[1]


def arrivals(task: Loaded, at_once: Row | None, seed: int = 0) -> tuple[float, list[float]]:
    """Requests a second, and seconds between them, the same for every engine at this rate."""
    known = 0.0 if at_once is None else 0.8 * at_once.of["requests/s"]
    rate = task.rate or known
    if rate <= 0:
        raise ValueError("rate: expected one, as nothing came at once before, got 0")
    draws = np.random.default_rng(seed + 1).exponential(1 / rate, task.requests)
    return rate, draws.tolist()


def beside(engine: Callers, task: Loaded) -> Iterator[Row]:
    """The time between tokens of those who decode, without and beside a long prompt."""
    endless = 2000 + 4 * (task.long // task.chunk)
    low = task.span[0]
    talkers = {engine.add(low, endless): Heard(low, 0.0) for _ in range(task.talkers)}
    while not all(one.at for one in talkers.values()):
        listen(engine, talkers)
    many = f"{task.model}, {task.talkers} of {low} decode"
    restart(talkers)
    for _ in range(100):
        listen(engine, talkers)
    yield spread(f"{many}: between tokens", gaps(list(talkers.values())), "ms", 1e3)
    restart(talkers)
    came = time.perf_counter()
    long = engine.add(task.long, 1)
    everybody = {**talkers, long: Heard(task.long, came)}
    while not everybody[long].at:
        listen(engine, everybody)
    name = f"{many} beside a prompt of {task.long} in chunks of {task.chunk}"
    yield spread(f"{name}: between tokens", gaps(list(talkers.values())), "ms", 1e3)
    yield Row(f"{name}: its first token", everybody[long].at[0] - came, "s", None, {})


def restart(heard: dict[str, Heard]) -> None:
    """What was heard before counts no more: the next token's gap begins now."""
    now = time.perf_counter()
    for one in heard.values():
        one.at = [now]


def told(row: Row) -> dict[str, Any]:
    """A row as a line of results."""
    return {"title": row.name, "value": row.value, "unit": row.unit, "p95": row.p95, "of": row.of}

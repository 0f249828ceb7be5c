"""The loads of `benchmarks.cases.engine_load` in a vLLM engine, told in rows of the same names.

`load`: requests that come all at once, then at a mean rate. `beside`: some decode, then a long
prompt comes; a step computes `chunk` tokens of prompts there, as ours is told to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.heard import Heard, figures, gaps, spread
from kvweave.lab.bench.rows import Row


class Loaded(Protocol):
    """What a load asks of its task, see `benchmarks.vllm.engine.Task`."""

    @property
    def model(self) -> str: ...
    @property
    def requests(self) -> int: ...
    @property
    def span(self) -> tuple[int, int]: ...
    @property
    def answer(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def talkers(self) -> int: ...
    @property
    def long(self) -> int: ...


@dataclass(frozen=True)
class Callers:
    """An engine: `add(tokens, answer)` returns a request's name; `step()` who said how much."""

    add: Callable[[int, int], str]
    step: Callable[[], Iterator[tuple[str, int]]]
    busy: Callable[[], bool]


def come(engine: Callers, task: Loaded, apart: Sequence[float]) -> list[Heard]:
    """Requests that come one by one, so many seconds after one another."""
    lengths = np.random.default_rng(0).integers(*task.span, len(apart)).tolist()
    heard: dict[str, Heard] = {}
    due = time.perf_counter() + np.cumsum(apart)
    while len(heard) < len(due) or engine.busy():
        while len(heard) < len(due) and due[len(heard)] <= time.perf_counter():
            length = lengths[len(heard)]
            came = time.perf_counter()
            heard[engine.add(length, task.answer)] = Heard(length, came)
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
    shape = f"{task.model}, {task.requests} of {task.span[0]} to {task.span[1]}, {task.answer} out"
    rows = list(figures(f"{shape}, at once", come(engine, task, [0.0] * task.requests), {}))
    yield from rows
    rate = task.rate or 0.8 * rows[0].of["requests/s"]
    apart = np.random.default_rng(1).exponential(1 / rate, task.requests).tolist()
    yield from figures(f"{shape}, Poisson at {rate:.3g}/s", come(engine, task, apart), {})


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

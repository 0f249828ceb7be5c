"""Times contenders fairly: warmed up, in alternating order, medians and 95th percentiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and 95th percentile over `rounds`."""

    median_s: float
    p95_s: float
    rounds: int


def compare(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 1,
    at_least_s: float = 0.0,
) -> dict[str, Timing]:
    """Times each contender `rounds` times on the host's clock.

    A call shorter than `at_least_s` is repeated inside one sample until it takes that long, so
    that the clock's own cost disappears.
    """
    repeats = {name: _repeats(call, warm_up, at_least_s) for name, call in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for name in turns(list(contenders), rounds):
        samples[name].append(_sample(contenders[name], repeats[name]))
    return {name: summarise(values) for name, values in samples.items()}


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """All names `rounds` times, each round starting with another one."""
    for turn in range(rounds):
        shift = turn % len(names)
        yield from (*names[shift:], *names[:shift])


def summarise(samples: Sequence[float]) -> Timing:
    """Median and 95th percentile of samples in seconds."""
    median, p95 = np.percentile(samples, [50, 95])
    return Timing(float(median), float(p95), len(samples))


def _repeats(call: Callable[[], object], warm_up: int, at_least_s: float) -> int:
    once = 0.0
    for _ in range(warm_up):
        once = _sample(call, 1)
    return max(1, round(at_least_s / once)) if once > 0 else 1


def _sample(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats

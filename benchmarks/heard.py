"""What the callers of an engine hear of their requests, and the figures of a load.

Times are those of a caller who looks after each step: a token is there when its step has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvweave.lab.bench.rows import Row


@dataclass
class Heard:
    """One request of `tokens` tokens: when it came and when each of its tokens was there, in s."""

    tokens: int
    came: float
    at: list[float] = field(default_factory=list)


def figures(name: str, heard: Sequence[Heard], counted: dict[str, Any]) -> Iterator[Row]:
    """Throughput, first tokens, and the time between tokens of a load.

    `counted`: what else is to be told. Prompts of a request that gave way are computed again, and
    counted once.
    """
    begun, ended = min(one.came for one in heard), max(one.at[-1] for one in heard)
    took, said = ended - begun, sum(len(one.at) for one in heard)
    read = sum(one.tokens for one in heard)
    told = {"out/s": said / took, "requests/s": len(heard) / took, "seconds": took, **counted}
    yield Row(f"{name}: tokens in and out", (read + said) / took, "tokens/s", None, told)
    yield spread(f"{name}: first token", [one.at[0] - one.came for one in heard], "s", 1.0)
    between = spread(f"{name}: between tokens", gaps(heard), "ms", 1e3)
    between.of["a token"] = float(np.mean(times_per_token(heard))) * 1e3
    yield between


def times_per_token(heard: Sequence[Heard]) -> list[float]:
    """Seconds a token of each request behind its first, of those that said more than one."""
    said = [one.at for one in heard if len(one.at) > 1]
    return [(at[-1] - at[0]) / (len(at) - 1) for at in said] or [0.0]


def gaps(heard: Sequence[Heard]) -> list[float]:
    """Seconds between every two tokens of the same request."""
    return [gap for one in heard for gap in np.diff(one.at).tolist()]


def spread(name: str, seconds: Sequence[float], unit: str, scale: float) -> Row:
    """Median, 95th and 99th percentile, and the worst."""
    p50, p95, p99 = (np.percentile(seconds, [50, 95, 99]) * scale).tolist()
    return Row(name, p50, unit, p95, {"p99": p99, "worst": max(seconds) * scale})

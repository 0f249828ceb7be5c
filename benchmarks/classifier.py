"""Whether seconds tell two kinds of trials apart: a threshold that half of them chose.

Its accuracy on the other half, with a 95 % interval (Wilson). 50 % is what somebody has who tells
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from kvweave.lab.bench.rows import Row

Floats = npt.NDArray[np.float64]
_Z = 1.96


@dataclass(frozen=True)
class Trials:
    """Seconds to a first token, and whether the text had been cached."""

    seconds: Floats
    cached: npt.NDArray[np.bool_]

    def accuracy(self) -> tuple[float, float, float]:
        """Of a threshold that half of the trials chose, on the other half; and its interval."""
        half = len(self.seconds) // 2
        cut, faster = threshold(self.seconds[:half], self.cached[:half])
        guessed = (self.seconds[half:] < cut) == faster
        right, of = int((guessed == self.cached[half:]).sum()), len(self.seconds) - half
        return right / of, *interval(right, of)

    @staticmethod
    def of_parts(parts: list[Trials]) -> Trials:
        """Those of several runners, mixed."""
        mixed = np.random.default_rng(7).permutation(sum(len(part.seconds) for part in parts))
        seconds, cached = ([getattr(p, name) for p in parts] for name in ("seconds", "cached"))
        return Trials(np.concatenate(seconds)[mixed], np.concatenate(cached)[mixed])


def threshold(seconds: Floats, cached: npt.NDArray[np.bool_]) -> tuple[float, bool]:
    """The cut that tells most of the trials apart, and whether what is faster was cached."""
    order = np.argsort(seconds)
    # How many are told right if the first k in order are said to be cached, and the others not.
    right = np.concatenate([[0], np.cumsum(np.where(cached[order], 1, -1))]) + (~cached).sum()
    faster = right.max() >= len(seconds) - right.min()
    place = int(right.argmax() if faster else right.argmin())
    edges = np.concatenate([seconds[order], [np.inf]])
    return float(edges[place]), bool(faster)


def interval(right: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, square = right / of, _Z**2
    middle = share + square / (2 * of)
    width = _Z * sqrt(share * (1 - share) / of + square / (4 * of * of))
    return (middle - width) / (1 + square / of), (middle + width) / (1 + square / of)


def row(name: str, trials: Trials) -> Row:
    """What is told right, and the medians of both kinds."""
    share, low, high = trials.accuracy()
    medians = [float(np.median(trials.seconds[trials.cached == kind])) for kind in (True, False)]
    beside = {"from": low, "to": high, "cached, s": medians[0], "not cached, s": medians[1]}
    return Row(name, share, "told right", None, {**beside, "trials": len(trials.seconds)})

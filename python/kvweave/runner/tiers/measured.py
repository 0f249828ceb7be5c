"""`Measured`: how fast tiers and prefills were, from what they did. Any thread may ask and add."""

from __future__ import annotations

import math
import threading
from typing import Literal, TypeAlias

from kvweave.runner.tiers.choice import Speeds, Tier

What = Literal["host", "disk", "remote", "compute"]

_KEPT = 0.8
"""Of what was measured before when something new comes, so that speeds follow the machine."""

_MOST_DECLINED = 16
"""Times that computing was faster than a tier, after which the tier is tried again."""

_MAYBE: dict[What, float] = {"compute": 8.0, "host": 2.0, "disk": 2.0, "remote": 2.0}
"""How much faster a larger amount may be a unit than the largest that was measured."""

_Sums: TypeAlias = "tuple[float, float]"


class Measured:
    """Amounts and the seconds that they took, the latest counting most.

    Small amounts take longer a unit, since each takes some time for itself: prefills of few rows
    most of all. So speeds are kept by size, in powers of two. An amount that is larger than all
    that were measured is taken to be as fast as it may be, until it was tried.

    A tier that nobody reads from is measured by nobody. Its speed is forgotten once it was too slow
    so many times, so that a bad first impression does not last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[What, _Sums] = {}
        self._of_size: dict[What, dict[int, _Sums]] = {}
        self._declined: dict[What, int] = {}

    def note(self, what: What, amount: float, seconds: float) -> None:
        """Takes note of bytes or FLOPs that took so many seconds; of nothing, if either is 0."""
        if amount <= 0 or seconds <= 0:
            return
        with self._lock:
            self._sums[what] = _with(self._sums.get(what), amount, seconds)
            sizes = self._of_size.setdefault(what, {})
            sizes[_size(amount)] = _with(sizes.get(_size(amount)), amount, seconds)
            self._declined[what] = 0

    def decline(self, tier: Tier) -> None:
        """Takes note that computing was faster than a tier."""
        with self._lock:
            self._declined[tier] = self._declined.get(tier, 0) + 1
            if self._declined[tier] >= _MOST_DECLINED:
                self._declined[tier] = 0
                self._sums.pop(tier, None)
                self._of_size.pop(tier, None)

    @property
    def speeds(self) -> Speeds:
        """What is known now, of all sizes together."""
        with self._lock:
            return Speeds(**{what: amount / time for what, (amount, time) in self._sums.items()})

    def speeds_for(self, size: int, flops: int) -> Speeds:
        """What is known now of so many bytes, and of computing so much."""
        with self._lock:
            return Speeds(
                **{
                    what: _speed(sizes, flops if what == "compute" else size, _MAYBE[what])
                    for what, sizes in self._of_size.items()
                }
            )


def _with(sums: _Sums | None, amount: float, seconds: float) -> _Sums:
    amounts, times = (0.0, 0.0) if sums is None else sums
    return amounts * _KEPT + amount, times * _KEPT + seconds


def _size(amount: float) -> int:
    """The power of two that an amount reaches."""
    return math.frexp(amount)[1]


def _speed(sizes: dict[int, _Sums], amount: float, maybe: float) -> float:
    """That of the size which is nearest to an amount, the larger of two."""
    size = _size(amount)
    nearest = min(sizes, key=lambda known: (abs(known - size), -known))
    amounts, times = sizes[nearest]
    return amounts / times * (maybe if size > max(sizes) + 1 else 1.0)

"""`Measured`: how fast tiers and prefills were, from what they did. Any thread may ask and add."""

from __future__ import annotations

import threading
from typing import Literal

from kvweave.runner.tiers.choice import Speeds, Tier

What = Literal["host", "disk", "remote", "compute"]

_KEPT = 0.8
"""Of what was measured before when something new comes, so that speeds follow the machine."""


_MOST_DECLINED = 16
"""Times that computing was faster than a tier, after which the tier is tried again."""


class Measured:
    """Amounts and the seconds that they took, the latest counting most.

    A tier that nobody reads from is measured by nobody. Its speed is forgotten once it was too slow
    so many times, so that a bad first impression does not last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[What, tuple[float, float]] = {}
        self._declined: dict[What, int] = {}

    def note(self, what: What, amount: float, seconds: float) -> None:
        """Takes note of bytes or FLOPs that took so many seconds; of nothing, if either is 0."""
        if amount <= 0 or seconds <= 0:
            return
        with self._lock:
            amounts, times = self._sums.get(what, (0.0, 0.0))
            self._sums[what] = amounts * _KEPT + amount, times * _KEPT + seconds
            self._declined[what] = 0

    def decline(self, tier: Tier) -> None:
        """Takes note that computing was faster than a tier."""
        with self._lock:
            self._declined[tier] = self._declined.get(tier, 0) + 1
            if self._declined[tier] >= _MOST_DECLINED:
                self._declined[tier] = 0
                self._sums.pop(tier, None)

    @property
    def speeds(self) -> Speeds:
        """What is known now."""
        with self._lock:
            return Speeds(**{what: amount / time for what, (amount, time) in self._sums.items()})

"""`Measured`: how fast tiers and prefills were, from what they did. Any thread may ask and add."""

from __future__ import annotations

import threading
from typing import Literal

from kvweave.runner.tiers.choice import TIERS, Speeds, Tier
from kvweave.runner.tiers.durations import Durations

What = Literal["host", "disk", "remote", "compute"]

_LEAST_DECLINED, _MOST_DECLINED = 16, 1024
"""Times that computing was faster than a tier, after which the tier is tried again: the least at
first, twice as many each time that it was too slow again, at most the most."""
_IN_A_ROW = 32
"""Times that a tier is read from in a row, after which it is tried again as soon as at first."""

_MAYBE: dict[What, float] = {"compute": 8.0, "host": 2.0, "disk": 2.0, "remote": 2.0}
"""How much faster a larger amount may be a unit than the largest that was measured."""


class Measured:
    """Amounts and the seconds that they took, the latest counting most.

    A tier that nobody reads from is measured by nobody. What was measured of it nearest to what is
    asked for is forgotten once it was too slow so many times, so that a bad first impression does
    not last; more seldom the more often that has not changed it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations = {what: Durations(maybe) for what, maybe in _MAYBE.items()}
        self._declined: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._read: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._patience: dict[Tier, int] = dict.fromkeys(TIERS, _LEAST_DECLINED)

    def note(self, what: What, amount: float, seconds: float) -> None:
        """Takes note of bytes or FLOPs that took so many seconds; of nothing, if either is 0."""
        if amount <= 0 or seconds <= 0:
            return
        with self._lock:
            self._durations[what].note(amount, seconds)
            if what != "compute":
                self._declined[what] = 0
                self._read[what] += 1
                if self._read[what] == _IN_A_ROW:
                    self._patience[what] = _LEAST_DECLINED

    def decline(self, tier: Tier, size: int) -> None:
        """Takes note that computing was faster than to load so many bytes from a tier."""
        with self._lock:
            self._declined[tier] += 1
            self._read[tier] = 0
            patience = self._patience[tier]
            if self._declined[tier] >= patience and self._durations[tier]:
                self._patience[tier] = min(2 * patience, _MOST_DECLINED)
                self._declined[tier] = 0
                self._durations[tier].forget_near(size)

    @property
    def speeds(self) -> Speeds:
        """What is known now, of all sizes together."""
        with self._lock:
            every = self._durations.items()
            return Speeds(**{what: known.speed for what, known in every if known})

    def speeds_for(self, size: int, flops: int, beside: int = 0) -> Speeds:
        """What is known now of loading so many bytes, and of computing so much.

        `beside`: FLOPs that are computed anyway. What they take for themselves is no reason to
        load, since a prefill of few rows takes many times as long a FLOP as one of many.
        """
        with self._lock:
            durations = self._durations
            known = {tier: size / durations[tier].of(size) for tier in TIERS if durations[tier]}
            compute = durations["compute"]
            computing = flops / compute.beside(flops, beside) if compute else None
            return Speeds(**known, compute=computing)

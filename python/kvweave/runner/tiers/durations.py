"""`Durations`: how long amounts of one thing take, from those that were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

_KEPT = 0.8
"""Of what was measured before when something new comes, so that durations follow the machine."""


@dataclass
class _Sums:
    """Amounts of one size and the seconds that they took, the latest counting most."""

    amounts: float = 0.0
    seconds: float = 0.0
    count: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amounts = self.amounts * _KEPT + amount
        self.seconds = self.seconds * _KEPT + seconds
        self.count = self.count * _KEPT + 1.0

    @property
    def mean(self) -> tuple[float, float]:
        return self.amounts / self.count, self.seconds / self.count


class Durations:
    """Seconds by amount: straight lines between the means of sizes, of which two double an amount.

    Small amounts take longer a unit, since each takes some time for itself. Beyond the sizes that
    were measured the line of the two nearest goes on, as far as an amount then takes no less of the
    time than of the amount where it is smaller, and no more where it is larger. An amount more than
    twice as large as all that were measured is taken to be `maybe` times as fast, until it was
    tried.
    """

    def __init__(self, maybe: float) -> None:
        self._maybe = maybe
        self._all = _Sums()
        self._of_size: dict[int, _Sums] = {}

    def __bool__(self) -> bool:
        return bool(self._of_size)

    def note(self, amount: float, seconds: float) -> None:
        """Takes note of an amount above 0 and how long it took."""
        self._all.add(amount, seconds)
        self._of_size.setdefault(_size(amount), _Sums()).add(amount, seconds)

    def forget_near(self, amount: float) -> None:
        """Forgets what was measured nearest to an amount."""
        del self._of_size[min(self._of_size, key=lambda size: abs(size - _size(amount)))]
        if not self._of_size:
            self._all = _Sums()

    @property
    def speed(self) -> float:
        """Units a second, of all that was measured."""
        return self._all.amounts / self._all.seconds

    def of(self, amount: float) -> float:
        """Seconds that an amount above 0 takes; something was measured."""
        known = sorted(sums.mean for sums in self._of_size.values())
        if amount < known[0][0]:
            return _before(known, amount)
        if amount >= known[-1][0]:
            untried = self._is_untried(amount)
            return _behind(known, amount) / (self._maybe if untried else 1.0)
        after = next(at for at, (known_amount, _) in enumerate(known) if known_amount > amount)
        return _on_line(known[after - 1], known[after], amount)

    def _is_untried(self, amount: float) -> bool:
        return _size(amount) > max(self._of_size) + 2

    def beside(self, amount: float, other: float) -> float:
        """Seconds that an amount takes longer with another, which is there anyway, than that alone.

        It takes no less than half of what it would at the fastest that was measured. The difference
        of two amounts' seconds varies more than either, and the more the less apart they are. So
        where three sizes or more were measured it is read off a line through all of them, those
        near to the two counting most.
        """
        if other <= 0:
            return self.of(amount)
        both = amount + other
        maybe = self._maybe if self._is_untried(both) else 1.0
        least = min(sums.seconds / sums.amounts for sums in self._of_size.values()) / 2
        if self._is_untried(both) or len(self._of_size) < 3:
            longer = self.of(both) - self.of(other) / maybe
        else:
            longer = amount * self._slope(other, both)
        return max(longer, amount * least / maybe)

    def _slope(self, least: float, most: float) -> float:
        """Seconds a unit between two amounts, by the line of least squares near to them.

        Of a size that lies d octaves outside, a measurement counts 1 / (1 + d²) as much as of one
        between. Errors are shares of the seconds, as times of a machine differ.
        """
        known = [(*sums.mean, sums.count) for sums in self._of_size.values()]
        octaves = [max(0.0, math.log2(least / a), math.log2(a / most)) for a, _, _ in known]
        pairs = zip(known, octaves, strict=True)
        weights = [count / (1.0 + d * d) / s**2 for (_, s, count), d in pairs]
        whole = sum(weights)
        middle = sum(w * a for w, (a, _, _) in zip(weights, known, strict=True)) / whole
        apart = [a - middle for a, _, _ in known]
        square = sum(w * x * x for w, x in zip(weights, apart, strict=True))
        rise = sum(w * x * s for w, x, (_, s, _) in zip(weights, apart, known, strict=True))
        return rise / square


def _size(amount: float) -> int:
    """Which of the sizes an amount is of: two of them are twice as large."""
    return math.floor(2 * math.log2(amount))


def _on_line(first: tuple[float, float], second: tuple[float, float], amount: float) -> float:
    (near, seconds), (far, later) = first, second
    return seconds + (later - seconds) * (amount - near) / (far - near)


def _before(known: list[tuple[float, float]], amount: float) -> float:
    near, seconds = known[0]
    share = seconds * amount / near
    if len(known) == 1:
        return share
    return min(max(_on_line(known[0], known[1], amount), share), seconds)


def _behind(known: list[tuple[float, float]], amount: float) -> float:
    far, seconds = known[-1]
    share = seconds * amount / far
    if len(known) == 1:
        return share
    return min(max(_on_line(known[-2], known[-1], amount), seconds), share)

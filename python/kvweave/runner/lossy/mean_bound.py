"""How large the mean of what was seen surely is, whatever it is distributed like.

A KL is at least 0 and has no upper end, and most of its mean lies in a few large values, so that an
interval that takes it for normal is wrong both ways. What is sure is this: if numbers >= 0 have a
mean of at most m, a gambler who stakes a share λ of what they own on each, at the odds x/m, gains
nothing on average, and by Ville's inequality comes to 1/α times their stake with a probability of
at most α, at whatever time one looks (Waudby-Smith and Ramdas 2023, "Estimating means of bounded
random variables by betting", section 4; only their bound from below is used, which needs no upper
end). Several λ are staked on alike, since the best is not known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_STAKES = np.arange(1, 16) / 16.0
"""Shares staked, from a cautious gambler's to one who nearly stakes all."""
_HALVINGS = 60


def surely_above(values: Sequence[float], bound: float, level: float) -> bool:
    """Whether the mean of numbers >= 0 is above a bound > 0, with that confidence at any time.

    A value that is no number, or infinite, is above any bound.
    """
    return _wealth(values, bound) >= -math.log1p(-level)


def mean_at_least(values: Sequence[float], level: float) -> float:
    """The largest bound that the mean of numbers >= 0 is surely above; 0 for no values.

    Infinite when a value is, or is no number.
    """
    seen = np.asarray(values, np.float64)
    if not np.isfinite(seen).all():
        return math.inf
    if seen.size == 0 or seen.max() <= 0.0:
        return 0.0
    # Wealth falls as the bound rises, and never grows at a bound above all values.
    low, high = 0.0, float(seen.max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if surely_above(values, middle, level) else (low, middle)
    return low


def _wealth(values: Sequence[float], bound: float) -> float:
    """Logarithm of what a stake of 1 has become, the mean over all shares."""
    seen = np.asarray(values, np.float64)
    if not np.isfinite(seen).all():
        return math.inf
    if bound <= 0.0:
        return math.inf if seen.size and seen.max() > 0.0 else 0.0
    grown = np.log1p(_STAKES[:, None] * (seen[None] / bound - 1.0)).sum(1)
    return float(np.logaddexp.reduce(grown) - math.log(len(_STAKES)))

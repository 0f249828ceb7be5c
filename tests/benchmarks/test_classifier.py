"""What a classifier of times tells: of what is told apart, and of what is not."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.classifier import Trials, interval, row, threshold


def drawn(cached_s: float, other_s: float, count: int = 4000) -> Trials:
    """Times around two medians, a tenth of a second wide."""
    random = np.random.default_rng(0)
    cached = random.permutation(np.arange(count) % 2 == 0)
    return Trials(np.where(cached, cached_s, other_s) + random.uniform(0, 0.1, count), cached)


@pytest.mark.parametrize("apart", [1.0, -1.0], ids=["faster", "slower"])
def test_what_is_apart_is_told_on_either_side(apart: float) -> None:
    # A cut is a time that was seen, so what is next to it may fall on the other side.
    share, low, high = drawn(2.0, 2.0 + apart).accuracy()
    assert 0.99 < low < share
    assert share > 0.998
    assert high > 0.999


def test_what_is_half_apart_is_told_in_part() -> None:
    """Half of both kinds overlaps: a guess there is right half of the time."""
    share, low, high = drawn(1.0, 1.05).accuracy()
    assert low < 0.75 < high
    assert low < share < high


def test_what_is_alike_is_guessed() -> None:
    made = row("alike", drawn(1.0, 1.0))
    assert made.of["from"] < 0.5 < made.of["to"]
    assert made.of["trials"] == 4000


def test_a_threshold_leaves_ends_out() -> None:
    """All of one kind: the cut lies beyond the last of them."""
    seconds = np.asarray([1.0, 2.0, 3.0])
    assert threshold(seconds, np.asarray([True] * 3)) == (np.inf, True)
    cut, faster = threshold(seconds, np.asarray([False] * 3))
    assert ((seconds < cut) != faster).all()


def test_intervals_hold_the_share_that_drew_them() -> None:
    """Of a thousand drawn shares as many as said."""
    random = np.random.default_rng(1)
    held = [
        low < 0.3 < high
        for low, high in (interval(n, 500) for n in random.binomial(500, 0.3, 1000))
    ]
    assert 0.93 < np.mean(held) < 0.97

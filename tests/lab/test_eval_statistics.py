"""Intervals against brute force: resamples enumerated, jackknives taken one by one."""

import itertools
import time
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import InvalidArgument
from kvweave.lab.eval import Bootstrap, Interval
from kvweave.lab.eval.statistics import difference, finite, gap_closed, gap_difference


def all_resamples(values: np.ndarray, statistic) -> np.ndarray:
    """The statistic of every one of the nⁿ resamples of n samples."""
    n = len(values)
    picked = np.asarray(list(itertools.product(range(n), repeat=n)))
    return statistic(values[picked].mean(axis=1))


def bca_by_hand(values: np.ndarray, statistic, level: float) -> Interval:
    """Efron's interval (1987) from the exact bootstrap distribution."""
    n, normal = len(values), NormalDist()
    estimate = float(statistic(values.mean(axis=0)[None])[0])
    drawn = all_resamples(values, statistic)
    left = np.asarray(
        [float(statistic(np.delete(values, i, 0).mean(0)[None])[0]) for i in range(n)]
    )
    apart = left.mean() - left
    skew = (apart**3).sum() / (6 * (apart**2).sum() ** 1.5)
    bias = normal.inv_cdf(float((drawn < estimate).mean() + (drawn == estimate).mean() / 2))
    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = bias + normal.inv_cdf(tail)
        ends.append(float(np.quantile(drawn, normal.cdf(bias + z / (1 - skew * z)))))
    return Interval(estimate, *ends)


@pytest.mark.parametrize(
    ("columns", "statistic"), [(1, None), (2, gap_closed), (3, gap_difference)]
)
def test_an_interval_is_the_exact_one_but_for_chance(columns: int, statistic) -> None:
    values = np.random.default_rng(columns).gamma(2.0, 1.0, (6, columns))
    how = statistic or (lambda means: means[:, 0])
    exact = bca_by_hand(values, how, 0.8)
    found = Bootstrap(0.8, resamples=200_000).interval(values, how)
    width = exact.high - exact.low
    assert found.value == pytest.approx(exact.value)
    assert found.low == pytest.approx(exact.low, abs=0.02 * width)
    assert found.high == pytest.approx(exact.high, abs=0.02 * width)


def test_tasks_weigh_the_same_and_are_resampled_apart() -> None:
    one, other = np.asarray([0.0, 1.0, 2.0]), np.asarray([10.0, 14.0])
    drawn = [
        (a + b) / 2
        for a in all_resamples(one[:, None], lambda m: m[:, 0])
        for b in all_resamples(other[:, None], lambda m: m[:, 0])
    ]
    found = Bootstrap(0.8, resamples=100_000).pooled([one, other])
    assert found.value == (1.0 + 12.0) / 2
    # No skew and no bias here: the plain percentiles of all 27 · 4 resamples.
    assert found.low == pytest.approx(np.quantile(drawn, 0.1), abs=0.1)
    assert found.high == pytest.approx(np.quantile(drawn, 0.9), abs=0.1)
    # A task of which there is more counts no more.
    many = Bootstrap().pooled([np.tile(one, 50), other])
    assert many.value == found.value


def test_pairs_are_surer_than_their_parts() -> None:
    rng = np.random.default_rng(3)
    hard = rng.exponential(1.0, 40)
    pairs = np.stack([hard + 0.1 + 0.01 * rng.random(40), hard], axis=1)
    apart = Bootstrap().interval(pairs, difference)
    alone = Bootstrap().interval(pairs[:, 0])
    assert 0.09 < apart.low < apart.value < apart.high < 0.12
    assert alone.high - alone.low > 10 * (apart.high - apart.low)


@given(st.integers(2, 12), st.integers(0, 2**31))
@settings(max_examples=30)
def test_an_interval_moves_with_its_samples(n: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=n)
    here, there = (Bootstrap(resamples=400).interval(v) for v in (values, 2 * values + 3))
    assert there.value == pytest.approx(2 * here.value + 3)
    assert there.low == pytest.approx(2 * here.low + 3)
    assert there.high == pytest.approx(2 * here.high + 3)


def test_what_is_not_finite_is_counted() -> None:
    kept, lost = finite([1.0, np.nan, 3.0, np.inf], [1.0, 2.0, 3.0, 4.0])
    assert kept.tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert lost == 2
    assert finite([], [])[0].shape == (0, 2)


def test_a_whole_report_is_a_matter_of_seconds() -> None:
    """Thirty policies over eight tasks of 200 samples; the bound is far above what it takes."""
    rng, intervals = np.random.default_rng(0), Bootstrap()
    tasks = [rng.random((200, 2)) for _ in range(8)]
    start = time.process_time()
    for _ in range(30):
        intervals.pooled(tasks, gap_closed)
    assert time.process_time() - start < 20


def test_what_cannot_be_resampled_is_said() -> None:
    one = Bootstrap().pooled([[1.0, 2.0], [5.0]])
    assert one.value == 3.25
    assert np.isnan(one.low)
    for tasks, says in (([], "at least one task"), ([[1.0], []], "at least one sample")):
        with pytest.raises(InvalidArgument, match=says):
            Bootstrap().pooled(tasks)
    with pytest.raises(InvalidArgument, match="resamples >= 1"):
        Bootstrap(resamples=0)

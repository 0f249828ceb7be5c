"""Distances between distributions and how sure a mean is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import InvalidArgument

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""From the means of k quantities in each of B resamples, [B, k], to one number each, [B]."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval; all three are NaN when there is nothing to say."""

    value: float
    low: float
    high: float


def negative_log_likelihood(logits: torch.Tensor, tokens: npt.NDArray[np.int32]) -> float:
    """Mean −log p of tokens [n] under logits [n, V] that predict them, in nats."""
    wanted = torch.from_numpy(tokens).long().to(logits.device)
    return float(torch.nn.functional.cross_entropy(logits.double(), wanted))


def worst_decile(values: Floats) -> float:
    """Mean of the largest tenth of the values (at least one of them)."""
    if values.size == 0:
        return float("nan")
    return float(np.sort(values)[-max(1, values.size // 10) :].mean())


def finite(*columns: npt.ArrayLike) -> tuple[Floats, int]:
    """Columns [n] each as [m, k] without the samples of which any is NaN or infinite, and n − m.

    What is left out is counted so that whoever shows the rest can say so.
    """
    stacked = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
    kept = np.isfinite(stacked).all(axis=1)
    return stacked[kept], int((~kept).sum())


def mean(means: Floats) -> Floats:
    """The statistic `mean`: [B, 1] to [B]."""
    return np.asarray(means[:, 0])


def difference(means: Floats) -> Floats:
    """The mean of one column less that of the other, over pairs: [B, 2] to [B]."""
    return np.asarray(means[:, 0] - means[:, 1])


def gap_closed(means: Floats) -> Floats:
    """The share of the naive-to-full KL gap that a policy closes: [B, 2] to [B].

    Columns are (KL of naive, KL of the policy), both to full: 1 − ΣKL(policy) / ΣKL(naive).
    1 is full, 0 is naive, below 0 is worse than naive. NaN where naive has no gap.
    """
    return _share_closed(means[:, 0], means[:, 1])


def gap_difference(means: Floats) -> Floats:
    """How much more of the gap one policy closes than another: [B, 3] to [B].

    Columns are (KL of naive, KL of the one, KL of the other).
    """
    naive = means[:, 0]
    return np.asarray(_share_closed(naive, means[:, 1]) - _share_closed(naive, means[:, 2]))


class Bootstrap:
    """BCa bootstrap intervals (Efron 1987) of statistics of means, with resamples drawn once.

    Bias-corrected and accelerated, since plain percentiles cover too little for the few, skewed
    samples that evaluations have. Samples of one count are always resampled alike, so that
    quantities over the same samples are comparable; how often each was drawn is kept, [B, n], so
    that the means of all resamples are one matrix product.

    Raises InvalidArgument for a level outside (0, 1) or no resamples.
    """

    def __init__(self, level: float = 0.95, resamples: int = 4000, seed: int = 0) -> None:
        if not 0.0 < level < 1.0:
            raise InvalidArgument(f"bootstrap: expected 0 < level < 1, got {level}")
        if resamples < 1:
            raise InvalidArgument(f"bootstrap: expected resamples >= 1, got {resamples}")
        self._level = level
        self._resamples = resamples
        self._seed = seed
        self._drawn: dict[tuple[int, int], Floats] = {}

    def interval(self, values: npt.ArrayLike, statistic: Statistic = mean) -> Interval:
        """The statistic of the means of n independent samples, [n] or [n, k].

        One sample, or equal samples, give no width to speak of: the bounds are then NaN or the
        value. Raises InvalidArgument for no samples.
        """
        return self.pooled([values], statistic)

    def pooled(self, tasks: Sequence[npt.ArrayLike], statistic: Statistic = mean) -> Interval:
        """The mean of the statistic over tasks, each with the same weight however many samples.

        Samples are resampled within their task; the acceleration is that of several samples
        (Davison and Hinkley 1997, section 5.4). A task of one sample has no spread to tell of:
        the bounds are NaN. Raises InvalidArgument for no task, or one without samples.
        """
        groups = [_columns(values) for values in tasks]
        if not groups:
            raise InvalidArgument("bootstrap: expected at least one task, got none")
        estimate = float(np.mean([statistic(group.mean(axis=0)[None])[0] for group in groups]))
        if not np.isfinite(estimate) or min(map(len, groups)) == 1:
            return Interval(estimate, float("nan"), float("nan"))
        drawn = np.zeros(self._resamples)
        influence = []
        for index, group in enumerate(groups):
            n = len(group)
            drawn += statistic(self._counts(n, index) @ group / n) / len(groups)
            left_out = statistic((group.sum(axis=0) - group) / (n - 1))
            # How far each sample moves the mean over tasks, to first order.
            influence.append((n - 1) / n * (left_out.mean() - left_out) / len(groups))
        # Resamples that mean the same differ by rounding, and equal samples by nothing else.
        rounding = 1e-12 * max(abs(estimate), *(float(np.abs(group).max()) for group in groups))
        if np.nanmax(drawn) - np.nanmin(drawn) <= rounding:
            return Interval(estimate, estimate, estimate)
        drawn = np.where(np.abs(drawn - estimate) <= rounding, estimate, drawn)
        low, high = _bca_levels(estimate, drawn, np.concatenate(influence), self._level)
        bounds = np.nanquantile(drawn, [low, high])
        return Interval(estimate, float(bounds[0]), float(bounds[1]))

    def _counts(self, n: int, task: int) -> Floats:
        """How often each of n samples is drawn in each resample: [B, n]; tasks draw apart."""
        if (n, task) not in self._drawn:
            rng = np.random.default_rng([self._seed, task])
            picked = rng.integers(0, n, size=(self._resamples, n))
            picked += n * np.arange(self._resamples)[:, None]
            counts = np.bincount(picked.ravel(), minlength=self._resamples * n)
            self._drawn[n, task] = counts.reshape(self._resamples, n).astype(np.float64)
        return self._drawn[n, task]


def bootstrap(
    values: npt.ArrayLike,
    statistic: Statistic = mean,
    *,
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """One interval of a statistic of the means of n samples, [n] or [n, k]: see `Bootstrap`.

    Raises InvalidArgument for no samples, or a level outside (0, 1).
    """
    return Bootstrap(level, resamples, seed).interval(values, statistic)


def _share_closed(naive: Floats, policy: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(naive > 0.0, 1.0 - policy / naive, np.nan)


def _columns(values: npt.ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or array.shape[0] == 0:
        raise InvalidArgument("bootstrap: expected at least one sample, got none")
    return array.reshape(len(array), -1)


def _bca_levels(
    estimate: float, drawn: Floats, influence: Floats, level: float
) -> tuple[float, float]:
    """The quantiles of the resampled statistic that bound the interval."""
    normal = NormalDist()
    below = float(np.mean(drawn < estimate) + 0.5 * np.mean(drawn == estimate))
    # All resamples on one side would give an infinite correction.
    bias = normal.inv_cdf(min(max(below, 1 / (2 * drawn.size)), 1 - 1 / (2 * drawn.size)))
    spread = float((influence**2).sum())
    skew = float((influence**3).sum()) / (6.0 * spread**1.5) if spread > 0.0 else 0.0
    levels = []
    for tail in ((1.0 - level) / 2.0, (1.0 + level) / 2.0):
        z = bias + normal.inv_cdf(tail)
        levels.append(normal.cdf(bias + z / max(1.0 - skew * z, 1e-6)))
    return levels[0], levels[1]

"""Distances between distributions and how sure a mean is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import InvalidArgument

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""From resampled values [B, n, …] to one number each, [B]."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval; all three are NaN when there is nothing to say."""

    value: float
    low: float
    high: float


def kl_per_token(reference: torch.Tensor, other: torch.Tensor) -> Floats:
    """KL(reference ‖ other) in nats at each of n tokens, from logits [n, V] each; f64 [n].

    Raises InvalidArgument when the shapes differ.
    """
    if reference.shape != other.shape or reference.ndim != 2:
        raise InvalidArgument(
            f"logits: expected two of one shape [n, V], got {list(reference.shape)} and "
            f"{list(other.shape)}"
        )
    p = torch.log_softmax(reference.double(), dim=-1)
    q = torch.log_softmax(other.double(), dim=-1)
    # A token that the reference excludes (−inf) adds nothing, whatever the other says.
    terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
    # Rounding may leave a hair below zero where the two are equal.
    return np.asarray(terms.sum(-1).clamp_min(0.0).cpu().numpy(), dtype=np.float64)


def negative_log_likelihood(logits: torch.Tensor, tokens: npt.NDArray[np.int32]) -> float:
    """Mean −log p of tokens [n] under logits [n, V] that predict them, in nats."""
    chosen = torch.log_softmax(logits.double(), dim=-1)[
        torch.arange(len(tokens)), torch.from_numpy(tokens).long()
    ]
    return float(-chosen.mean())


def worst_decile(values: Floats) -> float:
    """Mean of the largest tenth of the values (at least one of them)."""
    if values.size == 0:
        return float("nan")
    return float(np.sort(values)[-max(1, values.size // 10) :].mean())


def mean(values: Floats) -> Floats:
    """The statistic `mean` for `bootstrap`: [B, n] to [B]."""
    return np.asarray(values.mean(axis=1))


def gap_closed(pairs: Floats) -> Floats:
    """The share of the naive-to-full KL gap that a policy closes: [B, n, 2] to [B].

    Columns are (KL of naive, KL of the policy), both to full: 1 − ΣKL(policy) / ΣKL(naive).
    1 is full, 0 is naive, below 0 is worse than naive. NaN where naive has no gap.
    """
    total = pairs.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total[:, 0] > 0.0, 1.0 - total[:, 1] / total[:, 0], np.nan)


def bootstrap(
    values: npt.ArrayLike,
    statistic: Statistic = mean,
    *,
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """A BCa bootstrap interval (Efron 1987) of a statistic over n independent samples [n, …].

    Bias-corrected and accelerated, since plain percentiles cover too little for the few, skewed
    samples that evaluations have. One sample, or equal samples, give no width to speak of: the
    bounds are then NaN or the value.

    Raises InvalidArgument for no samples, or a level outside (0, 1).
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or array.shape[0] == 0:
        raise InvalidArgument("bootstrap: expected at least one sample, got none")
    if not 0.0 < level < 1.0:
        raise InvalidArgument(f"bootstrap: expected 0 < level < 1, got {level}")
    n = array.shape[0]
    estimate = float(statistic(array[None])[0])
    if n == 1 or not np.isfinite(estimate):
        return Interval(estimate, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    drawn = statistic(array[rng.integers(0, n, size=(resamples, n))])
    left_out = np.stack([np.delete(array, i, axis=0) for i in range(n)])
    low, high = _bca_levels(estimate, drawn, statistic(left_out), level)
    bounds = np.nanquantile(drawn, [low, high])
    return Interval(estimate, float(bounds[0]), float(bounds[1]))


def _bca_levels(
    estimate: float, drawn: Floats, jackknife: Floats, level: float
) -> tuple[float, float]:
    """The quantiles of the resampled statistic that bound the interval."""
    normal = NormalDist()
    below = float(np.mean(drawn < estimate) + 0.5 * np.mean(drawn == estimate))
    # All resamples on one side would give an infinite correction.
    bias = normal.inv_cdf(min(max(below, 1 / (2 * drawn.size)), 1 - 1 / (2 * drawn.size)))
    apart = jackknife.mean() - jackknife
    spread = float((apart**2).sum())
    skew = float((apart**3).sum()) / (6.0 * spread**1.5) if spread > 0.0 else 0.0
    levels = []
    for tail in ((1.0 - level) / 2.0, (1.0 + level) / 2.0):
        z = bias + normal.inv_cdf(tail)
        levels.append(normal.cdf(bias + z / max(1.0 - skew * z, 1e-6)))
    return levels[0], levels[1]

"""Scores of heads at one prompt length, and how alike two sets of scores are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]

DIGITS = 4
"""Decimals that scores are kept to: what a map holds is what was ranked."""


@dataclass(frozen=True)
class LengthScores:
    """What was measured at one prompt length, each f64 [L, G], a mean over prompts, rounded.

    `edge`: attention mass outside sink and window, of the query head of the KV head that looks
    furthest. `retrieval`: mass of the rows that predict a hidden number on the sentence that holds
    it, likewise. `key_shift` and `value_shift`: relative distance that K and V move under another
    prefix. `overlap`: how much of a head's important pages consecutive rows share beyond chance.
    """

    length: int
    edge: Scores
    retrieval: Scores
    key_shift: Scores
    value_shift: Scores
    overlap: Scores

    def named(self) -> dict[str, Scores]:
        """The arrays by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "length"}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, four decimals."""
        return {name: rounded(values) for name, values in self.named().items()}


def rounded(values: Scores) -> Any:
    """Nested lists of four decimals."""
    return np.round(values, DIGITS).tolist()


def furthest(mass: Scores, kv_heads: int) -> Scores:
    """Mass of query heads [L, H] as that of KV heads [L, G]: the largest of a head's queries.

    A KV head must be kept whole as soon as one query head reads far with it.
    """
    return np.asarray(mass.reshape(len(mass), kv_heads, -1).max(-1))


def top(scores: Scores, count: int) -> npt.NDArray[np.bool_]:
    """The `count` highest scores, bool [L, G]; of equal ones the first in order of layers."""
    chosen = np.zeros(scores.size, bool)
    chosen[np.argsort(-scores, axis=None, kind="stable")[:count]] = True
    return chosen.reshape(scores.shape)


def rank_correlation(one: Scores, other: Scores) -> float:
    """Spearman's: correlation of ranks, equal values sharing theirs; NaN where one is constant."""
    a, b = _ranks(one), _ranks(other)
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread else float("nan")


def _ranks(scores: Scores) -> Scores:
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place.ravel()]


def agreement(classes: Sequence[npt.NDArray[np.bool_]]) -> float:
    """The share of heads that all of some classifications put in the same class."""
    stacked = np.stack(classes)
    return float((stacked == stacked[0]).all(0).mean())

"""What a head map does to a model: KL of its next tokens, measured on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument
from kvweave.lab.eval import kl_per_token
from kvweave.lab.profile.head_profile import HeadProfile
from kvweave.lab.profile.texts import ProfileText
from kvweave.plan import Rows
from kvweave.runner import Runner
from kvweave.runner.progress import track

SCORED = 128
"""Last tokens of a plain text whose next-token distributions are compared."""

MakeRunner = Callable[[HeadClassMap | None], Runner]
"""A runner of the model under a map; None: every head whole."""


@dataclass(frozen=True)
class Effect:
    """Mean KL to the whole model in nats a token, the texts being forced.

    `text`: over the last tokens of plain texts. `answers`: over the tokens of hidden numbers, which
    a model that does not look back cannot know; None where no text hides any.
    """

    text: float
    answers: float | None

    @property
    def worst(self) -> float:
        """The larger of the two.

        A head that retrieves may matter a hundred times more to answers than to running text, so a
        bound on text alone would let it go.
        """
        return self.text if self.answers is None else max(self.text, self.answers)


class EffectMeter:
    """Compares maps with the whole model on fixed texts; at least one of them plain."""

    def __init__(self, make_runner: MakeRunner, texts: Sequence[ProfileText]) -> None:
        if not any(text.kind == "text" for text in texts):
            raise InvalidArgument("effect: expected at least one plain text, got none")
        self.make_runner = make_runner
        self.texts = tuple(texts)
        whole = make_runner(None)
        self._whole = [_logits(whole, t) for t in track(self.texts, "whole model", whole.progress)]

    def measure(self, heads: HeadClassMap) -> Effect:
        """The effect of one map; errors as the runner's for it."""
        runner = self.make_runner(heads)
        found: dict[str, list[float]] = {"text": [], "needle": []}
        for text, whole in zip(self.texts, self._whole, strict=True):
            found[text.kind] += kl_per_token(whole, _logits(runner, text)).tolist()
        answers = float(np.mean(found["needle"])) if found["needle"] else None
        return Effect(float(np.mean(found["text"])), answers)


@dataclass(frozen=True)
class SmallestShare:
    """The fewest global heads that keep to a bound, and every count that was tried."""

    bound: float
    count: int
    effect: Effect
    tried: tuple[tuple[int, Effect], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "bound": self.bound,
            "global_heads": self.count,
            **asdict(self.effect),
            "tried": [{"global_heads": count, **asdict(effect)} for count, effect in self.tried],
        }


def smallest_share(
    profile: HeadProfile,
    meter: EffectMeter,
    bound: float,
    *,
    sink: int | None = None,
    recent: int | None = None,
) -> SmallestShare:
    """Bisects the ranking for the fewest global heads whose KL is within a bound.

    The bound holds for both means of an `Effect`. The count returned was measured to keep to it,
    and one head fewer not to. KL need not fall with every further head, so a still smaller count
    may keep to it too. Every head global is no change at all: it needs no measuring.

    # Errors
    `InvalidArgument` for a bound that is not positive.
    """
    if not bound > 0.0:
        raise InvalidArgument(f"kl: expected a bound > 0 nats a token, got {bound}")
    tried: dict[int, Effect] = {}
    low, high = 0, profile.heads
    best = Effect(0.0, 0.0 if any(t.kind == "needle" for t in meter.texts) else None)
    while low < high:
        middle = (low + high) // 2
        tried[middle] = meter.measure(profile.map(count=middle, sink=sink, recent=recent))
        if tried[middle].worst <= bound:
            high, best = middle, tried[middle]
        else:
            low = middle + 1
    return SmallestShare(bound, high, best, tuple(sorted(tried.items())))


def _logits(runner: Runner, text: ProfileText) -> torch.Tensor:
    """Logits f32 [n, V] of the rows that are compared, on the host."""
    rows = _compared(text)
    first = int(rows[0])
    prompt = text.tokens.tolist()
    with runner.prefill(prompt, "full", logits_from=first, remember=False) as done:
        return done.logits[torch.from_numpy(rows - first).long()].float().cpu()


def _compared(text: ProfileText) -> Rows:
    if text.kind == "needle":
        return text.rows
    length = len(text.tokens)
    return np.arange(max(0, length - SCORED), length, dtype=np.int32)

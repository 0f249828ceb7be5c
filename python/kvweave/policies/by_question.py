"""What `prophet` and `infoflow` have in common: the question asks, the tokens that it names follow.

The fresh rows go through the layers over the KV as it is, and each reused token is weighed by what
the question gives to it. The heaviest are recomputed once, in all layers, with the fresh rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvweave.plan import Plans, PlanStep, ProbeResult, PromptView, one_pass
from kvweave.policies.base import Reuse
from kvweave.policies.budget import check_budget, rows_of
from kvweave.policies.row_sets import highest, scores_of, union


@dataclass(frozen=True)
class ByQuestion(ABC):
    """Recomputes a `share` of the reused tokens, or `count` of them.

    Nothing is measured where that is none or all of them.
    """

    share: float
    count: int | None = None
    name: ClassVar[str]
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    passes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_budget(self.name, self.share, self.count)

    @abstractmethod
    def weights(self, prompt: PromptView) -> Generator[PlanStep, ProbeResult, torch.Tensor]:
        """The first pass; returns the weight of each token, f32 [T]."""

    def rewrites_segments(self, layers: int) -> bool:
        """Only the chosen tokens are written."""
        return False

    def plan(self, prompt: PromptView) -> Plans:
        """The fresh rows to ask, then these and the chosen ones through all layers."""
        reused = prompt.reused
        count = rows_of(self.share, self.count, len(reused))
        chosen = reused[:count]
        if 0 < count < len(reused):
            weights = yield from self.weights(prompt)
            chosen = highest(scores_of(weights, reused), reused, count)
        yield from one_pass(prompt.layers, union(prompt.fresh, chosen))

"""`random`: recompute tokens drawn by lot, the control that a chosen set has to beat.

What a policy's choice is worth shows against the same number of rows chosen by nobody. The draw
depends on the seed and the length of the prompt alone, so two prompts of one length with the same
segments recompute the same positions, and a run can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvweave.arguments import whole
from kvweave.plan import Plans, PromptView, Rows, one_pass
from kvweave.policies.base import Reuse
from kvweave.policies.budget import check_budget, rows_of
from kvweave.policies.row_sets import union


@dataclass(frozen=True)
class RandomRows:
    """Recomputes a share of the reused tokens, or `count` of them, each as likely as any other."""

    share: float = 0.15
    count: int | None = None
    seed: int = 0
    name: ClassVar[str] = "random"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = False
    passes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_budget(self.name, self.share, self.count)
        whole(self.name, self.seed, 0, name="seed")

    def rewrites_segments(self, layers: int) -> bool:
        """Only the drawn tokens are written."""
        return False

    def drawn(self, prompt: PromptView) -> Rows:
        """The reused tokens that are recomputed, sorted."""
        lot = np.random.default_rng((self.seed, prompt.tokens))
        reused = prompt.reused
        count = rows_of(self.share, self.count, len(reused))
        drawn: Rows = np.sort(lot.choice(reused, count, replace=False, shuffle=False))
        return drawn

    def plan(self, prompt: PromptView) -> Plans:
        """The fresh rows and the drawn ones, in all layers."""
        yield from one_pass(prompt.layers, union(prompt.fresh, self.drawn(prompt)))

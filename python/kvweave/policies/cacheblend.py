"""`cacheblend`: recompute the tokens whose KV moves most in the new context.

CacheBlend computes the first layer whole, compares the second layer's fresh K, V of every token
with the cached ones, and keeps the tokens that moved most; later layers look again among those
kept, so the set shrinks layer by layer to the wanted ratio (its "gradual filtering").
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from kvweave.arguments import real
from kvweave.plan import LayerPlan, Probe, ProbeResult, PromptView
from kvweave.policies.base import Reuse
from kvweave.policies.row_sets import highest, scores_of, union


@dataclass(frozen=True)
class CacheBlend:
    """Recomputes on average `ratio` of the reused tokens, `spread` times that at first.

    The share kept falls evenly from `ratio·spread` in the second layer to `ratio·(2 − spread)`
    in the last.
    """

    ratio: float = 0.15
    spread: float = 1.2
    name: ClassVar[str] = "cacheblend"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    passes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        real("cacheblend", self.ratio, 0.0, 1.0, name="ratio")
        real("cacheblend", self.spread, 1.0, 2.0, name="spread")

    def rewrites_segments(self, layers: int) -> bool:
        """The first layer writes every token."""
        return True

    def kept(self, layer: int, layers: int) -> float:
        """The share of reused tokens that a layer keeps, for layer ≥ 1."""
        if layers < 3:
            return self.ratio
        through = (layer - 1) / (layers - 2)
        share = self.ratio * (self.spread + through * (2.0 - 2.0 * self.spread))
        return min(1.0, share)

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, ProbeResult, None]:
        """All rows first, then ever fewer of those whose KV moved."""
        reused, rows = prompt.reused, prompt.unsettled
        is_reused = np.zeros(prompt.tokens, bool)
        is_reused[reused] = True
        yield LayerPlan(0, rows)
        for layer in range(1, prompt.layers):
            moved = yield LayerPlan(layer, rows, Probe.DEVIATION)
            assert isinstance(moved, torch.Tensor)
            index = np.flatnonzero(is_reused[rows])
            count = round(self.kept(layer, prompt.layers) * len(reused))
            chosen = highest(scores_of(moved, index), rows[index], count)
            rows = union(prompt.fresh, chosen)
            yield LayerPlan(layer, rows)

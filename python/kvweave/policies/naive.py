"""`naive`: reused segments are taken as they are; only the other tokens are computed."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from kvweave.plan import LayerPlan, ProbeResult, PromptView
from kvweave.policies.base import Reuse


@dataclass(frozen=True)
class Naive:
    """Recomputes nothing. `delta_rope=False` is the control with keys left at old positions."""

    delta_rope: bool = True
    reuse: ClassVar[Reuse] = "segments"
    measures: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """`naive`, or `naive-no-rope` for the control."""
        return "naive" if self.delta_rope else "naive-no-rope"

    def rewrites_segments(self, layers: int) -> bool:
        """Only fresh tokens are written."""
        return False

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, ProbeResult, None]:
        """The fresh rows, in all layers."""
        for layer in range(prompt.layers):
            yield LayerPlan(layer, prompt.fresh)

"""`naive`: reused segments are taken as they are; only the other tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvweave.plan import Plans, PromptView, one_pass
from kvweave.policies.base import Reuse


@dataclass(frozen=True)
class Naive:
    """Recomputes nothing. `delta_rope=False` is the control with keys left at old positions."""

    delta_rope: bool = True
    reuse: ClassVar[Reuse] = "segments"
    measures: ClassVar[bool] = False
    passes: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """`naive`, or `naive-no-rope` for the control."""
        return "naive" if self.delta_rope else "naive-no-rope"

    def rewrites_segments(self, layers: int) -> bool:
        """Only fresh tokens are written."""
        return False

    def plan(self, prompt: PromptView) -> Plans:
        """The fresh rows, in all layers."""
        return one_pass(prompt.layers, prompt.fresh)

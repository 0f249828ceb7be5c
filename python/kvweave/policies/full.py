"""`full`: every token is computed; nothing is taken from the cache. The reference."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from kvweave.plan import LayerPlan, ProbeResult, PromptView
from kvweave.policies.base import Reuse


@dataclass(frozen=True)
class Full:
    """Computes the whole prompt."""

    name: ClassVar[str] = "full"
    reuse: ClassVar[Reuse] = "none"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = False

    def rewrites_segments(self, layers: int) -> bool:
        """Nothing is reused, so nothing is written again."""
        return False

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, ProbeResult, None]:
        """All rows in all layers."""
        rows = prompt.after_prefix
        for layer in range(prompt.layers):
            yield LayerPlan(layer, rows)

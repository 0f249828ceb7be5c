"""`prefix`: the longest exact prefix comes from the cache; the rest is computed. Lossless."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from kvweave.plan import LayerPlan, ProbeResult, PromptView
from kvweave.policies.base import Reuse


@dataclass(frozen=True)
class Prefix:
    """Computes what follows the exact prefix."""

    name: ClassVar[str] = "prefix"
    reuse: ClassVar[Reuse] = "prefix"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = False

    def rewrites_segments(self, layers: int) -> bool:
        """No segment is reused."""
        return False

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, ProbeResult, None]:
        """The rows after the prefix, in all layers."""
        rows = prompt.after_prefix
        for layer in range(prompt.layers):
            yield LayerPlan(layer, rows)

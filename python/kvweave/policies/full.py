"""`full`: every token is computed; nothing is taken from the cache. The reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvweave.plan import Plans, PromptView, one_pass
from kvweave.policies.base import Reuse


@dataclass(frozen=True)
class Full:
    """Computes the whole prompt."""

    name: ClassVar[str] = "full"
    reuse: ClassVar[Reuse] = "none"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = False
    passes: ClassVar[int] = 1

    def rewrites_segments(self, layers: int) -> bool:
        """Nothing is reused, so nothing is written again."""
        return False

    def plan(self, prompt: PromptView) -> Plans:
        """All rows in all layers."""
        return one_pass(prompt.layers, prompt.after_prefix)

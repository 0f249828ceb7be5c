"""`prefix`: the longest exact prefix comes from the cache; the rest is computed. Lossless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvweave.plan import Plans, PromptView, one_pass
from kvweave.policies.base import Reuse


@dataclass(frozen=True)
class Prefix:
    """Computes what follows the exact prefix."""

    name: ClassVar[str] = "prefix"
    reuse: ClassVar[Reuse] = "prefix"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = False
    passes: ClassVar[int] = 1

    def rewrites_segments(self, layers: int) -> bool:
        """No segment is reused."""
        return False

    def plan(self, prompt: PromptView) -> Plans:
        """The rows after the prefix, in all layers."""
        return one_pass(prompt.layers, prompt.after_prefix)

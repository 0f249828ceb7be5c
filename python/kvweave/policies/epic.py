"""`epic`: the first tokens of every reused segment are recomputed too.

EPIC (position-independent caching) observes that a segment encoded alone gives its first tokens
the role of attention sinks; recomputing them in place ("link" tokens) takes that role away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvweave.arguments import whole
from kvweave.plan import Plans, PromptView, one_pass
from kvweave.policies.base import Reuse
from kvweave.policies.row_sets import openings, union


@dataclass(frozen=True)
class Epic:
    """Recomputes the first `first` tokens of each reused segment."""

    first: int = 16
    name: ClassVar[str] = "epic"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = False
    passes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        whole("epic", self.first, 0, name="first")

    def rewrites_segments(self, layers: int) -> bool:
        """Only the first tokens are written."""
        return False

    def plan(self, prompt: PromptView) -> Plans:
        """The fresh rows and each segment's first rows, in all layers."""
        return one_pass(prompt.layers, union(prompt.fresh, openings(prompt, self.first)))

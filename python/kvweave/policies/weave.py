"""`weave`: foresight's rows × RedKnot's heads × RedKnot's feed-forward, in one plan.

`foresight` chooses the rows: the first pass and the draft are its own, in which every head and
every feed-forward runs, for the fresh rows are few and what they look at is what counts. The second
pass computes the chosen rows. There global heads are written for all of them, and local heads keep
what they hold but for the seams and the last window; in the last layers only the rows that matter
in the layer run the feed-forward, and a local head whose attention lies too much outside its window
is made full. Each axis can be switched off: `RedKnot(dense_until=1, restore_edge=1, repair=n)` for
n above any segment leaves foresight's rows under a head map.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvweave.errors import InvalidArgument
from kvweave.plan import LayerPlan, Plans, PromptView
from kvweave.policies.base import Reuse
from kvweave.policies.foresight import Foresight
from kvweave.policies.redknot import Recovery, RedKnot


@dataclass(frozen=True)
class Weave:
    """Rows by `foresight`, heads and feed-forward by `redknot`.

    The rows are the important ones already, so by default half of them run every feed-forward.
    """

    foresight: Foresight = field(default_factory=Foresight)
    redknot: RedKnot = field(default_factory=lambda: RedKnot(dense_until=0.75, ffn_share=0.5))
    name: ClassVar[str] = "weave"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    passes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not isinstance(self.foresight, Foresight) or not isinstance(self.redknot, RedKnot):
            raise InvalidArgument(
                "weave: expected a Foresight and a RedKnot, got "
                f"{type(self.foresight).__name__} and {type(self.redknot).__name__}"
            )

    def rewrites_segments(self, layers: int) -> bool:
        """Only the chosen tokens are written."""
        return False

    def plan(self, prompt: PromptView) -> Plans:
        """Foresight's look and draft, then its rows with RedKnot's spared heads and rows."""
        rows = yield from self.foresight.rows(prompt)
        dense, recovery = self.redknot.dense_layers(prompt.layers), Recovery(self.redknot, prompt)
        for layer in range(prompt.layers):
            yield from recovery.plans(LayerPlan(layer, rows), layer >= dense)

"""`weave`: SparseX's rows × RedKnot's heads × RedKnot's feed-forward, in one plan.

`sparsex` chooses the rows: fresh, top-k by Sparse-Q, overflow, tail. Its layers before ℓ* are the
budget for a refresh of the whole chunk, whose hidden states are then known for every token: there
global heads are written for all of it, and local heads keep what they hold but for the seams.
Later layers compute the chosen rows alone, and in the last ones only those of them that matter in
the layer run the feed-forward. Each axis is what its paper says and can be switched off:
`RedKnot(dense_until=1, restore_edge=1)` leaves SparseX's rows under a head map.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvweave.errors import InvalidArgument
from kvweave.plan import LayerPlan, ProbeResult, PromptView
from kvweave.policies.base import Reuse
from kvweave.policies.redknot import Recovery, RedKnot
from kvweave.policies.sparsex import SparseX


@dataclass(frozen=True)
class Weave:
    """Rows by `sparsex`, heads and feed-forward by `redknot`.

    The rows are the important ones already, so by default half of them run every feed-forward.
    """

    sparsex: SparseX = field(default_factory=SparseX)
    redknot: RedKnot = field(default_factory=lambda: RedKnot(dense_until=0.75, ffn_share=0.5))
    name: ClassVar[str] = "weave"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    passes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.sparsex, SparseX) or not isinstance(self.redknot, RedKnot):
            raise InvalidArgument(
                "weave: expected a SparseX and a RedKnot, got "
                f"{type(self.sparsex).__name__} and {type(self.redknot).__name__}"
            )

    def rewrites_segments(self, layers: int) -> bool:
        """The layers before ℓ* write global heads alone: blocks are per group."""
        return False

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, ProbeResult, None]:
        """SparseX's plans, each with RedKnot's spared heads and rows."""
        dense = self.redknot.dense_layers(prompt.layers)
        steps, recovery = self.sparsex.plan(prompt), Recovery(self.redknot, prompt)
        plan = next(steps)
        while True:
            if plan.layer == 0 or plan.probe is not None:
                answer = yield replace(plan, local_rows=recovery.repaired(plan))
            else:
                yield from recovery.plans(plan, plan.layer >= dense)
                answer = None
            try:
                plan = steps.send(answer)
            except StopIteration:
                return

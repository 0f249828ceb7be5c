"""`foresight`: read the question over the KV as it is, then recompute what it looked at (ours).

The first pass sends the fresh rows alone through every layer, over segments of which nothing was
recomputed, and measures in the deeper layers how much attention the question gives to each token.
A draft of the answer, decoded from the same KV, asks too: its queries look at what the question
does not name, such as the next link of a chain. Both weigh alike, whatever their lengths. The
tokens that hold most of this mass, averaged with their neighbours', are then recomputed once,
together with the question; fresh text between segments has been read once and competes with them.
KV that was encoded elsewhere is good enough to see where the model looks; what it looks at is what
has to be right.

That the user's question, asked in all layers, says what to recompute is ProphetKV's idea (ICML
2026, arXiv 2602.02579); InfoFlow KV (arXiv 2603.05353) ranks by the question's attention too. Ours
are the deeper layers alone, the draft, and the budget by mass.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from kvweave.arguments import real, whole
from kvweave.errors import InvalidArgument
from kvweave.plan import (
    Draft,
    LayerPlan,
    Plans,
    PlanStep,
    Probe,
    ProbeResult,
    PromptView,
    Rows,
    one_pass,
)
from kvweave.policies.base import Reuse
from kvweave.policies.budget import rows_of
from kvweave.policies.depth import first_layer
from kvweave.policies.row_sets import (
    TAIL,
    averaged,
    heaviest,
    highest,
    question,
    scores_of,
    tail,
    union,
)

DEFAULT_SHARE = 0.15
"""Of the reused tokens, recomputed unless another budget is named."""


@dataclass(frozen=True)
class Foresight:
    """Recomputes the reused tokens that the question and a draft of its answer look at.

    The budget is one of: as many rows as a `share` of the reused tokens; `count` of them; or
    `mass`, the fewest that hold this share of the mass on all that may be chosen, and at most a
    share `most` of the reused tokens; none of them: a share of 0.15. `draft`: tokens of the answer
    that ask too, 0 for none, and `drafts` how many answers are drafted so, each from another of the
    likeliest first tokens. `depth`: share of the layers that are passed over before attention is
    measured. `near`: tokens over which mass is averaged, an odd number; 1 for none. `ask`: the last
    rows of the question that ask, at most.
    """

    share: float | None = None
    count: int | None = None
    mass: float | None = None
    most: float = 0.4
    draft: int = 8
    drafts: int = 1
    depth: float = 1 / 3
    near: int = 3
    ask: int = 512
    name: ClassVar[str] = "foresight"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    passes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        given = [name for name in ("share", "count", "mass") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidArgument(
                f"foresight: expected one of share, count and mass, got {' and '.join(given)}"
            )
        for name in ("share", "mass", "most", "depth"):
            value = getattr(self, name)
            if value is not None or name in ("most", "depth"):
                real("foresight", value, 0.0, 1.0, name=name)
        if self.count is not None:
            whole("foresight", self.count, 0, name="count")
        whole("foresight", self.draft, 0, name="draft")
        whole("foresight", self.drafts, 1, name="drafts")
        whole("foresight", self.ask, 1, name="ask")
        if whole("foresight", self.near, 1, name="near") % 2 == 0:
            raise InvalidArgument(f"foresight: expected an odd near >= 1, got {self.near}")

    def rewrites_segments(self, layers: int) -> bool:
        """Only the chosen tokens are written."""
        return False

    def budget(self, reused: int) -> int:
        """The most of so many reused tokens that are recomputed."""
        if self.mass is not None:
            return round(self.most * reused) if self.mass > 0.0 else 0
        share = DEFAULT_SHARE if self.share is None else self.share
        return rows_of(share, self.count, reused)

    def plan(self, prompt: PromptView) -> Plans:
        """The fresh rows, a draft, and then the question's rows with the chosen ones."""
        rows = yield from self.rows(prompt)
        yield from one_pass(prompt.layers, rows)

    def rows(self, prompt: PromptView) -> Generator[PlanStep, ProbeResult, Rows]:
        """The first pass and the draft, where there is something to choose; returns the last rows.

        These are the chosen ones and the question's.
        """
        reused = prompt.reused
        budget = self.budget(len(reused))
        if budget == 0:
            return prompt.fresh
        if budget == len(reused) and self.mass is None:
            return union(prompt.fresh, reused)
        mass = yield from self.look(prompt)
        asked = question(prompt)
        candidates = self.candidates(prompt, asked)
        at_most = budget if budget < len(reused) else len(candidates)
        return union(self.choose(mass, candidates, at_most), asked)

    def candidates(self, prompt: PromptView, asked: Rows) -> Rows:
        """The rows that may be chosen: reused ones, and fresh ones between them and the question.

        Fresh rows before the first segment see nothing that changes.
        """
        behind = prompt.fresh[prompt.fresh > prompt.segments[0][0]]
        between: Rows = np.setdiff1d(behind, asked, assume_unique=True)
        return union(prompt.reused, between)

    def look(self, prompt: PromptView) -> Generator[PlanStep, ProbeResult, torch.Tensor]:
        """The first pass and the draft; returns the mass of each token, f32 [T], on the device."""
        asking = self.asking(prompt)
        rows, since = union(prompt.fresh, asking), first_layer(self.depth, prompt.layers)
        mass: torch.Tensor | None = None
        for layer in range(prompt.layers):
            if layer < since:
                yield LayerPlan(layer, rows)
                continue
            found = yield LayerPlan(layer, rows, Probe.SCORES, asking)
            assert isinstance(found, torch.Tensor)
            mass = found if mass is None else mass.add_(found)
        assert mass is not None
        mass /= len(asking)
        if self.draft:
            drafted = yield Draft(self.draft, since, self.drafts)
            if isinstance(drafted, torch.Tensor):
                mass += drafted / self.draft
        return mass

    def asking(self, prompt: PromptView) -> Rows:
        """The rows whose queries ask: the question, which is the last run of fresh rows.

        Where the prompt ends in reused text that run is the last token alone, and the last reused
        tokens ask with it.
        """
        return union(question(prompt)[-self.ask :], tail(prompt, TAIL))

    def choose(self, mass: torch.Tensor, candidates: Rows, budget: int) -> Rows:
        """The candidates of most mass, within the budget."""
        among = scores_of(averaged(mass, self.near), candidates)
        if self.mass is None:
            return highest(among, candidates, budget)
        chosen, _ = heaviest(among, candidates, self.mass, budget, mass[:0])
        return chosen

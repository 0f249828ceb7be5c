"""`prophet`: recompute what the question looks at in all layers (ProphetKV, ICML 2026).

ProphetKV (arXiv 2602.02579, Algorithm 1) runs the user query over the cached KV before anything is
recomputed. Stage I: in every layer each token of the context gets the softmax weight α that the
query's tokens give to it, summed over these and over heads; the softmax runs over the context's
keys. Stage II: the mean of α over all layers (eq. 8) ranks the tokens, and the first 20 % are
recomputed once, through all layers, with the query.

Where the paper leaves room:

- What the query is. Its prompts are chunks and then a query; here the last run of fresh tokens
  asks. Other fresh text is computed in both passes, counts as context where it comes before the
  question, and is no candidate.
- Where the queries of deeper layers come from. Here the question attends to all of the cached KV on
  its way up, as it would without any recovery; for scoring alone its own keys take no share.
- Under a head map a local head counts its window from the last token of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvweave.plan import LayerPlan, Plans, Probe, PromptView, one_pass
from kvweave.policies.base import Reuse
from kvweave.policies.budget import check_budget, rows_of
from kvweave.policies.row_sets import highest, question, scores_of, union


@dataclass(frozen=True)
class Prophet:
    """Recomputes a share of the reused tokens, or `count` of them, by the question's attention.

    Nothing is measured where that is none or all of them.
    """

    share: float = 0.2
    count: int | None = None
    name: ClassVar[str] = "prophet"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    passes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_budget(self.name, self.share, self.count)

    def rewrites_segments(self, layers: int) -> bool:
        """Only the chosen tokens are written."""
        return False

    def plan(self, prompt: PromptView) -> Plans:
        """The fresh rows through all layers to ask, then these and the chosen ones."""
        reused = prompt.reused
        count = rows_of(self.share, self.count, len(reused))
        chosen = reused[:count]
        if 0 < count < len(reused):
            weights = torch.zeros(())
            asking = question(prompt)
            for layer in range(prompt.layers):
                found = yield LayerPlan(layer, prompt.fresh, Probe.CONTEXT, asking)
                assert isinstance(found, torch.Tensor)
                weights = found if layer == 0 else weights + found
            chosen = highest(scores_of(weights, reused), reused, count)
        yield from one_pass(prompt.layers, union(prompt.fresh, chosen))

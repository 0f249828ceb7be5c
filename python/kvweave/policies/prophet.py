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

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvweave.plan import LayerPlan, PlanStep, Probe, ProbeResult, PromptView
from kvweave.policies.by_question import ByQuestion
from kvweave.policies.row_sets import question


@dataclass(frozen=True)
class Prophet(ByQuestion):
    """Recomputes a share of the reused tokens, or `count` of them, by the question's attention.

    Nothing is measured where that is none or all of them.
    """

    share: float = 0.2
    name: ClassVar[str] = "prophet"

    def weights(self, prompt: PromptView) -> Generator[PlanStep, ProbeResult, torch.Tensor]:
        """The mass that the question gives to each token, summed over all layers."""
        weights, asking = torch.zeros(()), question(prompt)
        for layer in range(prompt.layers):
            found = yield LayerPlan(layer, prompt.fresh, Probe.CONTEXT, asking)
            assert isinstance(found, torch.Tensor)
            weights = found if layer == 0 else weights + found
        return weights

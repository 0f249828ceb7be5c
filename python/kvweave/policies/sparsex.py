"""`sparsex`: recompute what the fresh tokens attend to (SparseX, Algorithm 1).

Layers before the boundary ℓ* compute every token. At the boundary the Sparse-Q scores, the
attention mass that the fresh tokens give to each token summed over rows and heads (§3.2, eq. 1–3),
pick the top-k tokens; the blocks beside each fresh interval join (overflow, §3.3), and the last
64 tokens when the prompt ends in reused text (§3.2, fallback). Later layers compute those alone
(§3.4). With ℓ* = 0 the scores come from the first layer's queries and the aligned cached keys.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvweave.arguments import real, whole
from kvweave.plan import LayerPlan, Probe, ProbeResult, PromptView
from kvweave.policies.base import Reuse
from kvweave.policies.row_sets import highest, overflow, scores_of, seams, tail, union

DEFAULT_DEPTH = 0.15
"""ℓ* as a share of the layers: §3.4 sets 15–20 % for small dense models, 10–15 % for large."""


@dataclass(frozen=True)
class SparseX:
    """Sparse-Q selection with a full+sparse hybrid.

    `boundary` ℓ*: layers computed whole; None takes 15 % of the layers, 0 none. `top_k`: tokens
    chosen by score, a count (int) or a share of the reused tokens (float). `overflow`: blocks on
    each side of a fresh interval. `tail`: tokens recomputed when the prompt ends in reused text.
    """

    boundary: int | None = None
    top_k: int | float = 0.1
    overflow: int = 1
    tail: int = 64
    name: ClassVar[str] = "sparsex"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    passes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.boundary is not None:
            whole("sparsex", self.boundary, 0, name="boundary")
        if isinstance(self.top_k, float):
            real("sparsex", self.top_k, 0.0, 1.0, name="top_k")
        else:
            whole("sparsex", self.top_k, 0, name="top_k")
        whole("sparsex", self.overflow, 0, name="overflow")
        whole("sparsex", self.tail, 1, name="tail")

    def depth(self, layers: int) -> int:
        """ℓ* for a model of that many layers."""
        chosen = round(DEFAULT_DEPTH * layers) if self.boundary is None else self.boundary
        return min(chosen, layers)

    def rewrites_segments(self, layers: int) -> bool:
        """The layers before the boundary write every token."""
        return self.depth(layers) > 0

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, ProbeResult, None]:
        """Dense layers, one choice, then the chosen rows."""
        reused, everything = prompt.reused, prompt.unsettled
        sparse_q = union(prompt.fresh, tail(prompt, self.tail))
        near = overflow(seams(prompt), reused, self.overflow * prompt.page_tokens)
        rows = union(sparse_q, near)
        count = round(self.top_k * len(reused)) if isinstance(self.top_k, float) else self.top_k
        boundary = self.depth(prompt.layers)
        first = rows if boundary == 0 else everything
        probing = max(boundary - 1, 0)
        for layer in range(boundary - 1):
            yield LayerPlan(layer, first)
        scores = yield LayerPlan(probing, first, Probe.SCORES, sparse_q)
        assert isinstance(scores, torch.Tensor)
        rows = union(rows, highest(scores_of(scores, reused), reused, count))
        if boundary == 0:
            yield LayerPlan(0, rows)
        for layer in range(probing + 1, prompt.layers):
            yield LayerPlan(layer, rows)

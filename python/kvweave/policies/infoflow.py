"""`infoflow`: recompute what the question's rows attend to strongly in some deep layers.

InfoFlow KV (arXiv 2603.05353, ICML 2026) runs the question over the cached KV with all keys at
their final positions, and takes the attention that each of its rows gives to each token, mean over
query heads, in layers 22 to 25. A token's score is the norm of what it gets over the question's
rows, mean over these layers; the first 15 % of the context is recomputed in all layers.

Where the sources leave room:

- What the norm is. The authors' code (github.com/tx467/InfoFlow-KV, `norm`) takes the L2 norm over
  rows, so one row that looks hard counts for more than many that glance: that is the default.
  Others who built it after the paper read a plain sum there: `score="sum"`. What the code calls
  `vatp`, an ablation, weights the sum of each KV head by the norm of the token's value there:
  `score="value"`.
- Which layers to ask of a model of another depth. The band was used for models of 32 and of 40
  layers; a model that has none of 22 to 25 is asked in four layers from 22/36 of its depth on.
- Only the question asks in the authors' code, without the instructions around it. Here the last run
  of fresh tokens asks.

Left out: the paper's order of chunks, by which those with most chosen tokens come last. Where text
stands is the prompt's matter, and a policy finds it settled.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from kvweave.arguments import several, shown, whole
from kvweave.errors import InvalidArgument
from kvweave.plan import LayerPlan, PlanStep, Probe, ProbeResult, PromptView
from kvweave.policies.by_question import ByQuestion
from kvweave.policies.row_sets import question

Score = Literal["norm", "sum", "value"]

_PROBES: dict[Score, Probe] = {
    "norm": Probe.NORMS,
    "sum": Probe.SCORES,
    "value": Probe.VALUES,
}
_FIRST, _ASKED, _DEPTH = 22, 4, 36
"""The first layer that the paper asks and how many it does, in models of 36 layers or so."""


@dataclass(frozen=True)
class InfoFlow(ByQuestion):
    """Recomputes a share of the reused tokens, or `count` of them, by the question's attention.

    `layers`: those that are asked; None: the paper's, see above. `score`: what a token gets in one.
    Nothing is measured where the budget is none or all of the reused tokens.
    """

    share: float = 0.15
    layers: tuple[int, ...] | None = None
    score: Score = "norm"
    name: ClassVar[str] = "infoflow"

    def __post_init__(self) -> None:
        super().__post_init__()
        score: Any = self.score
        if not isinstance(score, str) or score not in _PROBES:
            raise InvalidArgument(
                f"infoflow: expected a score among {', '.join(_PROBES)}, got {shown(score)}"
            )
        if self.layers is None:
            return
        for layer in several("infoflow layers", self.layers, "layers"):
            whole("infoflow", layer, 0, name="layers")
        if not self.layers:
            raise InvalidArgument("infoflow: expected at least one of layers, got none")

    def asked(self, layers: int) -> tuple[int, ...]:
        """The layers that are asked in a model of that many, sorted.

        # Errors
        `InvalidArgument` for a layer that the model does not have.
        """
        if self.layers is not None:
            if max(self.layers) >= layers:
                raise InvalidArgument(
                    f"infoflow: expected layers below {layers}, got {self.layers}"
                )
            return tuple(sorted(set(self.layers)))
        has_them = layers >= _FIRST + _ASKED
        first = _FIRST if has_them else min(round(layers * _FIRST / _DEPTH), layers - 1)
        return tuple(range(first, min(first + _ASKED, layers)))

    def weights(self, prompt: PromptView) -> Generator[PlanStep, ProbeResult, torch.Tensor]:
        """What each token gets in the layers that are asked; the last of them ends the pass."""
        asked, asking = self.asked(prompt.layers), question(prompt)
        scores = torch.zeros(())
        for layer in range(asked[-1] + 1):
            if layer not in asked:
                yield LayerPlan(layer, prompt.fresh)
                continue
            found = yield LayerPlan(layer, prompt.fresh, _PROBES[self.score], asking)
            assert isinstance(found, torch.Tensor)
            scores = found if layer == asked[0] else scores + found
        return scores

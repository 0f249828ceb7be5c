"""A chunk of a held prompt, as a recovery policy sees it: a prompt of its own."""

from __future__ import annotations

import numpy as np
import torch

from kvweave.adapters.vllm.segments.store import Held, Rows
from kvweave.errors import InvalidArgument
from kvweave.plan import Draft, LayerPlan, Plans, Probe, ProbeResult, PromptView, one_pass


class ChunkPlan:
    """What each layer computes of tokens [start, end) of a prompt: a policy, asked layer by layer.

    `rows` are positions, sorted; `plan` is the current layer's. Tokens before `start` are done, so
    they count as the chunk's exact prefix. A chunk of which the store has nothing is all rows.
    """

    def __init__(self, held: Held, start: int, end: int, layers: int, kv_heads: int) -> None:
        self.held = held
        self.start, self.end = start, end
        self.layers = layers
        self.reused = np.flatnonzero(held.reused[start:end]).astype(np.int32) + np.int32(start)
        prefix = min(max(start, held.prefix), end)
        fresh = held.fresh
        inside = fresh[np.searchsorted(fresh, prefix) : np.searchsorted(fresh, end)]
        clipped = [(max(a, prefix), min(b, end)) for a, b in held.segments]
        self._spared: tuple[Rows, Rows] | None = None
        view = PromptView(
            tokens=end,
            layers=layers,
            page_tokens=16,
            prefix=prefix,
            fresh=inside,
            segments=tuple((a, b) for a, b in clipped if a < b),
            heads=np.zeros((layers, kv_heads, 2), np.int32),
        )
        # All of the chunk may be exact in the store: then no layer computes a row.
        nothing = one_pass(layers, np.zeros(0, np.int32))
        self._policy: Plans = nothing if prefix == end else held.policy.plan(view)
        self.plan = self._next(None)

    @property
    def rows(self) -> Rows:
        """Positions that the current layer computes."""
        return self.plan.rows

    @property
    def spared(self) -> Rows:
        """Reused positions of the chunk that the current layer does not compute.

        The same array for layers with the same rows.
        """
        if self._spared is None or self._spared[0] is not self.plan.rows:
            missing = np.setdiff1d(self.reused, self.plan.rows, assume_unique=True)
            self._spared = self.plan.rows, missing.astype(np.int32)
        return self._spared[1]

    def advance(self, result: torch.Tensor | None) -> bool:
        """The next plan; false where it is the first layer's once more, with further rows."""
        layer = self.plan.layer
        if layer + 1 == self.layers:
            return True
        self.plan = self._next(result)
        return self.plan.layer == layer + 1

    def _next(self, result: ProbeResult) -> LayerPlan:
        plan = self._policy.send(result)
        if isinstance(plan, Draft):
            raise InvalidArgument("policy: expected one pass and no draft, got a draft")
        if plan.probe not in (None, Probe.SCORES):
            raise InvalidArgument(f"policy: expected no probe but scores, got {plan.probe}")
        return plan

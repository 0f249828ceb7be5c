"""The pages behind a `PagedCache`, and the rows of prompts that are computed into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.transformers.kv_geometry import KvGeometry
from kvweave.cache import KvCache, KvRequest, ReusePlan
from kvweave.errors import Unsupported
from kvweave.plan import PromptView, Rows
from kvweave.plan_walk import PlanWalk
from kvweave.policies import Policy
from kvweave.runner.prefill.chunks import collected

Marks = Sequence[tuple[int, int, str]]
"""Segments of a prompt: start, end and namespace."""


@dataclass(frozen=True)
class PagePool:
    """A cache of a model's KV, all its pages [pages, 2, P, D], and how keys are turned there.

    `rope` has zeros for a model whose keys are never moved. `workspace`: on a GPU, what its
    attention keeps between calls.
    """

    geometry: KvGeometry
    cache: KvCache
    pages: torch.Tensor
    rope: ops.RopeTable
    policy: Policy
    discover: bool
    workspace: ops.Workspace | None

    def admit(self, tokens: Rows, marks: Marks) -> tuple[KvRequest, Rows]:
        """A prompt's request, its copies carried out, and the positions that are to be computed.

        # Errors
        `PoolFull` when it does not fit; nothing is held then.
        """
        segments = self.policy.reuse == "segments"
        request = self.cache.admit(
            tokens,
            segments=list(marks) if segments else [],
            discover=self.discover and segments,
            reuse=self.policy.reuse,
        )
        try:
            self.copy(request)
            return request, self.chosen(request.plan)
        except BaseException:
            request.release()
            raise

    def chosen(self, plan: ReusePlan) -> Rows:
        """The positions that the policy computes of a prompt: the same in all layers.

        # Errors
        `Unsupported` for a policy that chooses others in some layer.
        """
        geometry, start = self.geometry, plan.reused_prefix
        fresh = plan.rows()
        view = PromptView(
            tokens=plan.tokens,
            layers=geometry.layers,
            page_tokens=self.cache.shape.page_tokens,
            prefix=start,
            fresh=fresh[fresh >= start],
            segments=tuple((s.start, s.end) for s in plan.spans if s.kind == "segment"),
            heads=np.zeros((geometry.layers, geometry.kv_heads, 2), np.int32),
        )
        walk = PlanWalk(
            self.policy.plan(view),
            geometry.layers,
            plan.tokens,
            done=start,
            logits_from=plan.tokens - 1,
        )
        with walk:
            plans = collected(walk)
        rows = plans[0].rows
        for layer in plans:
            if layer.ffn_rows is not None or not np.array_equal(layer.rows, rows):
                raise Unsupported(
                    f"policy {self.policy.name}: expected the same rows in all layers, which is "
                    f"how a model's own forward computes them, got others in layer {layer.layer}"
                )
        return rows

    def copy(self, request: KvRequest) -> None:
        """Carries out the copies that a request asks for, turning keys on the way."""
        copies = request.take_copies()
        if not self.policy.delta_rope:
            copies[:, 5] = 0
        if len(copies):
            kv_heads = self.geometry.kv_heads
            ops.copy_rerotate(self.pages, copies, self.rope, kv_heads=kv_heads)
        request.finish_copies()

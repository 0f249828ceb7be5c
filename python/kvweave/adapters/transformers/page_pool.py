"""The pages behind a `PagedCache`, and the rows of prompts that are computed into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.transformers.kv_geometry import KvGeometry
from kvweave.adapters.transformers.packed_layers import LayeredPool
from kvweave.cache import KvCache, KvRequest, ReusePlan
from kvweave.errors import Unsupported
from kvweave.plan import PromptView, Rows
from kvweave.plan_walk import PlanWalk
from kvweave.policies import Policy
from kvweave.runner.kv.packed_pool import SINK_TOKENS
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.prefill.chunks import collected

Marks = Sequence[tuple[int, int, str]]
"""Segments of a prompt: start, end and namespace."""


@dataclass(frozen=True)
class Admitted:
    """A prompt's request, the positions that are to be computed, and what it has packed, if any."""

    request: KvRequest
    rows: Rows
    packed: PackedPrefix | None = None


@dataclass(frozen=True)
class PagePool:
    """A cache of a model's KV, all its pages [pages, 2, P, D], and how keys are turned there.

    `rope` has zeros for a model whose keys are never moved. `workspace`: on a GPU, what its
    attention keeps between calls. `packed`: what full pages are packed into; the cache keeps the
    first and the newest tokens then, and no prompt has segments.
    """

    geometry: KvGeometry
    cache: KvCache
    pages: torch.Tensor
    rope: ops.RopeTable
    policy: Policy
    discover: bool
    workspace: ops.Workspace | None
    packed: LayeredPool | None = None

    def admit(self, tokens: Rows, marks: Marks) -> Admitted:
        """A prompt's request, its copies carried out, and the positions that are to be computed.

        # Errors
        `PoolFull` when it does not fit; nothing is held then.
        """
        if self.packed is not None:
            return self._admit_packed(self.packed, tokens)
        segments = self.policy.reuse == "segments"
        request = self.cache.admit(
            tokens,
            segments=list(marks) if segments else [],
            discover=self.discover and segments,
            reuse=self.policy.reuse,
        )
        try:
            self.copy(request)
            return Admitted(request, self.chosen(request.plan))
        except BaseException:
            request.release()
            raise

    def _admit_packed(self, pool: LayeredPool, tokens: Rows) -> Admitted:
        """The same of a prompt that goes on behind what is found packed of it.

        Its request is as when all is computed: it has room for the first and the newest tokens.
        """
        reuse, length = "none" if self.policy.reuse == "none" else "prefix", len(tokens)
        packed = PackedPrefix(pool, tokens, namespace="", reuse=reuse, regime=0)
        try:
            request = self.cache.admit(tokens, reuse=reuse, chunk_tokens=1)
        except BaseException:
            packed.release()
            raise
        try:
            self.copy(request)
            start = packed.reused(request.plan.reused_prefix)
            if start > SINK_TOKENS:
                request.advance(start, start)
                self.copy(request)
                packed.unpack_newest(request)
            request.advance(length, length)
            self.copy(request)
            return Admitted(request, np.arange(start, length, dtype=np.int32), packed)
        except BaseException:
            request.release()
            packed.release()
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

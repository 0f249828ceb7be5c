"""Prefill of one prompt: look up → admit → copy → run the policy's plans → remember."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from kvweave import ops
from kvweave.cache import KvCache, KvRequest
from kvweave.plan import PromptView
from kvweave.policies import Policy
from kvweave.runner.clock import Clock, Mark
from kvweave.runner.executor import Executor, Hidden, Trace
from kvweave.runner.memory import resident_bytes, working_bytes
from kvweave.runner.model_spec import ModelSpec
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.report import Report, Timings
from kvweave.runner.rope import PositionTable, Rotary
from kvweave.runner.tables import send_index


@dataclass(frozen=True)
class Lookup:
    """What a prompt may take from the cache, and leave in it.

    `namespace` of the prompt itself; `discover` matches unmarked text by content; `remember`
    lets later prompts of the namespace find this one's blocks.
    """

    namespace: str = ""
    discover: bool = False
    remember: bool = True


class Prefill:
    """A prompt whose KV is in the pages: logits f32 [n, V], the report, the live request.

    A context manager; `release` gives the blocks back (they stay cached for later prompts).
    `exact` says that no segment was reused, so the KV is that of a full prefill.
    """

    def __init__(
        self,
        request: KvRequest,
        logits: torch.Tensor,
        report: Report,
        positions: PositionTable,
        exact: bool,
    ) -> None:
        self.request = request
        self.logits = logits
        self.report = report
        self.positions = positions
        self.exact = exact

    def release(self) -> None:
        """Gives the request's blocks back; safe to call twice."""
        self.request.release()

    def __enter__(self) -> Prefill:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Prefiller:
    """Prefills prompts of one model into one cache; `mode` is "materialise" or "share"."""

    def __init__(
        self,
        spec: ModelSpec,
        rotary: Rotary,
        cache: KvCache,
        pages: torch.Tensor,
        tiled: bool,
        mode: str,
    ) -> None:
        self.spec = spec
        self.rotary = rotary
        self.cache = cache
        self.pages = pages
        self.mode = mode
        self.clock = Clock(spec.device)
        self.executor = Executor(spec, pages, tiled)

    @torch.inference_mode()
    def prefill(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        *,
        logits_from: int | None = None,
        reserve_tokens: int = 0,
    ) -> Prefill:
        """Brings a prompt's KV into the pages.

        # Errors
        `PoolFull` when it does not fit. After any error the request holds nothing.
        """
        with self.spec.current():
            return self._prefill(prompt, policy, lookup, logits_from, reserve_tokens)

    def _prefill(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        logits_from: int | None,
        reserve_tokens: int,
    ) -> Prefill:
        start = time.perf_counter()
        positions = self.rotary.table(len(prompt.tokens))
        mode, mode_reason = self._mode_for(policy)
        request = self.cache.admit(
            prompt.tokens,
            namespace=lookup.namespace,
            segments=prompt.segments if policy.reuse == "segments" else (),
            discover=lookup.discover and policy.reuse == "segments",
            reuse=policy.reuse,
            mode=mode,
            reserve_tokens=reserve_tokens,
            regime=positions.regime,
        )
        timings = Timings(lookup_s=time.perf_counter() - start)
        try:
            copied = self._copy(request, positions, policy)
            length = len(prompt.tokens)
            first = length - 1 if logits_from is None else logits_from
            hidden, trace, exact = self._run(request, prompt, positions, policy, first)
            logits = self.executor.logits(hidden, first)
            self.clock.wait()
            timings.copy_s = Clock.seconds(*copied)
            timings.select_s = sum(Clock.seconds(*span) for span in trace.selections)
            timings.prefill_s = time.perf_counter() - start - timings.lookup_s - timings.copy_s
            if lookup.remember:
                request.commit(length, exact)
            report = self._report(request, policy, trace, timings)
            report.mode, report.mode_reason = mode, mode_reason
            report.device_bytes = self._device_bytes(report, len(logits))
        except BaseException:
            request.release()
            raise
        return Prefill(request, logits, report, positions, exact == length)

    def _mode_for(self, policy: Policy) -> tuple[str, str]:
        if self.mode == "share" and policy.rewrites_segments(len(self.spec.layers)):
            return "materialise", f"{policy.name} writes every reused token in some layer"
        if self.mode == "share" and not policy.delta_rope:
            return "materialise", f"{policy.name} leaves keys at their old positions"
        return self.mode, ""

    def _copy(
        self, request: KvRequest, positions: PositionTable, policy: Policy
    ) -> tuple[Mark, Mark]:
        """Copies what admission asked for; returns when that began and when it ends."""
        begin = self.clock.mark()
        copies = request.take_copies()
        if len(copies):
            if not policy.delta_rope:
                copies[:, 5] = 0
            ops.copy_rerotate(self.pages, copies, positions.rope, kv_heads=self.spec.kv_heads)
        request.finish_copies()
        return begin, self.clock.mark()

    def _run(
        self,
        request: KvRequest,
        prompt: TokenizedPrompt,
        positions: PositionTable,
        policy: Policy,
        logits_from: int,
    ) -> tuple[Hidden, Trace, int]:
        """The last layer's states, the trace, and how many leading tokens have exact KV."""
        length, plan = len(prompt.tokens), request.plan
        view = PromptView(
            tokens=length,
            layers=len(self.spec.layers),
            page_tokens=self.cache.shape.page_tokens,
            prefix=plan.reused_prefix,
            fresh=plan.rows(),
            segments=tuple((s.start, s.end) for s in plan.spans if s.kind == "segment"),
            heads=np.zeros((len(self.spec.layers), self.spec.kv_heads, 2), np.int32),
        )
        tokens = send_index(self.spec.device, prompt.tokens).long()
        hidden, trace = self.executor.prefill(
            request, tokens, positions, policy.plan(view), logits_from
        )
        return hidden, trace, view.segments[0][0] if view.segments else length

    def _device_bytes(self, report: Report, logits: int) -> int:
        rows = max(report.rows_per_layer)
        working = working_bytes(self.spec, report.tokens, rows, logits)
        return resident_bytes(self.spec, self.rotary, self.pages) + working

    def _report(self, request: KvRequest, policy: Policy, trace: Trace, timings: Timings) -> Report:
        plan = request.plan
        own, shared = request.block_counts()
        return Report(
            policy=policy.name,
            plan=plan,
            tokens=plan.tokens,
            reused_prefix=plan.reused_prefix,
            reused_segment=plan.reused_segment,
            recomputed=plan.recomputed,
            mode=self.mode,
            rows_per_layer=trace.rows_per_layer,
            timings=timings,
            kv_bytes=own * self.cache.block_bytes,
            shared_kv_bytes=shared * self.cache.block_bytes,
        )

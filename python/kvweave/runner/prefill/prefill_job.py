"""`PrefillJob`: the prefill of one prompt that stops between two chunks and goes on later."""

from __future__ import annotations

import time

import torch

from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument
from kvweave.policies import Policy
from kvweave.runner.clock import Clock
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.reused_tokens import ReusedTokens
from kvweave.runner.kv.tables import send_index
from kvweave.runner.prefill.chunks import spans
from kvweave.runner.prefill.executor import ChunkedRun
from kvweave.runner.prefill.prefill import Lookup, Prefill, Prefiller
from kvweave.runner.prefill.trace import Trace
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.report import Timings


class PrefillJob:
    """A prompt that has its blocks, and of which rows before `computed` have their KV.

    `advance` computes up to a position, in spans of at most `chunk_tokens`; `finish` gives the
    prefilled prompt once all T `tokens` are done. What is computed in one call, and by policies
    that measure in any case, is what `Prefiller.prefill` computes. One thread uses a job, that of
    the prefiller. After any error, and `release`, the request holds nothing.

    # Errors
    `PoolFull` when the prompt does not fit; whatever its policy raises.
    """

    @needs_memory("prefill")
    @torch.inference_mode()
    def __init__(
        self,
        prefiller: Prefiller,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        chunk_tokens: int,
    ) -> None:
        start = time.perf_counter()
        self._prefiller = prefiller
        self._policy = policy
        self._lookup = lookup
        self.tokens = len(prompt.tokens)
        self._chunk = 0 if policy.measures else chunk_tokens
        self._mode = prefiller.mode_for(policy)
        positions = prefiller.rotary.table(self.tokens)
        segments = policy.reuse == "segments"
        self.request = prefiller.cache.admit(
            prompt.tokens,
            namespace=lookup.namespace,
            segments=prompt.segments if segments else (),
            discover=lookup.discover and segments,
            reuse=policy.reuse,
            mode=self._mode[0],
            regime=positions.regime,
            chunk_tokens=self._chunk,
        )
        self._timings = Timings(lookup_s=time.perf_counter() - start)
        self._run: ChunkedRun | None = None
        self._whole: tuple[torch.Tensor, Trace] | None = None
        start = time.perf_counter()
        try:
            with prefiller.spec.current():
                kv = RequestKv(
                    prefiller.heads, prefiller.pages, self.request, positions, policy.delta_rope
                )
                kv.copy()
                prefiller.clock.wait()
                self._kv, self._view = kv, prefiller.view(self.request)
                self._ids = send_index(prefiller.spec.device, prompt.tokens).long()
        except BaseException:
            self.release()
            raise
        self._timings.copy_s = time.perf_counter() - start
        found = self._view.segments
        self._exact = found[0][0] if found else self.tokens
        self.computed = self._view.prefix

    @needs_memory("prefill")
    @torch.inference_mode()
    def advance(self, to: int) -> None:
        """Computes the rows before position `to` ≤ T that are not computed yet.

        A policy that measures computes all of the prompt at once, whatever `to`.

        # Errors
        `InvalidArgument` for a position behind the end; as for the job otherwise.
        """
        if to > self.tokens:
            raise InvalidArgument(f"prefill: expected a position up to {self.tokens}, got {to}")
        if to <= self.computed:
            return
        start = time.perf_counter()
        try:
            with self._prefiller.spec.current():
                self._advance(to)
                self._prefiller.clock.wait()
        except BaseException:
            self.release()
            raise
        self._timings.prefill_s += time.perf_counter() - start

    def _advance(self, to: int) -> None:
        prefix, executor = self._view.prefix, self._prefiller.executor
        if self._run is None:
            at_once = to == self.tokens and to - prefix <= self._chunk
            plans = self._policy.plan(self._view)
            if at_once or not self._chunk:
                last = self.tokens - 1
                self._whole = executor.prefill(self._kv, self._ids, plans, last, prefix)
                self.computed = self.tokens
                return
            self._run = executor.in_chunks(self._kv, self._ids, plans, self.tokens - 1, prefix)
        for first, end in spans(self.computed, to, self._chunk):
            if first > prefix:
                if self._lookup.at_once:
                    self.request.commit(first, min(first, self._run.trace.exact, self._exact))
                self._kv.advance(first, end)
            self._run.compute(first, end)
            self.computed = end

    @torch.inference_mode()
    def finish(self) -> Prefill:
        """The prefilled prompt, whose request it is from now on; its last logits are there.

        # Errors
        `InvalidArgument` while rows are to be computed yet.
        """
        if self.computed < self.tokens:
            raise InvalidArgument(
                f"prefill: expected all {self.tokens} tokens computed, got {self.computed}"
            )
        try:
            with self._prefiller.spec.current():
                return self._finished()
        except BaseException:
            self.release()
            raise

    def _finished(self) -> Prefill:
        if self._run is not None:
            self._whole = self._run.logits(), self._run.trace
        assert self._whole is not None
        logits, trace = self._whole
        request, view, length = self.request, self._view, self.tokens
        exact = min(self._exact, trace.exact)
        self._prefiller.clock.wait()
        self._timings.select_s = sum(Clock.seconds(*span) for span in trace.selections)
        if self._lookup.at_once:
            request.commit(length, exact)
        self._kv.advance(length, length)
        report = self._prefiller.report(request, self._policy, trace, self._timings, view)
        report.mode, report.mode_reason = self._mode
        report.device_bytes = self._prefiller.device_bytes(report, trace, len(logits))
        reused = ReusedTokens.of(view.segments)
        report.settled_now = reused.settle(trace.recomputed)
        return Prefill(self._kv, logits, report, self._lookup, exact, reused)

    def release(self) -> None:
        """Gives the request's blocks back; safe to call twice."""
        self.request.release()

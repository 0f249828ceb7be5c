"""`PrefillJob`, a prompt's way into the pages: look up → admit → copy → run the plans → remember.

It may stop between two chunks and go on later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from kvweave.cache import KvRequest
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument
from kvweave.plan import Plans, one_pass
from kvweave.policies import Policy
from kvweave.runner.clock import Clock, Mark, milliseconds
from kvweave.runner.kv.document_kv import DocumentKv
from kvweave.runner.kv.packed_documents import PackedDocuments
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.reused_tokens import ReusedTokens
from kvweave.runner.kv.tables import send_index
from kvweave.runner.model.rope import PositionTable
from kvweave.runner.prefill.chunks import spans
from kvweave.runner.prefill.executor import ChunkedRun
from kvweave.runner.prefill.lookup import Lookup, first_of
from kvweave.runner.prefill.prefill_context import PrefillContext
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prefill.trace import Trace
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.report import Timings
from kvweave.runner.tiers.arrivals import Arrivals, NotArrivedError
from kvweave.runner.tiers.brought import Brought
from kvweave.runner.tiers.expected import Expected
from kvweave.runner.tiers.final_packing import TextCopy


class PrefillJob:
    """A prompt that has its blocks, and of which rows before `computed` have their KV.

    `advance` computes up to a position, in spans of at most `chunk_tokens` (0: at once); `finish`
    gives the prefilled prompt once all T `tokens` are done. What is computed in one call, and by
    policies that measure in any case, is the same bits whenever it stops. One thread uses a job,
    that of the prefiller. After any error, and `release`, the request holds nothing.

    `logits_from`, `reserve_tokens`: as for `Runner.prefill`. `keep`: all KV stays with the request,
    also what lies behind the windows of its heads; it is computed at once then. `expected`: what
    its documents are to come from, if that was decided before. `copy` is given the pages that are
    packed. `at_once`: nobody else computes before the first `advance`, so that KV of its documents
    may come while that computes, and has come when it returns; where some does not come it begins
    anew, without them.

    # Errors
    `PoolFull` when the prompt does not fit; whatever its policy raises.
    """

    @needs_memory("prefill")
    @torch.inference_mode()
    def __init__(
        self,
        context: PrefillContext,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        chunk_tokens: int,
        *,
        logits_from: int | None = None,
        reserve_tokens: int = 0,
        keep: bool = False,
        expected: Expected | None = None,
        copy: TextCopy | None = None,
        at_once: bool = False,
    ) -> None:
        self.tokens = len(prompt.tokens)
        self._context = context
        self._prompt = prompt
        self._reserve = reserve_tokens
        self._policy = policy
        self._lookup = lookup
        self._first = first_of(logits_from, self.tokens)
        self._most_rows = 0 if keep else chunk_tokens
        self._keep = keep
        self._timings = Timings()
        # Documents that came while it was computed, once they had.
        self._arrivals: Arrivals | None = None
        self._computing: list[tuple[Mark, Mark]] = []
        self._run: ChunkedRun | None = None
        self._whole: tuple[torch.Tensor, Trace] | None = None
        self._begin(context.brought(prompt, policy, lookup, expected, at_once), copy)

    def _begin(self, brought: Brought, copy: TextCopy | None = None) -> None:
        """Takes the prompt's blocks, and what is found of it."""
        context, prompt = self._context, self._prompt
        positions = context.rotary.table(self.tokens)
        with brought as self._brought:
            start = time.perf_counter()
            self._admit(prompt, positions.regime, self._reserve)
        if self._packed is not None:
            segments = self._documents is None and copy is None
            self._packed.copy = context.copy_of(self._packed) if segments else copy
        self._timings.lookup_s += time.perf_counter() - start
        try:
            with context.spec.current():
                copying = context.clock.mark()
                self._take(positions)
                self._copying = copying, context.clock.mark()
                self._ids = send_index(context.spec.device, prompt.tokens).long()
        except BaseException:
            self.release()
            raise
        found = self._view.segments
        self._exact = found[0][0] if found else self.tokens
        self.computed = self._view.prefix

    def _admit(self, prompt: TokenizedPrompt, regime: int, reserve_tokens: int) -> None:
        """Takes the prompt's blocks, and its packed pages where there are any."""
        context, policy, lookup = self._context, self._policy, self._lookup
        # What was to be kept for a time is kept no longer.
        context.cache.set_time(milliseconds())
        self._packed = None
        if context.packed is not None:
            known = prompt, policy, lookup, regime, reserve_tokens
            self._packed = self._brought.admit(
                lambda reuses: context.packed_tokens(*known, reuses=reuses)
            )
        documents = self._packed if isinstance(self._packed, PackedDocuments) else None
        self._documents = documents
        # Without documents there is nothing to choose from beside packed pages.
        self._plain = self._packed is not None and documents is None
        reuse, self._mode = policy.reuse, context.mode_for(policy)
        self._chunk = chunk = 0 if policy.measures and not self._plain else self._most_rows
        if documents is not None:
            # Windows alone: what is computed lies aside.
            reuse, chunk, self._mode = "none", 1, ("share", "packed documents are read in place")
        elif self._plain and reuse == "segments":
            reuse = "prefix"

        def admitted(segments: bool) -> KvRequest:
            segments = segments and reuse == "segments"
            return context.cache.admit(
                prompt.tokens,
                namespace=lookup.namespace,
                segments=prompt.segments if segments else (),
                discover=lookup.discover and segments,
                reuse=reuse,
                mode=self._mode[0],
                reserve_tokens=reserve_tokens,
                regime=regime,
                chunk_tokens=chunk,
                publish=lookup.publish,
            )

        try:
            # Documents that were brought are those of packed pages, where there are any.
            exact = self._packed is None
            self.request = self._brought.admit(admitted) if exact else admitted(True)
        except BaseException:
            if self._packed is not None:
                self._packed.release()
            raise
        found = self.request if self._packed is None else self._packed.request
        self._sources = self._brought.sources(found.plan)

    def _take(self, positions: PositionTable) -> None:
        """Brings what the prompt finds to where its rows read it, and says what there is."""
        context, request, rotates = self._context, self.request, self._policy.delta_rope
        known = context.heads, context.pages, request, positions, rotates
        if self._documents is not None:
            kv = DocumentKv(*known, self._documents)
            self._kv: RequestKv = kv
            kv.begin()
            self._view = context.view_of_documents(self._documents)
            return
        self._kv = RequestKv(*known, self._packed)
        self._kv.arrivals = self._brought.arrivals
        self._kv.copy()
        there = self._kv.take_packed(request.plan.reused_prefix, self._chunk)
        self._view = context.view(request, there)

    @needs_memory("prefill")
    @torch.inference_mode()
    def advance(self, to: int) -> None:
        """Computes the rows before position `to` ≤ T that are not computed yet.

        What cannot be cut is computed to its end, whatever `to`. Nothing waits for the device.

        # Errors
        `InvalidArgument` for a position behind the end; as for the job otherwise.
        """
        if to > self.tokens:
            raise InvalidArgument(f"prefill: expected a position up to {self.tokens}, got {to}")
        if to <= self.computed and self._brought.arrivals is None:
            return
        try:
            with self._context.spec.current():
                begun = self._context.clock.mark()
                try:
                    self._arrived(to)
                except NotArrivedError:
                    self._begin_anew()
                    begun = self._context.clock.mark()
                    self._advance(to)
                self._computing.append((begun, self._context.clock.mark()))
        except BaseException:
            self.release()
            raise

    def _arrived(self, to: int) -> None:
        """As `_advance`; what comes meanwhile has come when this returns."""
        self._advance(to)
        arrivals, tiers = self._brought.arrivals, self._context.tiers
        if arrivals is not None and tiers is not None:
            self._kv.arrive(self._view.layers - 1)
            self._kv.arrivals = None
            tiers.finish(self._brought)
            self._arrivals = arrivals

    def _begin_anew(self) -> None:
        """Begins the prompt without the documents of which some KV has not come."""
        tiers, begun = self._context.tiers, time.perf_counter()
        assert tiers is not None
        brought, self._run = self._brought, None
        self.request.release()
        again = tiers.bring_again(brought)
        again.waited_s += time.perf_counter() - begun
        self._begin(again)

    def _advance(self, to: int) -> None:
        if to <= self.computed:
            return
        prefix, executor = self._view.prefix, self._context.executor
        if self._run is None:
            at_once = to == self.tokens and to - prefix <= self._chunk
            plans = self._plans()
            if at_once or not self._chunk:
                if not self._keep:
                    self._kv.expect(prefix, self.tokens)
                self._whole = executor.prefill(self._kv, self._ids, plans, self._first, prefix)
                self.computed = self.tokens
                return
            self._run = executor.in_chunks(self._kv, self._ids, plans, self._first, prefix)
        for first, end in self._spans(self._run, to):
            if first > prefix:
                if self._lookup.at_once:
                    self._kv.commit(first, min(first, self._run.trace.exact, self._exact))
                self._kv.advance(first, end)
            self._kv.expect(first, end)
            self._run.compute(first, end)
            self.computed = end

    def _spans(self, run: ChunkedRun, to: int) -> Iterator[tuple[int, int]]:
        """The spans up to a position, or beyond it by so many rows in all as it is away.

        What is computed beside packed documents lies aside: there no window of positions bounds a
        span, and each unpacks all before it, in every layer.
        """
        if self._documents is None:
            yield from spans(self.computed, to, self._chunk)
            return
        left = to - self.computed
        while left > 0 and self.computed < self.tokens:
            first, rows = self.computed, min(left, self._chunk)
            yield first, run.end_of(first, rows)
            left -= rows

    def _plans(self) -> Plans:
        """What the policy says, where there is anything for it to choose from."""
        if self._plain and self._policy.reuse == "segments":
            return one_pass(self._view.layers, self._view.fresh)
        return self._policy.plan(self._view)

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
            with self._context.spec.current():
                return self._finished()
        except BaseException:
            self.release()
            raise

    def _finished(self) -> Prefill:
        if self._run is not None:
            self._whole = self._run.logits(), self._run.trace
        assert self._whole is not None
        logits, trace = self._whole
        context, length = self._context, self.tokens
        self._take_times(trace)
        exact = min(self._exact, trace.exact)
        if self._lookup.at_once:
            self._kv.commit(length, exact)
        if not self._keep:
            self._kv.advance(length, length)
        report = context.report(self._kv, self._policy, trace, self._timings, self._view)
        if self._documents is not None:
            report.plan = self._documents.request.plan
        report.mode, report.mode_reason = self._mode
        if self._plain and self._packed is not None:
            report.packed = replace(self._packed.report)
        report.documents = self._sources
        if context.tiers is not None:
            seconds = self._timings.prefill_s
            context.tiers.measured.note("compute", sum(report.flops.values()), seconds)
        report.device_bytes = context.device_bytes(report, trace, len(logits), self._kv)
        reused = ReusedTokens.of(self._view.segments)
        report.settled_now = reused.settle(trace.recomputed)
        return Prefill(self._kv, logits, report, self._lookup, exact, reused)

    def _take_times(self, trace: Trace) -> None:
        """How long the device took for each part; waits for it."""
        self._context.clock.wait()
        times = self._timings
        times.load_s = self._brought.take_times()
        times.copy_s = Clock.seconds(*self._copying)
        times.prefill_s = sum(Clock.seconds(*span) for span in self._computing)
        if self._arrivals is not None:
            stood = sum(Clock.seconds(*span) for span in self._arrivals.stood)
            copied = sum(Clock.seconds(*span) for span in self._arrivals.copied)
            times.load_s, times.copy_s = times.load_s + stood, times.copy_s + copied
            times.prefill_s -= stood + copied
        times.select_s = sum(Clock.seconds(*span) for span in trace.selections)

    def release(self) -> None:
        """Gives the request's blocks back; safe to call twice."""
        self._brought.give_up()
        self.request.release()
        if self._packed is not None:
            self._packed.release()

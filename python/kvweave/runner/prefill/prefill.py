"""Prefill of one prompt: look up → admit → copy → run the policy's plans → remember."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypedDict

import numpy as np
import torch

from kvweave.arguments import flag, whole, word
from kvweave.cache import KvRequest
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument
from kvweave.plan import Plans, PromptView, one_pass
from kvweave.policies import Policy
from kvweave.runner.caller import caller_level
from kvweave.runner.clock import Clock
from kvweave.runner.decode import Decoder
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.reused_tokens import ReusedTokens
from kvweave.runner.kv.tables import Int32, send_index
from kvweave.runner.model.memory import resident_bytes, working_bytes
from kvweave.runner.model.rope import PositionTable
from kvweave.runner.prefill.chunks import spans
from kvweave.runner.prefill.draft import Drafter
from kvweave.runner.prefill.executor import Executor
from kvweave.runner.prefill.trace import Trace
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.report import Report, Timings


@dataclass(frozen=True)
class Lookup:
    """What a prompt may take from the cache, and leave in it.

    `namespace` of the prompt itself; `discover` matches unmarked text by content; `remember`
    lets later prompts of the namespace find this one's blocks, from its end on alone if `late`:
    what others may find is never written again.
    """

    namespace: str = ""
    discover: bool = False
    remember: bool = True
    late: bool = False

    def __post_init__(self) -> None:
        word("namespace", self.namespace)
        flag("discover", self.discover)
        flag("remember", self.remember)

    @property
    def at_once(self) -> bool:
        """Whether others may find the prompt as soon as it is prefilled."""
        return self.remember and not self.late


class Room(TypedDict):
    """What is wanted of a prompt: the first position of its logits, and room behind it."""

    logits_from: int | None
    reserve_tokens: int


class Prefill:
    """A prompt whose KV is in the pages: logits f32 [n, V], the report, the live request.

    A context manager; `release` gives the blocks back (they stay cached for later prompts).
    `exact_tokens`: leading tokens whose KV is that of a full prefill; `exact` says that all are,
    no segment having been reused. `kv` are the request's tables; `lookup` says whether later
    prompts may find its blocks; `reused` are the tokens that segments brought. `pending`: a token
    that was decoded last and has no KV yet.
    """

    def __init__(
        self,
        kv: RequestKv,
        logits: torch.Tensor,
        report: Report,
        lookup: Lookup,
        exact_tokens: int,
        reused: ReusedTokens,
    ) -> None:
        self.kv = kv
        self.logits = logits
        self.report = report
        self.lookup = lookup
        self.exact_tokens = exact_tokens
        self.exact = exact_tokens == report.tokens
        self.reused = reused
        self.pending: list[int] = []

    @property
    def request(self) -> KvRequest:
        """The live request: tokens, blocks, plan."""
        return self.kv.request

    @property
    def positions(self) -> PositionTable:
        """Cos, sin and frequencies of its positions."""
        return self.kv.positions

    def fork(self) -> Prefill:
        """The same prompt once more, sharing all blocks: what is written to either is copied first.

        Of a prompt that is remembered from its end on, a fork is not remembered.

        # Errors
        `InvalidArgument` for a prompt that was released, or whose local heads were made full.
        """
        report = replace(self.report, timings=replace(self.report.timings))
        fork = Prefill(
            self.kv.forked(self.request.fork()),
            self.logits,
            report,
            replace(self.lookup, remember=self.lookup.at_once),
            self.exact_tokens,
            self.reused.copy(),
        )
        fork.pending = list(self.pending)
        return fork

    def commit(self) -> None:
        """Lets later prompts find what has KV by now, where they may find the prompt."""
        if self.lookup.remember:
            length = self.request.length
            self.request.commit(length, length if self.exact else self.exact_tokens)

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


def first_of(logits_from: int | None, length: int) -> int:
    """The first of a prompt's positions whose logits are wanted: the last unless one is named.

    # Errors
    `InvalidArgument` for a position that the prompt has not.
    """
    if logits_from is None:
        return length - 1
    return whole("logits_from", logits_from, 0, length - 1)


class Prefiller:
    """Prefills prompts of one model into one cache; drafts are made by its decoder.

    `mode` is "materialise" or "share"; `chunk_tokens`, if any, are computed at once for policies
    that measure nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        tiled: bool,
        mode: str,
        chunk_tokens: int | None,
    ) -> None:
        self.spec = decoder.spec
        self.rotary = decoder.rotary
        self.heads = decoder.heads
        self.cache = decoder.heads.cache
        self.pages = decoder.pages
        self.mode = mode
        self.chunk_tokens = chunk_tokens
        self.clock = Clock(decoder.spec.device)
        self.executor = Executor(decoder.spec, tiled, Drafter(decoder))

    @needs_memory("prefill")
    @torch.inference_mode()
    def prefill(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        *,
        logits_from: int | None = None,
        reserve_tokens: int = 0,
        keep: bool = False,
    ) -> Prefill:
        """Brings a prompt's KV into the pages.

        `keep`: all of it stays with the request, also what lies behind the windows of its heads.

        # Errors
        `PoolFull` when it does not fit. After any error the request holds nothing.
        """
        self.warn_of_length(len(prompt.tokens) + reserve_tokens)
        with self.spec.current():
            return self._prefill(prompt, policy, lookup, logits_from, reserve_tokens, keep)

    def _prefill(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        logits_from: int | None,
        reserve_tokens: int,
        keep: bool,
    ) -> Prefill:
        start = time.perf_counter()
        length = len(prompt.tokens)
        first = first_of(logits_from, length)
        positions = self.rotary.table(length)
        mode, mode_reason = self.mode_for(policy)
        chunk = 0 if keep or policy.measures else self.chunk_tokens or 0
        request = self.cache.admit(
            prompt.tokens,
            namespace=lookup.namespace,
            segments=prompt.segments if policy.reuse == "segments" else (),
            discover=lookup.discover and policy.reuse == "segments",
            reuse=policy.reuse,
            mode=mode,
            reserve_tokens=reserve_tokens,
            regime=positions.regime,
            chunk_tokens=chunk,
        )
        timings = Timings(lookup_s=time.perf_counter() - start)
        try:
            kv = RequestKv(self.heads, self.pages, request, positions, policy.delta_rope)
            copying = self.clock.mark()
            kv.copy()
            copied = self.clock.mark()
            view = self.view(request)
            exact = view.segments[0][0] if view.segments else length
            remembered = exact if lookup.at_once else None
            logits, trace = self._run(kv, prompt, policy.plan(view), first, chunk, remembered)
            exact = min(exact, trace.exact)
            self.clock.wait()
            timings.copy_s = Clock.seconds(copying, copied)
            timings.select_s = sum(Clock.seconds(*span) for span in trace.selections)
            timings.prefill_s = time.perf_counter() - start - timings.lookup_s - timings.copy_s
            if lookup.at_once:
                request.commit(length, exact)
            if not keep:
                kv.advance(length, length)
            report = self.report(request, policy, trace, timings, view)
            report.mode, report.mode_reason = mode, mode_reason
            report.device_bytes = self.device_bytes(report, trace, len(logits))
            reused = ReusedTokens.of(view.segments)
            report.settled_now = reused.settle(trace.recomputed)
        except BaseException:
            request.release()
            raise
        return Prefill(kv, logits, report, lookup, exact, reused)

    @needs_memory("extend")
    @torch.inference_mode()
    def extend(self, done: Prefill, tokens: Int32) -> torch.Tensor:
        """Appends tokens to a prefilled prompt: their logits f32 [n, V], all in one pass.

        A token that was decoded and has no KV yet goes before them. `done.logits` are the last
        one's then.

        # Errors
        `InvalidArgument` without tokens, or where the frequencies of RoPE change with the length;
        `PoolFull` when they do not fit. Nothing has changed then. After `OutOfMemory` the prompt is
        to be released.
        """
        request = done.request
        new = np.concatenate((np.asarray(done.pending, np.int32), tokens))
        if len(new) == 0:
            raise InvalidArgument("extend: expected at least one token, got none")
        length = request.length + len(new)
        positions = self.rotary.table(length)
        if positions.regime != done.positions.regime:
            raise InvalidArgument(
                f"extend: expected RoPE frequencies that hold for {length} tokens too, "
                f"got those of {done.report.tokens} alone"
            )
        request.append(new)
        done.pending = []
        with self.spec.current():
            kv = RequestKv(self.heads, self.pages, request, positions, done.kv.rotates)
            kv.copy()
            rows, first = kv.newest(len(new)), length - max(1, len(tokens))
            ids = send_index(self.spec.device, request.tokens).long()
            plans = one_pass(len(self.spec.layers), rows)
            logits, _ = self.executor.prefill(kv, ids, plans, first)
        done.kv, done.logits = kv, logits[-1:]
        return logits

    def warn_of_length(self, tokens: int) -> None:
        """Warns of a prompt and answer longer than the model is made for."""
        most = self.spec.positions
        if most is not None and tokens > most:
            text = f"prompt and answer: expected up to {most} tokens, which the model is made for"
            poor = f"{text}, got {tokens}: what it says may be poor"
            warnings.warn(poor, stacklevel=caller_level())

    def mode_for(self, policy: Policy) -> tuple[str, str]:
        """How reused KV is read under a policy, and why if not as the runner says."""
        if self.mode == "share" and policy.rewrites_segments(len(self.spec.layers)):
            return "materialise", f"{policy.name} writes every reused token in some layer"
        if self.mode == "share" and not policy.delta_rope:
            return "materialise", f"{policy.name} leaves keys at their old positions"
        return self.mode, ""

    def view(self, request: KvRequest) -> PromptView:
        """An admitted prompt as its policy sees it."""
        plan = request.plan
        return PromptView(
            tokens=plan.tokens,
            layers=len(self.spec.layers),
            page_tokens=self.cache.shape.page_tokens,
            prefix=plan.reused_prefix,
            fresh=plan.rows(),
            segments=tuple((s.start, s.end) for s in plan.spans if s.kind == "segment"),
            heads=self.heads.classes,
        )

    def _run(
        self,
        kv: RequestKv,
        prompt: TokenizedPrompt,
        policy: Plans,
        logits_from: int,
        chunk: int,
        remembered: int | None,
    ) -> tuple[torch.Tensor, Trace]:
        """The logits and the trace; `remembered`: leading tokens of exact KV, None to forget."""
        request, length = kv.request, len(prompt.tokens)
        tokens = send_index(self.spec.device, prompt.tokens).long()
        if not 0 < chunk < length - request.plan.reused_prefix:
            prefix = request.plan.reused_prefix
            return self.executor.prefill(kv, tokens, policy, logits_from, prefix)

        def computed(count: int, exact: int) -> None:
            if remembered is not None:
                request.commit(count, min(exact, remembered))

        parts = spans(request.plan.reused_prefix, length, chunk)
        return self.executor.prefill_in_chunks(kv, tokens, policy, logits_from, parts, computed)

    def device_bytes(self, report: Report, trace: Trace, logits: int) -> int:
        """The most that weights, pages and a prefill take where the model lies."""
        working = working_bytes(
            self.spec, report.tokens, trace.most_rows, logits, len(self.heads.windows)
        )
        return resident_bytes(self.spec, self.rotary, self.pages) + working

    def report(
        self, request: KvRequest, policy: Policy, trace: Trace, timings: Timings, view: PromptView
    ) -> Report:
        """What was done for a prompt as the policy saw it."""
        own, shared = request.kv_bytes()
        return Report(
            policy=policy.name,
            plan=request.plan,
            tokens=view.tokens,
            reused_prefix=view.prefix,
            reused_segment=len(view.reused),
            recomputed=len(view.fresh),
            mode=self.mode,
            rows_per_layer=trace.rows_per_layer,
            timings=timings,
            kv_bytes=own,
            shared_kv_bytes=shared,
            flops=trace.flops,
            passes=[one.report() for one in trace.passes],
            restored=trace.restored,
            refused=trace.refused,
            settled_before=len(view.settled),
        )

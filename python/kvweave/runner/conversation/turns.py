"""A further turn of a conversation: the same KV goes on, and what was recomputed stays so.

A turn is computed in a request of its own, so that whatever goes wrong leaves the one before as it
was. Where it brings fresh text alone that request is a fork: blocks are shared, and copied as they
come to be written. Where it brings segments they have to be looked up, which the cache does at
admission: the whole conversation is admitted anew, and the KV that earlier turns computed is copied
over.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvweave.cache import KvRequest
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.plan import Plans, PromptView, Rows, one_pass
from kvweave.policies import Policy
from kvweave.runner.clock import Clock
from kvweave.runner.kv.beside_packed import refuse_beside_packed
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.reused_tokens import ReusedTokens, Spans, positions_of
from kvweave.runner.kv.tables import Int32, send_index
from kvweave.runner.prefill.lookup import Lookup, first_of
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.report import Timings


@needs_memory("turn")
@torch.inference_mode()
def follow(
    prefiller: Prefiller,
    done: Prefill,
    prompt: TokenizedPrompt,
    policy: Policy,
    lookup: Lookup,
    *,
    logits_from: int | None = None,
    reserve_tokens: int = 0,
) -> Prefill:
    """Computes what a conversation goes on with, by a policy that sees all of it.

    `prompt`: the whole conversation, which begins with the tokens of `done`. The policy is told
    that the tokens behind these are fresh or reused, and that those which `done` computed are
    settled. `done` stays as it is.

    # Errors
    `InvalidArgument` where the frequencies of RoPE change with the length; `Unsupported` where
    heads of local classes were made full; `PoolFull` when it does not fit beside `done`. What was
    taken is given back.
    """
    length = len(prompt.tokens)
    prefiller.warn_of_length(length + reserve_tokens)
    positions = prefiller.rotary.table(length)
    if positions.regime != done.positions.regime:
        raise InvalidArgument(
            f"conversation: expected RoPE frequencies that hold for {length} tokens too, "
            f"got those of {done.request.length} alone"
        )
    if done.request.promoted:
        raise Unsupported(
            "conversation: expected heads as the head map has them, "
            f"got {len(done.request.promoted)} that were made full"
        )
    with prefiller.spec.current():
        done.bring_back()
        turn = _Turn(prefiller, done, prompt, policy, lookup)
        return turn.computed(logits_from, reserve_tokens)


class _Turn:
    """One further turn, from its request on."""

    def __init__(
        self,
        prefiller: Prefiller,
        done: Prefill,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
    ) -> None:
        self.prefiller = prefiller
        self.done = done
        self.prompt = prompt
        self.policy = policy
        self.lookup = lookup
        self.first = done.request.length
        self.length = len(prompt.tokens)
        self.positions = prefiller.rotary.table(self.length)

    def computed(self, logits_from: int | None, reserve_tokens: int) -> Prefill:
        """The prompt with the turn's KV."""
        pre, policy = self.prefiller, self.policy
        first = first_of(logits_from, self.length)
        anew = self._brings_segments()
        if anew:
            refuse_beside_packed(pre.packed, "later documents")
        fresh = self.prompt if anew else replace(self.prompt, segments=())
        with pre.brought(fresh, policy, self.lookup) as brought:
            start = time.perf_counter()
            admitted = partial(self._admitted, reserve_tokens)
            request, packed = (brought.admit(admitted), None) if anew else self._forked()
        timings = Timings(lookup_s=time.perf_counter() - start)
        kv = RequestKv(pre.heads, pre.pages, request, self.positions, policy.delta_rope, packed)
        try:
            copying = pre.clock.mark()
            kv.copy()
            reused = self._take_over(kv) if anew else self.done.reused.copy()
            copied = pre.clock.mark()
            view = self._view(kv, reused)
            ids = send_index(pre.spec.device, self.prompt.tokens).long()
            logits, trace = pre.executor.prefill(kv, ids, self._plans(view), first)
            pre.clock.wait()
            timings.load_s = brought.take_times()
            timings.copy_s = Clock.seconds(copying, copied)
            timings.select_s = sum(Clock.seconds(*span) for span in trace.selections)
            timings.prefill_s = time.perf_counter() - start - timings.lookup_s - timings.copy_s
            kv.advance(self.length, self.length)
            report = pre.report(kv, policy, trace, timings, view)
            report.mode, report.mode_reason = pre.mode_for(policy)
            report.documents = brought.sources(request.plan)
            report.device_bytes = pre.device_bytes(report, trace, len(logits), kv)
            exact = min(self._exact(reused), trace.exact)
            report.settled_now = reused.settle(trace.recomputed)
        except BaseException:
            kv.release()
            raise
        return Prefill(kv, logits, report, self.lookup, exact, reused)

    def _brings_segments(self) -> bool:
        """Whether there is anything to be looked up."""
        if self.policy.reuse != "segments":
            return False
        marked = any(end > self.first for _, end, _ in self.prompt.segments)
        # Text that is not marked is not looked for beside packed pages, where it would not be read.
        return marked or (self.lookup.discover and self.prefiller.packed is None)

    def _forked(self) -> tuple[KvRequest, PackedPrefix | None]:
        """A fork with the turn's tokens. What pages have come to be full is packed before."""
        kv = self.done.kv
        if kv.packed is not None:
            kv.packed.pack(kv.request, self.first)
        fork = kv.fork()
        try:
            fork.request.append(self.prompt.tokens[self.first :])
        except BaseException:
            fork.release()
            raise
        return fork.request, fork.packed

    def _admitted(self, reserve_tokens: int, segments: bool) -> KvRequest:
        pre = self.prefiller
        return pre.cache.admit(
            self.prompt.tokens,
            namespace=self.lookup.namespace,
            segments=self.prompt.segments if segments else (),
            discover=self.lookup.discover and segments,
            reuse=self.policy.reuse,
            mode=pre.mode_for(self.policy)[0],
            reserve_tokens=reserve_tokens,
            regime=self.positions.regime,
        )

    def _take_over(self, kv: RequestKv) -> ReusedTokens:
        """Copies what earlier turns computed into a request that was admitted anew.

        What it reuses as they did is as they found it, and what it has of an exact prefix is better
        than theirs.
        """
        plan, before = kv.request.plan, self.done.reused
        spans = tuple((s.start, s.end) for s in plan.spans if s.kind == "segment")
        found = positions_of(spans)
        alike = np.intersect1d(found, before.left, assume_unique=True)
        old = np.arange(plan.reused_prefix, self.first, dtype=np.int32)
        taken = np.setdiff1d(old, alike, assume_unique=True)
        if len(taken):
            kv.own(taken, None)
            for group in range(len(kv.heads.windows)):
                copies = copies_of(self.done.request, kv.request, taken, group)
                kv.bring(copies, kv.heads.page_layers(group))
        # Window groups have room for all that is admitted, but not all of it was there to copy.
        kv.advance(self.first, self.length)
        segments = _clipped(before.segments, plan.reused_prefix, self.first)
        segments += _clipped(spans, self.first, self.length)
        left = before.left[before.left >= plan.reused_prefix]
        new = found[found >= self.first]
        return ReusedTokens(segments, np.concatenate((left, new)))

    def _view(self, kv: RequestKv, reused: ReusedTokens) -> PromptView:
        """The conversation as the policy is told of it.

        Tokens that cannot be computed again, window groups having let go of what they see, count as
        settled: no policy is to choose them.
        """
        pre, prefix = self.prefiller, kv.request.plan.reused_prefix
        left = reused.left
        if not kv.heads.uniform:
            left = left[kv.computable()[left]]
        since = max(prefix, self.first)
        earlier = np.arange(prefix, since, dtype=np.int32)
        return PromptView(
            tokens=self.length,
            layers=len(pre.spec.layers),
            page_tokens=pre.cache.shape.page_tokens,
            prefix=prefix,
            fresh=reused.others(since, self.length),
            segments=reused.segments,
            heads=pre.heads.classes,
            settled=np.setdiff1d(earlier, left, assume_unique=True),
        )

    def _plans(self, view: PromptView) -> Plans:
        """The policy's plans; where it reuses no segments the new rows are all there is to do.

        So they are beside packed pages, where what earlier turns read stays as they read it.
        """
        if self.policy.reuse == "segments" and self.prefiller.packed is None:
            return self.policy.plan(view)
        return one_pass(view.layers, view.fresh)

    def _exact(self, reused: ReusedTokens) -> int:
        """Leading tokens whose KV is that of a full prefill, before this turn's policy."""
        if not self.done.exact or not self.prefiller.heads.reads_all(self.done.request):
            return self.done.exact_tokens
        return reused.segments[0][0] if reused.segments else self.length


def copies_of(source: KvRequest, target: KvRequest, rows: Rows, group: int) -> Int32:
    """Copies i32 [C, 6] of some positions of one request to the slots of another, in one group.

    Positions that one of them does not keep are left out. Keys come to their final rotation, also
    those that the source reads where others rotated them.
    """
    lies = np.full((source.length, 3), -1, np.int32)
    for block, begin, end, position, delta in source.entries(group).tolist():
        at = slice(position, position + end - begin)
        lies[at, 0], lies[at, 2] = block, delta
        lies[at, 1] = np.arange(begin, end)
    there, here = lies[rows], target.slots(rows, group)
    kept = (there[:, 0] >= 0) & (here[:, 0] >= 0)
    there, here = there[kept], here[kept]
    if not len(there):
        return np.zeros((0, 6), np.int32)
    # A copy is a run of slots of one block to as many of one block, all turned alike.
    goes_on = (np.diff(there[:, 1]) == 1) & (np.diff(here[:, 1]) == 1)
    for column in (there[:, 0], there[:, 2], here[:, 0]):
        goes_on &= np.diff(column) == 0
    starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    counts = np.diff(np.concatenate((starts, [len(there)])))
    columns = (*there[starts, :2].T, *here[starts].T, counts, there[starts, 2])
    return np.ascontiguousarray(np.stack(columns, 1), np.int32)


def _clipped(spans: Spans, start: int, end: int) -> Spans:
    """The parts of sorted spans in [start, end)."""
    cut = ((max(a, start), min(b, end)) for a, b in spans)
    return tuple((a, b) for a, b in cut if a < b)

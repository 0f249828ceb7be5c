"""`PrefillContext`: what all prefills of one model into one cache go by."""

from __future__ import annotations

import warnings

from kvweave.cache import KvRequest
from kvweave.plan import PromptView, Rows
from kvweave.policies import Policy
from kvweave.runner.caller import caller_level
from kvweave.runner.clock import Clock
from kvweave.runner.decode import Decoder
from kvweave.runner.kv.packed_documents import PackedDocuments
from kvweave.runner.kv.packed_pool import SINK_TOKENS
from kvweave.runner.kv.packed_prefix import PackedPrefix, PageCopy
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.model.memory import resident_bytes, working_bytes
from kvweave.runner.one_thread import OneThread
from kvweave.runner.prefill.draft import Drafter
from kvweave.runner.prefill.executor import Executor
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.trace import Trace
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.report import Report, Timings
from kvweave.runner.tiers.brought import Brought
from kvweave.runner.tiers.expected import Expected
from kvweave.runner.tiers.final_packing import FinalPacking
from kvweave.runner.tiers.host_documents import HostDocuments
from kvweave.runner.tiers.loads import NEEDED
from kvweave.runner.tiers.segment_copies import SegmentCopies
from kvweave.runner.tiers.tiers import Tiers
from kvweave.runner.tiers.zeroing import Zeroing


class PrefillContext:
    """The model, its cache, and who computes; drafts are made by its decoder.

    `mode` is "materialise" or "share"; `tiers`: where documents lie beside the cache, if anywhere.
    Whoever computes does so within `computing`. `final_packing` packs documents once more, of pages
    that have bases.
    """

    def __init__(
        self,
        decoder: Decoder,
        tiled: bool,
        mode: str,
        tiers: Tiers | None,
        zeroes: bool,
    ) -> None:
        self.spec = decoder.spec
        self.rotary = decoder.rotary
        self.heads = decoder.heads
        self.cache = decoder.heads.cache
        self.pages = decoder.pages
        self.packed = decoder.heads.packed
        self.mode = mode
        self.tiers = tiers
        self.clock = Clock(decoder.spec.device)
        self.computing = OneThread()
        if zeroes:
            pools = decoder.heads.host.values()
            documents = None if tiers is None else tiers.host
            # Beside packed pages nothing is zeroed.
            assert not isinstance(documents, HostDocuments)
            self.computing.at_end = Zeroing(self.cache, self.pages, pools, documents).zero
        self.executor = Executor(decoder.spec, tiled, Drafter(decoder))
        self.final_packing: FinalPacking | None = None
        if self.packed is not None and (self.packed.bases or self.packed.final):
            self.final_packing = FinalPacking(self.packed, self.computing)
            if self.packed.documents is not None:
                # Who read a deleted document may have been the last to.
                self.computing.at_end = self.packed.documents.give_back

    def warn_of_length(self, tokens: int) -> None:
        """Warns of a prompt and answer longer than the model is made for."""
        most = self.spec.positions
        if most is not None and tokens > most:
            text = f"prompt and answer: expected up to {most} tokens, which the model is made for"
            poor = f"{text}, got {tokens}: what it says may be poor"
            warnings.warn(poor, stacklevel=caller_level())

    def copy_of(self, packed: PackedPrefix) -> PageCopy | None:
        """What is told of the pages that a request packs, where its text is packed finally."""
        tokens = packed.pool.packing.segment_tokens
        if self.final_packing is None or tokens is None:
            return None
        known = packed.request, packed.tokens, tokens, packed.report.segments
        return SegmentCopies(self.final_packing, *known)

    def mode_for(self, policy: Policy) -> tuple[str, str]:
        """How reused KV is read under a policy, and why if not as the runner says."""
        if self.mode == "share" and policy.rewrites_segments(len(self.spec.layers)):
            return "materialise", f"{policy.name} writes every reused token in some layer"
        if self.mode == "share" and not policy.delta_rope:
            return "materialise", f"{policy.name} leaves keys at their old positions"
        return self.mode, ""

    def found_prefix(self, tokens: Rows, namespace: str, regime: int) -> int:
        """Tokens of a prompt's exact prefix that are cached, of packed text in whole pages."""
        exact = self.cache.match_prefix(tokens, namespace, regime=regime)
        if self.packed is None or exact < SINK_TOKENS:
            return exact
        return max(exact, self.packed.found_prefix(tokens, namespace, regime))

    def packed_tokens(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        regime: int,
        reserve_tokens: int,
        reuses: bool,
    ) -> PackedPrefix:
        """What a prompt that is to be admitted has packed, where there are packed pages.

        These are documents, where its policy reuses segments and any are found; else a prefix.
        `reuses` False takes no documents.

        # Errors
        `PoolFull` when it does not fit.
        """
        assert self.packed is not None
        segments = policy.reuse == "segments"
        if segments and reuses and (prompt.segments or lookup.discover):
            documents = PackedDocuments(
                self.packed,
                self.cache,
                prompt,
                namespace=lookup.namespace,
                discover=lookup.discover,
                regime=regime,
                reserve_tokens=reserve_tokens,
                rotates=policy.delta_rope,
            )
            if documents.has_documents:
                return documents
            documents.release()
        return PackedPrefix(
            self.packed,
            prompt.tokens,
            namespace=lookup.namespace,
            reuse="prefix" if segments else policy.reuse,
            regime=regime,
            reserve_tokens=reserve_tokens,
        )

    def brought(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        expected: Expected | None = None,
        arrives: bool = False,
    ) -> Brought:
        """The documents of a prompt that is to be admitted, on the device as far as that pays.

        `expected`: what was said of them when the prompt came, if anything. `arrives`: some of
        their KV may come while the prompt is prefilled, which is to be done at once.
        """
        if policy.reuse != "segments" and expected is not None:
            expected.release()
        elif expected is None:
            expected = self.expect(prompt, policy, lookup, NEEDED, 0)
        if self.tiers is None or expected is None or policy.reuse != "segments":
            return Brought()
        arrives = arrives and self.packed is None
        return self.tiers.bring(expected, prompt, lookup.namespace, arrives=arrives)

    def expect(
        self, prompt: TokenizedPrompt, policy: Policy, lookup: Lookup, need: int, priority: int
    ) -> Expected | None:
        """Has a prompt's documents looked for that are not on the device; any thread.

        None where nothing is looked for. `need`: of `loads`; more `priority` is sooner.
        """
        if self.tiers is None or policy.reuse != "segments" or not prompt.segments:
            return None
        regime = self.rotary.regime(len(prompt.tokens))
        return self.tiers.expect(prompt, lookup.namespace, regime, urgency=(need, -priority))

    def view(self, request: KvRequest, prefix: int | None = None) -> PromptView:
        """An admitted prompt as its policy sees it; `prefix`: rows that are there, or its plan's.

        Those of packed pages are not in the plan, which is that of exact ones.
        """
        plan = request.plan
        start = plan.reused_prefix if prefix is None else prefix
        rows = plan.rows()
        return PromptView(
            tokens=plan.tokens,
            layers=len(self.spec.layers),
            page_tokens=self.cache.shape.page_tokens,
            prefix=start,
            fresh=rows[rows >= start],
            segments=tuple((s.start, s.end) for s in plan.spans if s.kind == "segment"),
            heads=self.heads.classes,
        )

    def view_of_documents(self, documents: PackedDocuments) -> PromptView:
        """A prompt that reads packed documents as its policy sees it."""
        return PromptView(
            tokens=len(documents.places),
            layers=len(self.spec.layers),
            page_tokens=self.cache.shape.page_tokens,
            prefix=0,
            fresh=documents.fresh,
            segments=documents.spans,
            heads=self.heads.classes,
        )

    def device_bytes(self, report: Report, trace: Trace, logits: int, kv: RequestKv) -> int:
        """The most that weights, pages and a request's prefill take where the model lies."""
        working = working_bytes(
            self.spec, report.tokens, trace.most_rows, logits, len(self.heads.windows)
        )
        if kv.packed is None:
            working += kv.gathered.most_bytes
        else:
            working += kv.packed.pool.nbytes + kv.packed.scratch_bytes(report.tokens)
        return resident_bytes(self.spec, self.rotary, self.pages) + working

    def report(
        self, kv: RequestKv, policy: Policy, trace: Trace, timings: Timings, view: PromptView
    ) -> Report:
        """What was done for a prompt as the policy saw it."""
        request = kv.request
        own, shared = request.kv_bytes()
        if kv.packed is not None:
            packed = kv.packed.kv_bytes()
            own, shared = own + packed[0], shared + packed[1]
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

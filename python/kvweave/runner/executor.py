"""Runs any policy's plans over a request's pages: the one executor of prefill.

For each layer: project the plan's rows → write K, V → attend by position → finish the rows. What
the policy asked to measure goes back to it before it says what comes next. Behind the last layer
it may ask for a draft, or begin another pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from kvweave import ops
from kvweave.errors import InvalidArgument
from kvweave.plan import Draft, LayerPlan, Plans, PlanStep, Probe, ProbeResult, Rows
from kvweave.runner import chunks, probes
from kvweave.runner.clock import Clock
from kvweave.runner.draft import Drafter
from kvweave.runner.flops import ModelWeights
from kvweave.runner.heads import SomeHeads
from kvweave.runner.hidden import Hidden
from kvweave.runner.layer import RowGrid, add_attention, add_feed_forward, dense_attention, project
from kvweave.runner.model_spec import ModelSpec
from kvweave.runner.question import ASKED, context_of
from kvweave.runner.request_kv import RequestKv
from kvweave.runner.spared import Spared, may_spare, project_heads, project_sparing
from kvweave.runner.tables import RowTable, same_rows, send_index
from kvweave.runner.trace import PassTrace, Trace


class Executor:
    """Prefill of one request; holds nothing between requests but the model."""

    def __init__(self, spec: ModelSpec, tiled: bool, drafter: Drafter | None = None) -> None:
        self.spec = spec
        self.tiled = tiled
        self.drafter = drafter
        self.weights = ModelWeights(spec)

    def prefill(
        self, kv: RequestKv, tokens: torch.Tensor, policy: Plans, logits_from: int
    ) -> tuple[torch.Tensor, Trace]:
        """Carries out a policy; returns the logits f32 [n, V] from a position on, and the trace.

        tokens i64 [T]. The last layer computes K, V of all its rows, and the rest of those alone
        that are at or after `logits_from`. The logits are those of the last pass.

        # Errors
        `InvalidArgument` for a plan that skips a layer, names rows without hidden states or
        restores a full head; or when a position whose logits are wanted was not computed.
        `PoolFull` when copy-on-write of a shared block finds no room.
        """
        run = _Run(self, kv, tokens, logits_from)
        run.carry_out(policy, len(tokens))
        return run.logits(), run.trace

    def prefill_in_chunks(
        self,
        kv: RequestKv,
        tokens: torch.Tensor,
        policy: Plans,
        logits_from: int,
        spans: list[tuple[int, int]],
        computed: Callable[[int, int], None],
    ) -> tuple[torch.Tensor, Trace]:
        """The same for a policy that measures nothing, one span of positions after the other.

        Between two of them `computed` hears how many tokens are done and how many of these are
        exact, and windows move on.

        # Errors
        As for `prefill`; `InvalidArgument` for a plan with a probe.
        """
        run = _Run(self, kv, tokens, logits_from)
        run.in_chunks = True
        plans = chunks.collected(policy)
        for index, (start, end) in enumerate(spans):
            if index:
                computed(start, min(start, run.trace.exact))
                kv.advance(start, end)
            run.carry_out(chunks.cut(plans, start, end), end)
        return run.logits(), run.trace


class _Run:
    """The state of one prefill."""

    def __init__(
        self, executor: Executor, kv: RequestKv, tokens: torch.Tensor, logits_from: int
    ) -> None:
        self.spec = executor.spec
        self.tiled = executor.tiled
        self.drafter = executor.drafter
        self.kv = kv
        self.tokens = tokens
        self.logits_from = logits_from
        self.trace = Trace(executor.weights, len(tokens))
        self.clock = Clock(executor.spec.device)
        self.probed = self.clock.mark()
        self.end = len(tokens)
        self.in_chunks = False
        self.logits_parts: list[torch.Tensor] = []

    def carry_out(self, policy: Plans, end: int) -> None:
        """All passes over rows before `end`, and the logits that are wanted of the last."""
        self.end = end
        step, hidden = self.ask(policy, None), None
        while step is not None:
            if isinstance(step, Draft):
                step = self.ask(policy, self.draft(step, hidden))
            else:
                # The states of the pass before are given back before this one needs its own.
                hidden = None
                hidden, step = self.one_pass(step, policy)
        if hidden is not None:
            self.score(hidden)

    def one_pass(self, plan: LayerPlan, policy: Plans) -> tuple[Hidden | None, PlanStep | None]:
        """All layers once, from a plan for the first on.

        Returns the states behind the last layer and the step that follows; None for the states of
        a chunk's rows that do not run to the last layer.
        """
        if plan.layer != 0:
            raise InvalidArgument(f"layer plan: expected layer 0 first, got {plan.layer}")
        layers, goes_on = len(self.spec.layers), self.in_chunks and self.trace.passes
        done = self.trace.current if goes_on else self.trace.begin("layers", self.clock.mark())
        hidden = self.embed(plan.rows)
        while True:
            hidden, result, plan = self.layer(hidden, plan, policy)
            following = self.ask(policy, result)
            if isinstance(following, LayerPlan) and following.layer == plan.layer == 0 < layers - 1:
                hidden, following = self.extend(hidden, following, policy)
            begins_again = isinstance(following, LayerPlan) and following.layer == 0 < plan.layer
            if plan.layer + 1 == layers or begins_again:
                break
            if following is None:
                if self.end == len(self.tokens):
                    raise InvalidArgument(
                        f"layer plan: expected {layers} layers, got {plan.layer + 1}"
                    )
                return None, None
            if not isinstance(following, LayerPlan):
                raise InvalidArgument(
                    f"draft: expected all {layers} layers before it, got {plan.layer + 1}"
                )
            if following.layer != plan.layer + 1:
                raise InvalidArgument(
                    f"layer plan: expected layer {plan.layer + 1}, got {following.layer}"
                )
            plan = following
        done.ended = self.clock.mark()
        before = self.trace.recomputed if goes_on else plan.rows[:0]
        self.trace.recomputed = np.concatenate((before, plan.rows))
        return hidden, following

    def draft(self, step: Draft, hidden: Hidden | None) -> torch.Tensor | None:
        """What the queries of the likeliest next tokens look at, mass f32 [T]."""
        last = None if hidden is None else hidden.since(len(self.tokens) - 1)
        if last is None or not len(last.rows):
            raise InvalidArgument("draft: expected a pass with the last token before it, got none")
        if self.drafter is None:
            raise InvalidArgument("draft: expected an executor with a drafter, got one without")
        done = self.trace.begin("draft", self.clock.mark())
        logits = self.head(last, done)
        self.probed = self.clock.mark()
        mass = self.drafter.mass(self.kv, logits[-1], step, done)
        done.ended = self.clock.mark()
        return mass

    def score(self, hidden: Hidden) -> None:
        """Logits of the rows at or after `logits_from`, the first of which must be there."""
        wanted = hidden.since(self.logits_from)
        if not len(wanted.rows):
            return
        if not self.logits_parts and int(wanted.rows[0]) != self.logits_from:
            raise self.missing()
        self.logits_parts.append(self.head(wanted, self.trace.current))
        self.trace.current.ended = self.clock.mark()

    def head(self, hidden: Hidden, done: PassTrace) -> torch.Tensor:
        """The logits f32 [R, V] of some rows."""
        scored = hidden.grid.real(hidden.grid.apply(self.spec.scores, hidden.states))
        done.flops.logits(len(scored))
        return scored

    def logits(self) -> torch.Tensor:
        """All of them, f32 [n, V]."""
        if not self.logits_parts:
            raise self.missing()
        return self.logits_parts[0] if len(self.logits_parts) == 1 else torch.cat(self.logits_parts)

    def missing(self) -> InvalidArgument:
        """The refusal of logits that were not computed."""
        rows = self.trace.rows_per_layer[-1] if self.trace.passes else 0
        return InvalidArgument(
            f"logits: expected position {self.logits_from} among the computed rows, "
            f"got {rows} rows without it"
        )

    def embed(self, rows: Rows) -> Hidden:
        """The embeddings of some positions: layer 0's input."""
        if len(rows) == 0:
            raise InvalidArgument("layer plan: expected at least one row, got none")
        first, end = int(rows[0]), self.end
        if first + len(rows) != end:
            tokens = self.tokens.index_select(0, send_index(self.tokens.device, rows))
            return Hidden(rows, RowGrid.packed(len(rows)), self.spec.embed(tokens))
        states = self.spec.embed(self.tokens[first:end])
        if self.spec.device.type != "cpu":
            return Hidden(rows, RowGrid.packed(len(rows)), states)
        grid = RowGrid.aligned(first, len(rows), self.tiled)
        return Hidden(rows, grid, grid.pad(states))

    def ask(self, policy: Plans, result: ProbeResult) -> PlanStep | None:
        """The policy's next step, or None when it has no more."""
        try:
            return policy.send(result)
        except StopIteration:
            return None
        finally:
            if result is not None:
                self.trace.selections.append((self.probed, self.clock.mark()))

    def extend(
        self, hidden: Hidden, plan: LayerPlan, policy: Plans
    ) -> tuple[Hidden, PlanStep | None]:
        """Layer 0 once more for further rows: their input is the embedding, known for all."""
        further = np.setdiff1d(plan.rows, hidden.rows)
        if len(further):
            some = chunks.among(plan, further)
            more, _, _ = self.layer(self.embed(further), some, policy)
            hidden = hidden.merge(more)
        return hidden, self.ask(policy, None)

    def layer(
        self, hidden: Hidden, plan: LayerPlan, policy: Plans
    ) -> tuple[Hidden, ProbeResult, LayerPlan]:
        """One layer over the plan's rows; returns the probe's result, if one was asked for."""
        layer = self.spec.layers[plan.layer]
        hidden, plan, attended, probing = self.attention(hidden.narrow(plan.rows), plan, policy)
        if attended is not None:
            seen = self.kv.layer_heads(plan.layer).seen
            self.trace.current.flops.attend(plan.layer, hidden.rows, seen)
            add_attention(layer, hidden.grid, hidden.states, attended)
            # The feed-forward is wider than attention: it gets its memory.
            del attended
            self.feed_forward(hidden, plan)
        self.trace.current.rows_per_layer[plan.layer] += len(plan.rows)
        self.trace.most_rows = max(self.trace.most_rows, len(plan.rows))
        return hidden, None if probing is None else self.scores(plan, probing), plan

    def attention(
        self, hidden: Hidden, plan: LayerPlan, policy: Plans
    ) -> tuple[Hidden, LayerPlan, torch.Tensor | None, torch.Tensor | None]:
        """Projects rows, writes their K, V, measures, and attends: [R, H, D] of the rows left.

        Returns those rows, the plan as it came to be, and the queries still to be scored. Rows of
        the last layer whose logits nobody wants attend to nothing.
        """
        spec, layer, kv = self.spec, self.spec.layers[plan.layer], self.kv
        if plan.probe is not Probe.DEVIATION:
            kv.own(plan.rows, plan.local_rows)
        table = kv.rows(plan.rows, plan.local_rows)
        turn = table.turns[layer.rope_key] if layer.rotates else None
        spared = self.spared(hidden, plan)
        if spared is None:
            q, k, v = project(spec, layer, hidden.grid, hidden.states, turn)
            self.trace.current.flops.project(plan.layer, len(plan.rows))
        else:
            q, k, v = project_sparing(spec, layer, hidden.grid, hidden.states, turn, spared)
            fewer = len(spared.local.heads), len(spared.rows)
            self.trace.current.flops.project(plan.layer, len(plan.rows), fewer)
        if plan.probe is Probe.DEVIATION:
            self.probed = self.clock.mark()
            plan = self.narrowed(plan, policy, probes.deviation(kv, plan.layer, table, k, v))
            kept = hidden.index_of(plan.rows)
            q, k, v = (x.index_select(0, kept) for x in (q, k, v))
            hidden = hidden.narrow(plan.rows, kept)
            kv.own(plan.rows, plan.local_rows)
            table = kv.rows(plan.rows, plan.local_rows)
        if plan.local_rows is not None and kv.layer_heads(plan.layer).local.heads:
            self.leave_out(plan.rows, plan.local_rows)
        kv.write(plan.layer, k, v, table)
        if plan.probe is Probe.SALIENCE:
            plan = self.salient(hidden, plan, policy, q)
        restored = self.restore(plan)
        if restored:
            if spared is not None:
                grid, states = hidden.grid, hidden.states
                heads = SomeHeads(restored, spec.device)
                project_heads(spec, layer, grid, states, turn, heads, (k, v))
                self.trace.current.flops.project_heads(plan.layer, len(restored), len(plan.rows))
            table = kv.rows(plan.rows, plan.local_rows)
            kv.write(plan.layer, k, v, table)
        probing = self.queries(hidden, plan, q) if plan.probe in ASKED else None
        if self.unwanted(plan):
            if int(plan.rows[-1]) < self.logits_from:
                return hidden, plan, None, probing
            hidden = hidden.since(self.logits_from)
            rest = table.since(len(plan.rows) - len(hidden.rows))
            return hidden, plan, self.attend_pages(plan, rest, q[-len(hidden.rows) :]), probing
        if self.is_dense(plan):
            return hidden, plan, dense_attention(q, k, v, layer.scale), probing
        return hidden, plan, self.attend_pages(plan, table, q), probing

    def spared(self, hidden: Hidden, plan: LayerPlan) -> Spared | None:
        """Window heads whose K, V are not written for all rows; None: everything is projected."""
        local, layer = plan.local_rows, self.spec.layers[plan.layer]
        if local is None or plan.probe is Probe.DEVIATION or same_rows(local, plan.rows):
            return None
        heads = self.kv.layer_heads(plan.layer)
        if not heads.local.heads or not may_spare(layer):
            return None
        return Spared(heads.local, heads.others, hidden.index_of(local))

    def feed_forward(self, hidden: Hidden, plan: LayerPlan) -> None:
        """The feed-forward of the rows that the plan has run it; the others keep their residual."""
        layer, rows = self.spec.layers[plan.layer], plan.ffn_rows
        if rows is not None and same_rows(rows, plan.rows):
            rows = None
        if rows is None:
            self.trace.current.flops.feed_forward(plan.layer, len(hidden.rows))
            add_feed_forward(layer, hidden.grid, hidden.states)
            return
        if plan.layer + 1 < len(self.spec.layers):
            self.leave_out(plan.rows, rows)
        # The last layer has left out those before the wanted ones.
        rows = rows[np.searchsorted(rows, hidden.rows[0]) :]
        if not len(rows):
            return
        self.trace.current.flops.feed_forward(plan.layer, len(rows))
        index, states = hidden.index_of(rows), hidden.grid.real(hidden.states)
        some = states.index_select(0, index)
        add_feed_forward(layer, RowGrid.packed(len(rows)), some)
        states.index_copy_(0, index.long(), some)

    def leave_out(self, rows: Rows, kept: Rows) -> None:
        """Takes note of rows whose KV, here or in later layers, is not that of a full prefill.

        `kept` are some of the rows; both are sorted, so the first that differ show the first left.
        """
        both = min(len(rows), len(kept))
        differ = np.flatnonzero(rows[:both] != kept[:both])
        first = int(differ[0]) if len(differ) else both
        if first < len(rows):
            self.trace.exact = min(self.trace.exact, int(rows[first]))

    def narrowed(self, plan: LayerPlan, policy: Plans, moved: torch.Tensor) -> LayerPlan:
        """The same layer with the rows that the policy keeps once it knows how far KV moved."""
        narrowed = self.ask(policy, moved)
        if not isinstance(narrowed, LayerPlan) or narrowed.layer != plan.layer:
            raise InvalidArgument("layer plan: expected the same layer after a deviation probe")
        return narrowed

    def salient(self, hidden: Hidden, plan: LayerPlan, policy: Plans, q: torch.Tensor) -> LayerPlan:
        """The same layer and rows, with what the policy chose once it knows the salience."""
        self.probed = self.clock.mark()
        probing = self.queries(hidden, plan, q)
        self.trace.current.flops.score(plan.score_rows, self.kv.heads.seen_by_model(plan.layer))
        result = probes.salience(self.kv, plan.layer, probing, plan.score_rows)
        chosen = self.ask(policy, result)
        lawful = isinstance(chosen, LayerPlan) and chosen.layer == plan.layer
        if not isinstance(chosen, LayerPlan) or not lawful or not same_rows(chosen.rows, plan.rows):
            raise InvalidArgument(
                "layer plan: expected the same layer and rows after a salience probe"
            )
        if chosen.probe in (Probe.DEVIATION, Probe.SALIENCE):
            raise InvalidArgument(
                f"layer plan: expected no further probe before attention, got {chosen.probe.value}"
            )
        return replace(chosen, local_rows=plan.local_rows)

    def restore(self, plan: LayerPlan) -> list[int]:
        """Makes heads of the layer full for the request where there is room: which."""
        done = [head for head in plan.restore if self.kv.promote(plan.layer, head)]
        self.trace.restored += [(plan.layer, head) for head in done]
        self.trace.refused += [(plan.layer, head) for head in plan.restore if head not in done]
        if done:
            self.trace.exact = min(self.trace.exact, int(plan.rows[0]))
        return done

    def attend_pages(self, plan: LayerPlan, table: RowTable, q: torch.Tensor) -> torch.Tensor:
        """Attention of the table's rows over all KV up to them: [R, H, D]."""
        kv = self.kv.table
        attended, _ = ops.attend_prefill(
            q,
            table.positions,
            kv.entries,
            self.kv.pages,
            plan.layer,
            row_offsets=table.offsets,
            entry_offsets=kv.offsets,
            **self.kv.reading(plan.layer),
        )
        return attended

    def unwanted(self, plan: LayerPlan) -> bool:
        """Whether the layer is the last and computes rows before those whose logits are wanted."""
        last = plan.layer + 1 == len(self.spec.layers) > 1
        return last and bool(plan.rows[0] < self.logits_from)

    def is_dense(self, plan: LayerPlan) -> bool:
        """Whether the rows are the whole prompt, so that k and v in hand are all there is to read.

        Then a GPU's own kernels for dense attention are faster than any that reads pages. Not
        where a head has a window that leaves something out, or keeps K, V that were reused.
        """
        layer, length = self.spec.layers[plan.layer], len(self.tokens)
        half = self.spec.dtype in (torch.bfloat16, torch.float16)
        whole = len(plan.rows) == length
        if self.spec.device.type != "cuda" or not half or not whole or layer.softcap:
            return False
        heads = self.kv.layer_heads(plan.layer)
        if plan.local_rows is not None and heads.local.heads:
            return False
        return all(not window or window >= length for window, _ in heads.seen)

    def queries(self, hidden: Hidden, plan: LayerPlan, q: torch.Tensor) -> torch.Tensor:
        """The queries [S, H, D] that are to be scored.

        # Errors
        `InvalidArgument` for a row to be scored that the plan does not compute.
        """
        if same_rows(plan.rows, plan.score_rows):
            return q
        return q.index_select(0, hidden.index_of(plan.score_rows))

    def scores(self, plan: LayerPlan, q: torch.Tensor) -> torch.Tensor:
        """What the plan's probe measures of every token, f32 [T]."""
        assert plan.probe is not None
        self.probed = self.clock.mark()
        places = context_of(plan.score_rows) if plan.probe is Probe.CONTEXT else plan.score_rows
        self.trace.current.flops.score(places, self.kv.layer_heads(plan.layer).seen)
        return ASKED[plan.probe](self.kv, plan.layer, q, plan.score_rows)

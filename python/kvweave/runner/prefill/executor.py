"""Carries out what a walk hands out over a request's pages: the runner's prefill.

For each layer: project the plan's rows → write K, V → attend by position → finish the rows. What
the policy asked to measure goes back to it before it says what comes next. Behind the last layer
it may ask for a draft, or begin another pass: see `PlanWalk`.
"""

from __future__ import annotations

import numpy as np
import torch

from kvweave.errors import InvalidArgument
from kvweave.plan import Draft, LayerPlan, Plans, Probe, ProbeResult, Rows, Salience
from kvweave.plan_walk import Begin, Further, PlanWalk, Task
from kvweave.question import ASKED, context_of
from kvweave.runner.clock import Clock
from kvweave.runner.kv.heads import SomeHeads
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.tables import RowTable, same_rows, send_index
from kvweave.runner.model.layer import (
    RowGrid,
    add_attention,
    add_feed_forward,
    dense_attention,
    project,
)
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.model.sinks import beside_sinks
from kvweave.runner.prefill import chunks, probes
from kvweave.runner.prefill.asked_layer import AskedLayer
from kvweave.runner.prefill.draft import Drafter
from kvweave.runner.prefill.flops import ModelWeights
from kvweave.runner.prefill.hidden import Hidden
from kvweave.runner.prefill.spared import Spared, may_spare, project_heads, project_sparing
from kvweave.runner.prefill.trace import PassTrace, Trace


class Executor:
    """Prefill of one request; holds nothing between requests but the model."""

    def __init__(self, spec: ModelSpec, tiled: bool, drafter: Drafter | None = None) -> None:
        self.spec = spec
        self.tiled = tiled
        self.drafter = drafter
        self.weights = ModelWeights(spec)

    def prefill(
        self,
        kv: RequestKv,
        tokens: torch.Tensor,
        policy: Plans,
        logits_from: int,
        done: int = 0,
    ) -> tuple[torch.Tensor, Trace]:
        """Carries out a policy; returns the logits f32 [n, V] from a position on, and the trace.

        tokens i64 [T]; plans name none of the first `done`. The last layer computes K, V of all its
        rows, and the rest of those alone that are at or after `logits_from`. The logits are those
        of the last pass.

        # Errors
        `InvalidArgument` for what `PlanWalk` refuses, such as a plan that skips a layer, names rows
        without hidden states or leaves out a position whose logits are wanted; for a plan that
        restores a full head. `PoolFull` when copy-on-write of a shared block finds no room.
        """
        with self._walk(policy, len(tokens), logits_from, done) as walk:
            run = _Run(self, kv, tokens, logits_from, walk)
            run.carry_out()
        return run.logits(), run.trace

    def in_chunks(
        self, kv: RequestKv, tokens: torch.Tensor, policy: Plans, logits_from: int, done: int
    ) -> ChunkedRun:
        """The same for a policy that measures nothing, one span of positions after the other.

        Whoever goes on with it says when each span is computed; the first begins at `done`.

        # Errors
        As for `prefill`; `InvalidArgument` for a plan with a probe.
        """
        with self._walk(policy, len(tokens), logits_from, done) as walk:
            plans = chunks.collected(walk)
        return ChunkedRun(_Run(self, kv, tokens, logits_from, walk), plans)

    def _walk(self, policy: Plans, tokens: int, logits_from: int, done: int) -> PlanWalk:
        if logits_from >= tokens:
            raise InvalidArgument(f"logits: expected a position below {tokens}, got {logits_from}")
        layers = len(self.spec.layers)
        return PlanWalk(policy, layers, tokens, done=done, logits_from=logits_from)


class _Run:
    """The state of one prefill."""

    def __init__(
        self,
        executor: Executor,
        kv: RequestKv,
        tokens: torch.Tensor,
        logits_from: int,
        walk: PlanWalk,
    ) -> None:
        self.spec = executor.spec
        self.tiled = executor.tiled
        self.drafter = executor.drafter
        self.kv = kv
        self.tokens = tokens
        self.logits_from = logits_from
        self.walk = walk
        self.trace = Trace(executor.weights, len(tokens))
        self.clock = Clock(executor.spec.device)
        self.probed = self.clock.mark()
        self.end = len(tokens)
        self.logits_parts: list[torch.Tensor] = []

    def carry_out(self) -> None:
        """All tasks of the walk, and the logits that are wanted of the last pass."""
        task, hidden, result = self.advance(None), None, None
        while task is not None:
            if isinstance(task, Draft):
                result = self.draft(task, hidden)
                task = self.advance(result)
                continue
            if isinstance(task, Begin):
                # The states of the pass before are given back before this one needs its own.
                hidden = None
                self.trace.begin("layers", self.clock.mark())
                hidden, result, rows = self.layer(self.embed(task.plan.rows), task.plan)
            elif isinstance(task, Further):
                assert hidden is not None
                hidden, result, rows = self.further(hidden, task.plan)
            else:
                assert hidden is not None
                hidden, result, rows = self.layer(hidden, task.plan)
            task = self.advance(result)
            if task is None or isinstance(task, (Begin, Draft)):
                self.trace.current.ended = self.clock.mark()
                self.trace.recomputed = rows
        assert hidden is not None
        self.kv.gathered.forget()
        self.score(hidden)

    def further(self, hidden: Hidden, plan: LayerPlan) -> tuple[Hidden, torch.Tensor | None, Rows]:
        """The first layer once more for further rows: their input is the embedding, too."""
        more, result, rows = self.layer(self.embed(plan.rows), plan)
        return hidden.merge(more), result, rows

    def chunk(self, plans: list[LayerPlan], end: int) -> None:
        """One span of positions before `end`, by plans that the walk has passed."""
        self.end, hidden = end, None
        if not self.trace.passes:
            self.trace.begin("layers", self.clock.mark())
        for plan in plans:
            states = self.embed(plan.rows) if hidden is None else hidden
            hidden, _, rows = self.layer(states, plan)
        self.kv.gathered.forget()
        self.trace.current.ended = self.clock.mark()
        if hidden is not None and plans[-1].layer + 1 == len(self.spec.layers):
            self.trace.recomputed = np.concatenate((self.trace.recomputed, rows))
            self.score(hidden)

    def draft(self, step: Draft, hidden: Hidden | None) -> torch.Tensor | None:
        """What the queries of the likeliest next tokens look at, mass f32 [T]."""
        assert hidden is not None
        if self.drafter is None:
            raise InvalidArgument("draft: expected an executor with a drafter, got one without")
        last = hidden.since(len(self.tokens) - 1)
        done = self.trace.begin("draft", self.clock.mark())
        logits = self.head(last, done)
        self.probed = self.clock.mark()
        mass = self.drafter.mass(self.kv, logits[-1], step, done)
        done.ended = self.clock.mark()
        return mass

    def score(self, hidden: Hidden) -> None:
        """Logits of the rows at or after `logits_from`."""
        wanted = hidden.since(self.logits_from)
        if len(wanted.rows):
            self.logits_parts.append(self.head(wanted, self.trace.current))
            self.trace.current.ended = self.clock.mark()

    def head(self, hidden: Hidden, done: PassTrace) -> torch.Tensor:
        """The logits f32 [R, V] of some rows."""
        scored = hidden.grid.real(hidden.grid.apply(self.spec.scores, hidden.states))
        done.flops.logits(len(scored))
        return scored

    def logits(self) -> torch.Tensor:
        """All of them, f32 [n, V]."""
        return self.logits_parts[0] if len(self.logits_parts) == 1 else torch.cat(self.logits_parts)

    def embed(self, rows: Rows) -> Hidden:
        """The embeddings of some positions: layer 0's input."""
        first, end = int(rows[0]), self.end
        if first + len(rows) != end:
            tokens = self.tokens.index_select(0, send_index(self.tokens.device, rows))
            return Hidden(rows, RowGrid.packed(len(rows)), self.spec.embed(tokens))
        states = self.spec.embed(self.tokens[first:end])
        if self.spec.device.type != "cpu":
            return Hidden(rows, RowGrid.packed(len(rows)), states)
        grid = RowGrid.aligned(first, len(rows), self.tiled)
        return Hidden(rows, grid, grid.pad(states))

    def advance(self, result: ProbeResult) -> Task | None:
        """What comes next, and how long the policy took to choose if something was measured."""
        try:
            return self.walk.advance(result)
        finally:
            self.chosen(result)

    def measured(self, result: torch.Tensor | Salience) -> LayerPlan:
        """The same once more for what is measured before a layer's attention."""
        try:
            return self.walk.measured(result)
        finally:
            self.chosen(result)

    def chosen(self, result: ProbeResult) -> None:
        """Takes the time of a choice by what was measured."""
        if result is not None:
            self.trace.selections.append((self.probed, self.clock.mark()))

    def layer(self, hidden: Hidden, plan: LayerPlan) -> tuple[Hidden, torch.Tensor | None, Rows]:
        """One layer over the plan's rows; the probe's result, if any, and the rows written."""
        layer = self.spec.layers[plan.layer]
        self.kv.arrive(plan.layer)
        hidden, plan, attended, probing = self.attention(hidden.narrow(plan.rows), plan)
        if attended is not None:
            seen = self.kv.layer_heads(plan.layer).seen
            self.trace.current.flops.attend(plan.layer, hidden.rows, seen)
            if layer.is_parallel:
                self.feed_forward(hidden, plan)
            add_attention(layer, hidden.grid, hidden.states, attended)
            # The feed-forward is wider than attention: it gets its memory.
            del attended
            if not layer.is_parallel:
                self.feed_forward(hidden, plan)
        self.trace.current.rows_per_layer[plan.layer] += len(plan.rows)
        self.trace.most_rows = max(self.trace.most_rows, len(plan.rows))
        return hidden, None if probing is None else self.scores(plan, probing), plan.rows

    def attention(
        self, hidden: Hidden, plan: LayerPlan
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
            plan = self.measured(probes.deviation(kv, plan.layer, table, k, v))
            kept = hidden.index_of(plan.rows)
            q, k, v = (x.index_select(0, kept) for x in (q, k, v))
            hidden = hidden.narrow(plan.rows, kept)
            kv.own(plan.rows, plan.local_rows)
            table = kv.rows(plan.rows, plan.local_rows)
        if plan.local_rows is not None and kv.layer_heads(plan.layer).local.heads:
            self.leave_out(plan.rows, plan.local_rows)
        kv.take_queries(plan.layer, q, plan.rows)
        kv.write(plan.layer, k, v, table)
        if plan.probe is Probe.SALIENCE:
            plan = self.salient(hidden, plan, q)
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

    def salient(self, hidden: Hidden, plan: LayerPlan, q: torch.Tensor) -> LayerPlan:
        """The same layer and rows, with what the policy chose once it knows the salience."""
        self.probed = self.clock.mark()
        probing = self.queries(hidden, plan, q)
        self.trace.current.flops.score(plan.score_rows, self.kv.heads.seen_by_model(plan.layer))
        return self.measured(probes.salience(self.kv, plan.layer, probing, plan.score_rows))

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
        attended = self.kv.attend(plan.layer, q, table)
        return beside_sinks(attended, self.spec.layers[plan.layer].sinks)

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
        if self.spec.device.type != "cuda" or not half or not whole:
            return False
        if layer.softcap or layer.sinks is not None:
            return False
        heads = self.kv.layer_heads(plan.layer)
        if plan.local_rows is not None and heads.local.heads:
            return False
        return all(not window or window >= length for window, _ in heads.seen)

    def queries(self, hidden: Hidden, plan: LayerPlan, q: torch.Tensor) -> torch.Tensor:
        """The queries [S, H, D] that are to be scored."""
        if same_rows(plan.rows, plan.score_rows):
            return q
        return q.index_select(0, hidden.index_of(plan.score_rows))

    def scores(self, plan: LayerPlan, q: torch.Tensor) -> torch.Tensor:
        """What the plan's probe measures of every token, f32 [T]."""
        assert plan.probe is not None
        self.probed = self.clock.mark()
        places = context_of(plan.score_rows) if plan.probe is Probe.CONTEXT else plan.score_rows
        self.trace.current.flops.score(places, self.kv.layer_heads(plan.layer).seen)
        return ASKED[plan.probe](AskedLayer(self.kv, plan.layer), q, plan.score_rows)


class ChunkedRun:
    """A prefill between two of its spans, by the plans of a policy that measures nothing.

    Spans follow one another; before each but the first windows have to be moved on.
    """

    def __init__(self, run: _Run, plans: list[LayerPlan]) -> None:
        self._run = run
        self._plans = plans

    @property
    def trace(self) -> Trace:
        """What was done so far."""
        return self._run.trace

    def end_of(self, start: int, most_rows: int) -> int:
        """How far from a position a span may go that has so many rows at most."""
        # No later layer has a row that the first has not.
        rows = self._plans[0].rows
        after = int(np.searchsorted(rows, start)) + most_rows
        return int(rows[after]) if after < len(rows) else len(self._run.tokens)

    def compute(self, start: int, end: int) -> None:
        """The rows of positions [start, end)."""
        self._run.chunk(list(chunks.cut(self._plans, start, end)), end)

    def logits(self) -> torch.Tensor:
        """The logits f32 [n, V] that are wanted, behind the last span."""
        return self._run.logits()

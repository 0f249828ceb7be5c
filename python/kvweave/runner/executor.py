"""Runs any policy's `LayerPlan`s over a request's pages: the one executor of prefill.

For each layer: project the plan's rows → write K, V → attend by position → finish the rows. What
the policy asked to measure goes back to it before it says what comes next.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.errors import InvalidArgument
from kvweave.plan import LayerPlan, Probe, ProbeResult, Rows
from kvweave.runner.clock import Clock, Mark
from kvweave.runner.layer import RowGrid, add_attention, add_feed_forward, dense_attention, project
from kvweave.runner.model_spec import ModelSpec
from kvweave.runner.rope import PositionTable
from kvweave.runner.tables import KvTable, RowTable, send_index

Policy = Generator[LayerPlan, ProbeResult, None]

_COMPARED_ROWS = 4096
"""Rows whose fresh and cached KV are compared at once, in f32: bounds the memory that takes."""


def same_rows(one: Rows, other: Rows) -> bool:
    """Whether two sets of rows are equal; layers mostly plan the very same array."""
    return one is other or (len(one) == len(other) and np.array_equal(one, other))


@dataclass
class Trace:
    """What the executor did: rows computed per layer [L], when probes began and choices ended."""

    rows_per_layer: list[int] = field(default_factory=list)
    selections: list[tuple[Mark, Mark]] = field(default_factory=list)


@dataclass
class Hidden:
    """Hidden states of `rows` (sorted positions), padded on their grid: [padded, E]."""

    rows: Rows
    grid: RowGrid
    states: torch.Tensor

    def index_of(self, rows: Rows) -> torch.Tensor:
        """Where a subset of the rows is among them, for `index_select`.

        # Errors
        `InvalidArgument` when a row has no hidden state here.
        """
        index = np.searchsorted(self.rows, rows)
        known = index < len(self.rows)
        if not known.all() or not np.array_equal(self.rows[index], rows):
            raise InvalidArgument(
                "layer plan: expected rows that the layer before computed, "
                f"got {int(len(rows) - np.isin(rows, self.rows).sum())} others"
            )
        return send_index(self.states.device, index)

    def narrow(self, rows: Rows, index: torch.Tensor | None = None) -> Hidden:
        """The states of a subset of the rows, packed; `index` where it is known already."""
        if same_rows(rows, self.rows):
            return self
        chosen = self.index_of(rows) if index is None else index
        states = self.grid.real(self.states).index_select(0, chosen)
        return Hidden(rows, RowGrid.packed(len(rows)), states)

    def since(self, position: int) -> Hidden:
        """The rows at or after a position (a view)."""
        first = int(np.searchsorted(self.rows, position))
        cut, grid = self.grid.since(first)
        return Hidden(self.rows[first:], grid, self.states[cut:])

    def merge(self, other: Hidden) -> Hidden:
        """The union of two disjoint sets of rows, in order of position."""
        rows = np.concatenate((self.rows, other.rows))
        order = np.argsort(rows, kind="stable")
        states = torch.cat((self.grid.real(self.states), other.grid.real(other.states)))
        sorted_states = states.index_select(0, send_index(states.device, order))
        return Hidden(rows[order], RowGrid.packed(len(rows)), sorted_states)


class Executor:
    """Prefill of one request; holds nothing between requests but the model and the pages."""

    def __init__(self, spec: ModelSpec, pages: torch.Tensor, tiled: bool) -> None:
        self.spec = spec
        self.pages = pages
        self.tiled = tiled

    def prefill(
        self,
        request: KvRequest,
        tokens: torch.Tensor,
        positions: PositionTable,
        policy: Policy,
        logits_from: int,
    ) -> tuple[Hidden, Trace]:
        """Carries out a policy; returns the last layer's hidden states and the trace.

        tokens i64 [T]. The last layer computes K, V of all its rows, and the rest of those alone
        that are at or after `logits_from`.

        # Errors
        `InvalidArgument` for a plan that skips a layer or names rows without hidden states;
        `PoolFull` when copy-on-write of a shared block finds no room.
        """
        run = _Run(self, request, tokens, positions, logits_from)
        plan = next(policy)
        hidden = run.embed(plan.rows)
        while True:
            hidden, result, plan = run.layer(hidden, plan, policy)
            following = run.ask(policy, result)
            if following is None:
                break
            if following.layer == plan.layer == 0:
                hidden, following = run.extend(hidden, following, policy)
                if following is None:
                    break
            if following.layer != plan.layer + 1:
                raise InvalidArgument(
                    f"layer plan: expected layer {plan.layer + 1}, got {following.layer}"
                )
            plan = following
        if plan.layer + 1 != len(self.spec.layers):
            raise InvalidArgument(
                f"layer plan: expected {len(self.spec.layers)} layers, got {plan.layer + 1}"
            )
        return hidden, run.trace

    def logits(self, hidden: Hidden, from_position: int) -> torch.Tensor:
        """f32 [n, V] of the rows at or after a position, in order.

        # Errors
        `InvalidArgument` when one of those positions was not computed.
        """
        wanted = hidden.since(from_position)
        if len(wanted.rows) == 0 or int(wanted.rows[0]) != from_position:
            raise InvalidArgument(
                f"logits: expected position {from_position} among the computed rows, "
                f"got {len(hidden.rows)} rows without it"
            )
        return wanted.grid.real(wanted.grid.apply(self.spec.scores, wanted.states))


class _Run:
    """The state of one prefill."""

    def __init__(
        self,
        executor: Executor,
        request: KvRequest,
        tokens: torch.Tensor,
        positions: PositionTable,
        logits_from: int,
    ) -> None:
        self.spec = executor.spec
        self.pages = executor.pages
        self.tiled = executor.tiled
        self.request = request
        self.tokens = tokens
        self.positions = positions
        self.logits_from = logits_from
        self.trace = Trace(rows_per_layer=[0] * len(executor.spec.layers))
        self.clock = Clock(executor.spec.device)
        self.probed = self.clock.mark()
        self.kv = KvTable.of(request, executor.spec.device)
        self.table: RowTable | None = None

    def embed(self, rows: Rows) -> Hidden:
        """The embeddings of some positions: layer 0's input."""
        if len(rows) == 0:
            raise InvalidArgument("layer plan: expected at least one row, got none")
        first, length = int(rows[0]), len(self.tokens)
        if first + len(rows) != length:
            tokens = self.tokens.index_select(0, send_index(self.tokens.device, rows))
            return Hidden(rows, RowGrid.packed(len(rows)), self.spec.embed(tokens))
        states = self.spec.embed(self.tokens[first:])
        if self.spec.device.type != "cpu":
            return Hidden(rows, RowGrid.packed(len(rows)), states)
        grid = RowGrid.aligned(first, len(rows), self.tiled)
        return Hidden(rows, grid, grid.pad(states))

    def ask(self, policy: Policy, result: ProbeResult) -> LayerPlan | None:
        """The policy's next plan, or None when it has no more."""
        try:
            return policy.send(result)
        except StopIteration:
            return None
        finally:
            if result is not None:
                self.trace.selections.append((self.probed, self.clock.mark()))

    def extend(
        self, hidden: Hidden, plan: LayerPlan, policy: Policy
    ) -> tuple[Hidden, LayerPlan | None]:
        """Layer 0 once more for further rows: their input is the embedding, known for all."""
        further = np.setdiff1d(plan.rows, hidden.rows)
        if len(further):
            more, _, _ = self.layer(self.embed(further), LayerPlan(0, further), policy)
            hidden = hidden.merge(more)
        return hidden, self.ask(policy, None)

    def table_of(self, rows: Rows) -> RowTable:
        """The tables of some rows; the last ones are kept, for most layers compute the same."""
        if self.table is None or not same_rows(self.table.rows, rows):
            self.table = RowTable.of(self.request, rows, self.positions, self.spec.device)
        return self.table

    def own(self, rows: Rows) -> None:
        """Copy-on-write of blocks that rows will be written to and that are still shared."""
        if self.table is not None and same_rows(self.table.rows, rows):
            return
        copies = self.request.make_writable(rows)
        if len(copies):
            ops.copy_rerotate(self.pages, copies, self.positions.rope, kv_heads=self.spec.kv_heads)
            self.request.finish_copies()
            self.kv = KvTable.of(self.request, self.spec.device)

    def layer(
        self, hidden: Hidden, plan: LayerPlan, policy: Policy
    ) -> tuple[Hidden, ProbeResult, LayerPlan]:
        """One layer over the plan's rows; returns the probe's result, if one was asked for."""
        spec, layer = self.spec, self.spec.layers[plan.layer]
        hidden = hidden.narrow(plan.rows)
        if plan.probe is not Probe.DEVIATION:
            self.own(plan.rows)
        table = self.table_of(plan.rows)
        turn = table.turns[layer.rope_key] if layer.rotates else None
        q, k, v = project(spec, layer, hidden.grid, hidden.states, turn)
        if plan.probe is Probe.DEVIATION:
            plan = self.narrowed(plan, policy, k, v)
            kept = hidden.index_of(plan.rows)
            q, k, v = (x.index_select(0, kept) for x in (q, k, v))
            hidden = hidden.narrow(plan.rows, kept)
            self.own(plan.rows)
            table = self.table_of(plan.rows)
        ops.write_pages(self.pages, plan.layer, k, v, table.slots)
        probing = self.probing(plan, q) if plan.probe is Probe.SCORES else None
        self.trace.rows_per_layer[plan.layer] += len(plan.rows)
        if self.unwanted(plan):
            hidden = hidden.since(self.logits_from)
            q = q[-len(hidden.rows) :]
            attended = self.attend_pages(plan, table.since(len(plan.rows) - len(q)), q)
        elif self.is_dense(plan):
            attended = dense_attention(q, k, v, layer.scale)
        else:
            attended = self.attend_pages(plan, table, q)
        add_attention(layer, hidden.grid, hidden.states, attended)
        # The feed-forward is wider than all of these: it gets their memory.
        del q, k, v, attended
        add_feed_forward(layer, hidden.grid, hidden.states)
        return hidden, None if probing is None else self.scores(plan, probing), plan

    def narrowed(
        self, plan: LayerPlan, policy: Policy, k: torch.Tensor, v: torch.Tensor
    ) -> LayerPlan:
        """The same layer with the rows that the policy keeps once it knows how far KV moved."""
        self.probed = self.clock.mark()
        narrowed = self.ask(policy, self.deviation(plan, k, v))
        if narrowed is None or narrowed.layer != plan.layer:
            raise InvalidArgument("layer plan: expected the same layer after a deviation probe")
        return narrowed

    def reading(self, plan: LayerPlan) -> dict[str, Any]:
        """What the reading ops take by name in this layer."""
        layer = self.spec.layers[plan.layer]
        return {
            "kv_heads": self.spec.kv_heads,
            "scale": layer.scale,
            "rope": self.positions.rope,
            "window": layer.window,
            "softcap": layer.softcap,
        }

    def attend_pages(self, plan: LayerPlan, table: RowTable, q: torch.Tensor) -> torch.Tensor:
        """Attention of the table's rows over all KV up to them: [R, H, D]."""
        attended, _ = ops.attend_prefill(
            q,
            table.positions,
            self.kv.entries,
            self.pages,
            plan.layer,
            row_offsets=table.offsets,
            entry_offsets=self.kv.offsets,
            **self.reading(plan),
        )
        return attended

    def unwanted(self, plan: LayerPlan) -> bool:
        """Whether the layer is the last and computes rows before those whose logits are wanted."""
        last = plan.layer + 1 == len(self.spec.layers) > 1
        return last and bool(plan.rows[0] < self.logits_from <= plan.rows[-1])

    def is_dense(self, plan: LayerPlan) -> bool:
        """Whether the rows are the whole prompt, so that k and v in hand are all there is to read.

        Then a GPU's own kernels for dense attention are faster than any that reads pages.
        """
        layer, length = self.spec.layers[plan.layer], len(self.tokens)
        half = self.spec.dtype in (torch.bfloat16, torch.float16)
        seen = layer.window is None or layer.window >= length
        whole = len(plan.rows) == length
        return self.spec.device.type == "cuda" and half and whole and seen and not layer.softcap

    def probing(self, plan: LayerPlan, q: torch.Tensor) -> torch.Tensor:
        """The queries [S, H, D] that are to be scored."""
        if same_rows(plan.rows, plan.score_rows):
            return q
        chosen = np.searchsorted(plan.rows, plan.score_rows)
        return q.index_select(0, send_index(q.device, chosen))

    def scores(self, plan: LayerPlan, q: torch.Tensor) -> torch.Tensor:
        """Sparse-Q mass of every token, f32 [T]; tables go over with the call, once a prefill."""
        self.probed = self.clock.mark()
        return ops.score_tokens(
            q, plan.score_rows, self.kv.on_host, self.pages, plan.layer, **self.reading(plan)
        )

    def deviation(self, plan: LayerPlan, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Squared distance of fresh K, V from the cached ones, summed over heads: f32 [R].

        Rows that hold no cached KV yet compare with whatever the page holds; the policy knows
        which rows those are.
        """
        slots = torch.as_tensor(self.table_of(plan.rows).slots).long()
        first = plan.layer * self.spec.kv_heads
        heads = torch.arange(first, first + self.spec.kv_heads, device=k.device)
        parts = zip(*(torch.split(x, _COMPARED_ROWS) for x in (slots, k, v)), strict=True)
        return torch.cat(
            [self._moved(at, heads, fresh_k, fresh_v) for at, fresh_k, fresh_v in parts]
        )

    def _moved(
        self, slots: torch.Tensor, heads: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        pages, slot = slots[:, :1] + heads, slots[:, 1:]
        apart: torch.Tensor = (k.float() - self.pages[pages, 0, slot].float()).square().sum((1, 2))
        return apart + (v.float() - self.pages[pages, 1, slot].float()).square().sum((1, 2))

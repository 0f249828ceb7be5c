"""Runs any policy's `LayerPlan`s over a request's pages: the one executor of prefill.

For each layer: project the plan's rows → write K, V → attend by position → finish the rows. What
the policy asked to measure goes back to it before it says what comes next.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.errors import InvalidArgument
from kvweave.plan import LayerPlan, Probe, ProbeResult, Rows
from kvweave.runner.layer import TILE, RowGrid, finish, project
from kvweave.runner.model_spec import ModelSpec
from kvweave.runner.rope import PositionTable

Policy = Generator[LayerPlan, ProbeResult, None]


@dataclass
class Trace:
    """What the executor did: rows computed per layer [L], seconds spent on probes and choices."""

    rows_per_layer: list[int] = field(default_factory=list)
    select_s: float = 0.0


@dataclass
class Hidden:
    """Hidden states of `rows` (sorted positions), padded on their grid: [padded, E]."""

    rows: Rows
    grid: RowGrid
    states: torch.Tensor

    def narrow(self, rows: Rows) -> Hidden:
        """The states of a subset of the rows, packed.

        # Errors
        `InvalidArgument` when a row has no hidden state here.
        """
        if len(rows) == len(self.rows) and np.array_equal(rows, self.rows):
            return self
        index = np.searchsorted(self.rows, rows)
        known = index < len(self.rows)
        if not known.all() or not np.array_equal(self.rows[index], rows):
            raise InvalidArgument(
                "layer plan: expected rows that the layer before computed, "
                f"got {int(len(rows) - np.isin(rows, self.rows).sum())} others"
            )
        states = self.grid.real(self.states)[torch.from_numpy(index).to(self.states.device)]
        return Hidden(rows, RowGrid.packed(len(rows)), states)

    def merge(self, other: Hidden) -> Hidden:
        """The union of two disjoint sets of rows, in order of position."""
        rows = np.concatenate((self.rows, other.rows))
        order = np.argsort(rows, kind="stable")
        states = torch.cat((self.grid.real(self.states), other.grid.real(other.states)))
        index = torch.from_numpy(order).to(states.device)
        return Hidden(rows[order], RowGrid.packed(len(rows)), states[index])


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
    ) -> tuple[Hidden, Trace]:
        """Carries out a policy; returns the last layer's hidden states and the trace.

        tokens i64 [T].

        # Errors
        `InvalidArgument` for a plan that skips a layer or names rows without hidden states;
        `PoolFull` when copy-on-write of a shared block finds no room.
        """
        run = _Run(self, request, tokens, positions)
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
        wanted = hidden.rows[hidden.rows >= from_position]
        if len(wanted) == 0 or int(wanted[0]) != from_position:
            raise InvalidArgument(
                f"logits: expected position {from_position} among the computed rows, "
                f"got {len(hidden.rows)} rows without it"
            )
        grid, last = hidden.grid, int(np.searchsorted(hidden.rows, from_position))
        first_tile = (grid.lead + last) // TILE * TILE if grid.padded != grid.rows else last
        normed = self.spec.final_norm(hidden.states[first_tile:])
        scores: torch.Tensor = self.spec.head(normed).float()
        if self.spec.final_softcap is not None:
            scores = torch.tanh(scores / self.spec.final_softcap) * self.spec.final_softcap
        skip = grid.lead + last - first_tile
        return scores[skip : skip + len(wanted)]


class _Run:
    """The state of one prefill."""

    def __init__(
        self,
        executor: Executor,
        request: KvRequest,
        tokens: torch.Tensor,
        positions: PositionTable,
    ) -> None:
        self.spec = executor.spec
        self.pages = executor.pages
        self.tiled = executor.tiled
        self.request = request
        self.tokens = tokens
        self.positions = positions
        self.trace = Trace(rows_per_layer=[0] * len(executor.spec.layers))
        self.entries = request.entries()
        self.prepared: Rows | None = None

    def embed(self, rows: Rows) -> Hidden:
        """The embeddings of some positions: layer 0's input."""
        if len(rows) == 0:
            raise InvalidArgument("layer plan: expected at least one row, got none")
        index = torch.from_numpy(rows).to(self.tokens.device).long()
        states = self.spec.embed(self.tokens[index])
        first = int(rows[0])
        consecutive = int(rows[-1]) - first + 1 == len(rows) and int(rows[-1]) + 1 == len(
            self.tokens
        )
        if not consecutive:
            return Hidden(rows, RowGrid.packed(len(rows)), states)
        grid = RowGrid.aligned(first, len(rows), self.tiled)
        return Hidden(rows, grid, grid.pad(states))

    def ask(self, policy: Policy, result: ProbeResult) -> LayerPlan | None:
        """The policy's next plan, or None when it has no more."""
        start = time.perf_counter()
        try:
            return policy.send(result)
        except StopIteration:
            return None
        finally:
            self.trace.select_s += time.perf_counter() - start

    def extend(
        self, hidden: Hidden, plan: LayerPlan, policy: Policy
    ) -> tuple[Hidden, LayerPlan | None]:
        """Layer 0 once more for further rows: their input is the embedding, known for all."""
        further = np.setdiff1d(plan.rows, hidden.rows)
        if len(further):
            more, _, _ = self.layer(self.embed(further), LayerPlan(0, further), policy)
            hidden = hidden.merge(more)
        return hidden, self.ask(policy, None)

    def prepare(self, rows: Rows) -> None:
        """Where the rows' K, V will be written; copy-on-write of blocks still shared."""
        if self.prepared is not None and np.array_equal(self.prepared, rows):
            return
        copies = self.request.make_writable(rows)
        if len(copies):
            ops.copy_rerotate(self.pages, copies, self.positions.rope, kv_heads=self.spec.kv_heads)
            self.request.finish_copies()
            self.entries = self.request.entries()
        self.slots = self.request.slots(rows)
        self.prepared = rows

    def layer(
        self, hidden: Hidden, plan: LayerPlan, policy: Policy
    ) -> tuple[Hidden, ProbeResult, LayerPlan]:
        """One layer over the plan's rows; returns the probe's result, if one was asked for."""
        spec, layer = self.spec, self.spec.layers[plan.layer]
        hidden = hidden.narrow(plan.rows)
        cos, sin = self.turn(layer.rope_key if layer.rotates else None, layer.rotates, plan.rows)
        q, k, v = project(spec, layer, hidden.grid, hidden.states, cos, sin)
        if plan.probe is Probe.DEVIATION:
            start = time.perf_counter()
            moved = self.deviation(plan, k, v)
            self.trace.select_s += time.perf_counter() - start
            narrowed = self.ask(policy, moved)
            if narrowed is None or narrowed.layer != plan.layer:
                raise InvalidArgument("layer plan: expected the same layer after a deviation probe")
            keep = torch.from_numpy(np.searchsorted(plan.rows, narrowed.rows)).to(q.device)
            q, k, v = q[keep], k[keep], v[keep]
            hidden, plan = hidden.narrow(narrowed.rows), narrowed
        self.prepare(plan.rows)
        ops.write_pages(self.pages, plan.layer, k, v, self.slots)
        attention: dict[str, Any] = {
            "kv_heads": spec.kv_heads,
            "scale": layer.scale,
            "rope": self.positions.rope,
            "window": layer.window,
            "softcap": layer.softcap,
        }
        attended, _ = ops.attend_prefill(
            q, plan.rows, self.entries, self.pages, plan.layer, **attention
        )
        result: ProbeResult = None
        if plan.probe is Probe.SCORES:
            start = time.perf_counter()
            chosen = torch.from_numpy(np.searchsorted(plan.rows, plan.score_rows)).to(q.device)
            result = ops.score_tokens(
                q[chosen], plan.score_rows, self.entries, self.pages, plan.layer, **attention
            )
            self.trace.select_s += time.perf_counter() - start
        self.trace.rows_per_layer[plan.layer] += len(plan.rows)
        states = finish(layer, hidden.grid, hidden.states, attended)
        return Hidden(hidden.rows, hidden.grid, states), result, plan

    def turn(
        self, key: str | None, rotates: bool, rows: Rows
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Cos and sin of some rows, or none on a layer without positions."""
        if not rotates:
            return None, None
        index = torch.from_numpy(rows).to(self.tokens.device).long()
        return self.positions.cos[key][index], self.positions.sin[key][index]

    def deviation(self, plan: LayerPlan, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Squared distance of fresh K, V from the cached ones, summed over heads: f32 [R].

        Rows that hold no cached KV yet compare with whatever the page holds; the policy knows
        which rows those are.
        """
        slots = torch.from_numpy(self.request.slots(plan.rows)).to(k.device).long()
        heads = torch.arange(self.spec.kv_heads, device=k.device)
        page = slots[:, :1] + plan.layer * self.spec.kv_heads + heads
        cached_k = self.pages[page, 0, slots[:, 1:]].float()
        cached_v = self.pages[page, 1, slots[:, 1:]].float()
        moved: torch.Tensor = (k.float() - cached_k).square().sum((1, 2))
        return moved + (v.float() - cached_v).square().sum((1, 2))

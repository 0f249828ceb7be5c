"""One decode step: what it reads, and the forward of one row of each of B requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.ops import Reach, RopeTable, Table, Workspace
from kvweave.runner.decode.chosen_tables import ChosenTables
from kvweave.runner.decode.packed_reads import PackedStep
from kvweave.runner.decode.reads import StepReach
from kvweave.runner.decode.slots import DecodeSlots, Step
from kvweave.runner.kv.states import merged_states
from kvweave.runner.kv.tables import Int32, send
from kvweave.runner.kv.whole_layers import WholeLayers
from kvweave.runner.model.layer import RowGrid, finish, project
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.model.rope import Rotary, Turns
from kvweave.runner.model.sinks import beside_sinks


@dataclass(frozen=True)
class DecodeTables:
    """The newest token of each of B requests, and where its KV and that before it lie.

    ids i64 [B], positions i32 [B], slots i32 [tables, B, 2], entries i32 [N, 5], and the rows'
    turns. offsets i32 [2 · B · tables + 1]: where each table begins and ends; what lies between two
    of them is nobody's, see `reads`. `chosen`: what layers with top-K heads read instead.
    `packed`: what all heads read besides. `row_offsets` i32 [B + 1]: of a verification, where a
    request's rows begin and end; ids, positions, slots and turns are those of all rows then.
    `whole`: what all heads read where some of it lies in host memory.
    """

    ids: torch.Tensor
    positions: Table
    slots: Table
    entries: Table
    offsets: Table
    turns: Turns
    reach: StepReach
    chosen: ChosenTables | None = None
    packed: PackedStep | None = None
    row_offsets: Table | None = None
    whole: WholeLayers | None = None

    @staticmethod
    def of(rotary: Rotary, slots: DecodeSlots, step: Step) -> DecodeTables:
        """The tables of a step, and its entries brought up to date."""
        made, device = step.made, slots.spec.device
        slots.write(made.places, made.moved)
        # The room behind the last table ends nowhere: nobody reads it.
        offsets = np.append(made.spans, np.int32(0))
        positions, places, splits = send(device, made.positions, made.slots, offsets)
        entries = slots.entries if slots.entries.is_cuda else slots.entries.numpy()
        ids = torch.from_numpy(step.tokens).to(device, torch.int64)
        turns = turns_of(rotary, made.positions)
        chosen = None
        if step.chosen is not None:
            spans = made.spans.reshape(len(step.tokens), -1)
            table, *plans = map(torch.as_tensor, send(device, spans, *step.chosen.plans))
            chosen = slots.chosen_tables(step.chosen)
            chosen.begin(table, plans, *step.chosen.form)
        packed = None
        if slots.packed is not None and slots.packed.are_read(made.positions):
            packed = slots.packed.step(positions, made.positions)
        known = ids, positions, places, entries, splits, turns, slots.reach
        return DecodeTables(*known, chosen, packed, whole=slots.whole(step))

    def read(
        self, layer: int, q: torch.Tensor, pages: torch.Tensor, workspace: Workspace | None
    ) -> tuple[torch.Tensor, Table, Table, Reach]:
        """Pages, and the entries, offsets and reach by which rows of queries q [B, H, D] read them.

        Of a layer whose K, V are written into the arena's `pages`. Heads that are to choose anew do
        so by these queries.
        """
        if self.whole is not None:
            whole = self.whole.layer(self.reach.writes[layer].heads)
            return whole.pages, whole.entries, whole.offsets, whole.reach
        reach = self.reach.chosen[layer]
        if self.chosen is None or reach is None:
            return pages, self.entries, self.offsets, self.reach.reads[layer]
        return pages, *self.chosen.read(layer, q, workspace), reach


def turns_of(rotary: Rotary, places: Int32) -> Turns:
    """Turns of one row a request, at the frequencies that its length asks for."""
    if not rotary.is_fixed:
        return rotary.lone_turns(places)
    table = rotary.fixed(int(np.max(places)) + 1)
    return table.turns(torch.from_numpy(places).to(rotary.spec.device))


def query_room(spec: ModelSpec, requests: int) -> torch.Tensor:
    """Room for the queries of one step: [L, B, H, D]."""
    shape = len(spec.layers), requests, spec.query_heads, spec.head_dim
    return torch.empty(shape, dtype=spec.dtype, device=spec.device)


def forward(
    spec: ModelSpec,
    pages: torch.Tensor,
    tables: DecodeTables,
    rope: RopeTable,
    workspace: Workspace | None,
    queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits f32 [B, V] of each request's newest token, or of all rows, whose K, V it writes.

    Into `queries` [L, B, H, D], if given, go the rotated queries of every layer.
    """
    hidden: torch.Tensor = spec.embed(tables.ids)
    grid = RowGrid.packed(len(tables.ids))
    reach = tables.reach
    for index, layer in enumerate(spec.layers):
        turn = tables.turns[layer.rope_key] if layer.rotates else None
        q, k, v = project(spec, layer, grid, hidden, turn)
        if queries is not None:
            queries[index].copy_(q)
        ops.write_pages(pages, index, k, v, tables.slots, reach=reach.writes[index])
        heads, scale, softcap = spec.kv_heads, layer.scale, layer.softcap
        where, entries, offsets, read = tables.read(index, q, pages, workspace)
        kv = ops.PagedKv(where, index, heads, scale, rope, None, softcap, read)
        called = q, tables.positions, entries, kv
        rows = tables.row_offsets
        known: Any = {"entry_offsets": offsets, "workspace": workspace}
        if rows is None:
            states = ops.attend_decode(*called, **known)
            if tables.chosen is not None:
                seen = ops.ReadEntries(entries, offsets, read)
                states = tables.chosen.estimated(index, q, states, seen, workspace)
                if read is not None and (late := tables.chosen.arrived()) is not None:
                    listed, ends = late
                    more = ops.attend_decode(
                        q, tables.positions, listed, kv, entry_offsets=ends, workspace=workspace
                    )
                    states = merged_states(states, more)
        else:
            states = ops.attend_prefill(*called, row_offsets=rows, **known)
        if tables.packed is not None:
            states = tables.packed.merged(index, q, rope, states, workspace)
        finish(layer, grid, hidden, beside_sinks(states, layer.sinks))
    return spec.scores(hidden)

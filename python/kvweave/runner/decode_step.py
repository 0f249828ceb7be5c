"""One decode step: what it reads, and the forward of one row of each of B requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.ops import Reach, RopeTable, Table, Workspace
from kvweave.runner.decoding import Decoding
from kvweave.runner.heads import HeadReads
from kvweave.runner.layer import RowGrid, add_attention, add_feed_forward, project
from kvweave.runner.model_spec import ModelSpec
from kvweave.runner.rope import Rotary, Turns
from kvweave.runner.tables import Int32, send


@dataclass(frozen=True)
class StepTables:
    """The newest token of each of B requests, and where its KV and that before it lie.

    ids i64 [B], positions i32 [B], slots i32 [B, 2], entries i32 [N, 5] of all requests, split
    by offsets i32 [B + 1], and the rows' turns. With `reaches`, one a layer, a request has several
    tables: slots i32 [tables, B, 2] and offsets i32 [B · tables + 1].
    """

    ids: torch.Tensor
    positions: Table
    slots: Table
    entries: Table
    offsets: Table
    turns: Turns
    reaches: list[Reach] | None = None

    @staticmethod
    def of(heads: HeadReads, rotary: Rotary, batch: Sequence[Decoding]) -> StepTables:
        """The tables of one step, made anew."""
        places, tables = newest(batch), range(batch[0].request.tables)
        slots = slots_of(heads, batch)
        entries = [s.request.entries(table) for s in batch for table in tables]
        offsets = np.cumsum([0, *(len(e) for e in entries)], dtype=np.int32)
        device = heads.spec.device
        positions, slot_table, entry_table, splits = send(
            device, places, slots, np.concatenate(entries), offsets
        )
        ids = torch.tensor([s.tokens[-1] for s in batch], device=device)
        turns, reaches = turns_of(rotary, places), heads.reaches(batch[0].request)
        return StepTables(ids, positions, slot_table, entry_table, splits, turns, reaches)


def newest(batch: Sequence[Decoding]) -> Int32:
    """The position of each request's newest token, i32 [B]."""
    return np.asarray([s.request.length - 1 for s in batch], np.int32)


def slots_of(heads: HeadReads, batch: Sequence[Decoding]) -> Int32:
    """Where the newest tokens' K, V go: i32 [B, 2], or [tables, B, 2] if a request has several."""
    rows = [np.asarray([s.request.length - 1], np.int32) for s in batch]
    slots = [
        np.concatenate([s.request.slots(row, table) for s, row in zip(batch, rows, strict=True)])
        for table in range(batch[0].request.tables)
    ]
    return slots[0] if heads.uniform else np.stack(slots)


def turns_of(rotary: Rotary, places: Int32) -> Turns:
    """Turns of one row a request, at the frequencies that its length asks for."""
    if not rotary.is_fixed:
        return rotary.lone_turns(places)
    table = rotary.fixed(int(places.max()) + 1)
    return table.turns(torch.from_numpy(places).to(rotary.spec.device))


def query_room(spec: ModelSpec, requests: int) -> torch.Tensor:
    """Room for the queries of one step: [L, B, H, D]."""
    shape = len(spec.layers), requests, spec.query_heads, spec.head_dim
    return torch.empty(shape, dtype=spec.dtype, device=spec.device)


def forward(
    spec: ModelSpec,
    pages: torch.Tensor,
    tables: StepTables,
    rope: RopeTable,
    workspace: Workspace | None,
    queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits f32 [B, V] of each request's newest token, whose K, V it writes.

    Into `queries` [L, B, H, D], if given, go the rotated queries of every layer.
    """
    hidden: torch.Tensor = spec.embed(tables.ids)
    grid = RowGrid.packed(len(tables.ids))
    for index, layer in enumerate(spec.layers):
        turn = tables.turns[layer.rope_key] if layer.rotates else None
        q, k, v = project(spec, layer, grid, hidden, turn)
        if queries is not None:
            queries[index].copy_(q)
        reach = None if tables.reaches is None else tables.reaches[index]
        ops.write_pages(pages, index, k, v, tables.slots, reach=reach)
        window = layer.window if reach is None else None
        heads, scale, softcap = spec.kv_heads, layer.scale, layer.softcap
        attended, _ = ops.attend_decode(
            q,
            tables.positions,
            tables.entries,
            ops.PagedKv(pages, index, heads, scale, rope, window, softcap, reach),
            entry_offsets=tables.offsets,
            workspace=workspace,
        )
        add_attention(layer, grid, hidden, attended)
        add_feed_forward(layer, grid, hidden)
    return spec.scores(hidden)

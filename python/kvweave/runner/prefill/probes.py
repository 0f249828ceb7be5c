"""What policies measure in a layer: attention mass per token, and how far KV moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvweave import ops
from kvweave.plan import Rows, Salience
from kvweave.runner.kv.request_kv import LayerLook, RequestKv
from kvweave.runner.kv.tables import RowTable

_COMPARED_ROWS = 4096
"""Rows whose fresh and cached KV are compared at once, in f32: bounds the memory that takes."""


def scores(kv: RequestKv, layer: int, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Sparse-Q mass of every token, f32 [T], from the queries [S, H, D] of some rows."""
    return mass_from(kv, kv.look(layer), q, kv.probe_positions(rows))


def mass_of_layers(kv: RequestKv, queries: torch.Tensor, since: int) -> torch.Tensor:
    """Mass of every token that the newest n tokens' queries [L, n, H, D] give, f32 [T].

    Summed over the layers from `since` on, where it is measured: nothing comes to the host.
    """
    rows = kv.newest(queries.shape[1])
    mass = torch.zeros(kv.request.length, device=queries.device)
    for layer in range(since, len(queries)):
        mass += scores(kv, layer, queries[layer].contiguous(), rows)
    return mass


def salience(kv: RequestKv, layer: int, q: torch.Tensor, rows: Rows) -> Salience:
    """Mass and edge of a layer from the queries [S, H, D] of some rows: see `Salience`."""
    look = kv.look(layer)
    whole = replace(look, paged=replace(look.paged, reach=kv.whole_reach(layer)))
    heads = kv.layer_heads(layer)
    edge = torch.zeros(len(heads.seen), device=q.device)
    if not heads.narrowed or not len(rows):
        return Salience(mass_from(kv, whole, q, kv.probe_positions(rows)), edge)
    group = q.shape[1] // len(heads.seen)
    for (window, sink), alike in heads.narrowed:
        share = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        mass = mass_from(kv, whole, q, kv.probe_positions(rows), ops.EdgeMass(share, window, sink))
        far = share.view(len(rows), len(heads.seen), group).mean((0, 2))
        edge = torch.where(alike, far, edge)
    return Salience(mass, edge)


def mass_from(
    kv: RequestKv,
    look: LayerLook,
    q: torch.Tensor,
    positions: ops.Table,
    edge: ops.EdgeMass | None = None,
) -> torch.Tensor:
    """Mass of every token, f32 [T], from queries [S, H, D] that see what is up to their positions.

    `look` is at a layer of the request, all of its heads or some.
    """
    return ops.score_tokens(
        q,
        positions,
        look.table.entries,
        look.paged,
        entry_offsets=look.table.offsets,
        edge=edge,
        tokens=kv.request.length,
    )


def deviation(
    kv: RequestKv, layer: int, table: RowTable, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Squared distance of fresh K, V from the cached ones, summed over heads: f32 [R].

    Rows that hold no cached KV yet compare with whatever the page holds; the policy knows
    which rows those are.
    """
    blocks, slots = _places(kv, layer, torch.as_tensor(table.slots).long())
    parts = zip(*(torch.split(x, _COMPARED_ROWS) for x in (blocks, slots, k, v)), strict=True)
    return torch.cat([_moved(kv.pages, *part) for part in parts])


def _places(kv: RequestKv, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The page [R, G] and the slot [R, 1 or G] of every row and KV head of a layer."""
    if slots.ndim == 2:
        first = layer * kv.spec.kv_heads
        ranks = torch.arange(first, first + kv.spec.kv_heads, device=slots.device)
        return slots[:, :1] + ranks, slots[:, 1:]
    heads = torch.from_numpy(kv.request.head_rows(layer)[:, :2].astype(np.int64))
    tables, ranks = heads.to(slots.device, non_blocking=True).unbind(1)
    blocks, at = slots.index_select(0, tables).permute(2, 1, 0)
    # Nothing is kept where the block is −1: the null block stands for it.
    return torch.where(blocks < 0, 0, blocks + ranks), at.clamp(min=0)


def _moved(
    pages: torch.Tensor,
    page: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    apart: torch.Tensor = (k.float() - pages[page, 0, slot].float()).square().sum((1, 2))
    return apart + (v.float() - pages[page, 1, slot].float()).square().sum((1, 2))

"""What a question looks at, as ProphetKV and InfoFlow KV measure it, from its rows' queries.

Each takes the queries [S, H, D] of some rows in a layer whose K, V are written, and returns a
number for every token, f32 [T], where the pages lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvweave.ops import Reach
from kvweave.plan import Probe, Rows
from kvweave.runner.probes import mass_from, scores
from kvweave.runner.request_kv import RequestKv
from kvweave.runner.tables import Int32, send_index


def context_of(rows: Rows) -> Rows:
    """For each of some rows the last position before the first of them; −1 where there is none."""
    places: Rows = np.full_like(rows, rows[0] - 1 if len(rows) else 0)
    return places


def context(kv: RequestKv, layer: int, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The mass where the rows see only what stands before the first of them.

    A head's window ends there too.
    """
    places = context_of(rows)
    if not len(places) or places[0] < 0:
        return torch.zeros(kv.request.length, device=q.device)
    return mass_from(kv, layer, q, kv.probe_positions(places), kv.reading(layer))


def norms(kv: RequestKv, layer: int, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Of what each row gives to a token, mean over query heads, the L2 norm over rows.

    One launch a row: the op sums over rows, and here they are squared before.
    """
    positions, reading = kv.probe_positions(rows), kv.reading(layer)
    squares = torch.zeros(kv.request.length, device=q.device)
    for row in range(len(rows)):
        one = slice(row, row + 1)
        given = mass_from(kv, layer, q[one], positions[one], reading) / q.shape[1]
        squares += given.square()
    return squares.sqrt()


def values(kv: RequestKv, layer: int, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The mass from each KV head's queries times the norm of the token's value, summed over heads.

    One launch a KV head.
    """
    heads, positions = _head_rows(kv, layer), kv.probe_positions(rows)
    group = q.shape[1] // len(heads)
    total = torch.zeros(kv.request.length, device=q.device)
    for head in range(len(heads)):
        reach = Reach(kv.request.tables, heads[head : head + 1])
        alone: dict[str, Any] = {"kv_heads": 1, "window": None, "reach": reach}
        mine = q[:, head * group : (head + 1) * group]
        given = mass_from(kv, layer, mine, positions, kv.reading(layer) | alone)
        total += given * _value_norms(kv, heads[head])
    return total


ASKED: dict[Probe, Callable[[RequestKv, int, torch.Tensor, Rows], torch.Tensor]] = {
    Probe.SCORES: scores,
    Probe.CONTEXT: context,
    Probe.NORMS: norms,
    Probe.VALUES: values,
}
"""What is measured once a layer's K, V are written, by its probe."""


def _head_rows(kv: RequestKv, layer: int) -> Int32:
    """Table, page in a block, window and sink of every KV head of a layer, i32 [G, 4]."""
    reach = kv.reach(layer)
    if reach is not None:
        return reach.heads
    rows: Int32 = kv.request.head_rows(layer)
    rows[:, 2] = kv.spec.layers[layer].window or 0
    return rows


def _value_norms(kv: RequestKv, head: Int32) -> torch.Tensor:
    """The norm of each token's value in one KV head, f32 [T]; 0 where nothing is kept."""
    table, rank = int(head[0]), int(head[1])
    block, begin, end, position, _ = kv.request.entries(table).T
    # Slots of an entry are consecutive, and so are the positions that they hold.
    lengths = end - begin
    within = np.arange(int(lengths.sum()), dtype=np.int32)
    within -= np.repeat(np.cumsum(lengths, dtype=np.int32) - lengths, lengths)
    places = np.stack([np.repeat(of, lengths) for of in (block + rank, begin, position)])
    places[1:] += within
    page, slot, token = send_index(kv.pages.device, places).long()
    kept = kv.pages[page, 1, slot].float().norm(dim=-1)
    return torch.zeros(kv.request.length, device=kv.pages.device).index_copy_(0, token, kept)

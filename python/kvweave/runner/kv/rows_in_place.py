"""Attention of a few rows of a prompt over packed pages as they lie.

A decode step has one row of a request, whose query heads read the pages of a KV head together. Rows
that all see all of some pages may do so too: for `attend_packed` they are one row of more query
heads. So the question of a turn reads the text before it without a copy of that in exact pages.
Many rows are read sooner from such a copy, which is made once for all of them.
"""

from __future__ import annotations

import torch

from kvweave import ops
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.states import States

MOST_ON_DEVICE = 32
"""Rows that read packed pages as they lie on a GPU, at most: of four query heads a KV head they go
through a KV head's pages sixteen times. On an H200, behind 32 768 tokens, 64 rows take longer so in
INT4 than over a copy, and about as long in a basis."""

MOST_ON_HOST, MOST_IN_BASIS = 32, 1
"""The same on a CPU, of INT4 and INT8 pages and of those in a basis. There vectors are spread along
its directions once for all rows, into scratch, where there are several."""


def reads_in_place(pool: PackedPool, rows: int) -> bool:
    """Whether so many rows of a prompt read packed pages as they lie, all of one format."""
    if pool.final is not None:
        return False
    if pool.device.type == "cuda":
        return rows <= MOST_ON_DEVICE
    return rows <= (MOST_ON_HOST if pool.bases is None else MOST_IN_BASIS)


def attend_in_place(
    rows: tuple[torch.Tensor, ops.Table],
    kv: ops.PackedKv,
    entries: ops.Table,
    offsets: ops.Table,
) -> States:
    """Attention and lse of rows, queries [R, H, D] and positions i32 [R], over all of the entries.

    entries i32 [N, 5] and offsets are those of one request, as `attend_packed` takes them. Each of
    them lies before every row's position, and heads have no windows: else a row would see less.
    """
    q, positions = rows
    count, heads, dim = q.shape
    groups = kv.kv_heads
    by_head = q.reshape(count, groups, heads // groups, dim).transpose(0, 1).contiguous()
    one = by_head.view(1, count * heads, dim), positions[-1:]
    out, lse = ops.attend_packed(*one, entries, kv, entry_offsets=offsets)
    outs = out.view(groups, count, heads // groups, dim).transpose(0, 1)
    lses = lse.view(groups, count, heads // groups).transpose(0, 1)
    return outs.reshape(count, heads, dim), lses.reshape(count, heads)

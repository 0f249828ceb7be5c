"""What some rows of a prompt look at in a layer: numbers for every token, by a policy's probe.

ProphetKV and InfoFlow KV measure as they say; `SCORES` is Sparse-Q (SparseX, eq. 2). Each measure
takes the queries [S, H, D] of the rows, in a layer whose K, V are written, and returns f32 [T]
where the pages lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from kvweave import ops
from kvweave.plan import Probe, Rows


class LayerKv(Protocol):
    """The KV of a prompt of T tokens in one layer, here or as this rank's share of the heads."""

    @property
    def tokens(self) -> int:
        """T."""
        ...

    @property
    def kv_heads(self) -> int:
        """KV heads here."""
        ...

    @property
    def query_heads(self) -> int:
        """Query heads of the layer, those of other ranks among them."""
        ...

    def table(self, positions: Rows) -> ops.Table:
        """Positions where the ops want them."""
        ...

    def mass(self, q: torch.Tensor, positions: ops.Table, head: int | None = None) -> torch.Tensor:
        """Mass of every token, f32 [T], from queries that see what is up to their positions.

        q [S, H, D] of all query heads here; with `head`, of that KV head's alone.
        """
        ...

    def value_norms(self, head: int) -> torch.Tensor:
        """The norm of each token's value in one KV head, f32 [T]; 0 where nothing is kept."""
        ...

    def over_ranks(self, found: torch.Tensor) -> torch.Tensor:
        """What was measured over the heads here, summed over all ranks."""
        ...


def scores(kv: LayerKv, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The mass that each token gets, summed over rows and query heads."""
    return kv.over_ranks(kv.mass(q, kv.table(rows)))


def context_of(rows: Rows) -> Rows:
    """For each of some rows the last position before the first of them; −1 where there is none."""
    places: Rows = np.full_like(rows, rows[0] - 1 if len(rows) else 0)
    return places


def context(kv: LayerKv, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The mass where the rows see only what stands before the first of them.

    A head's window ends there too.
    """
    places = context_of(rows)
    if not len(places) or places[0] < 0:
        return torch.zeros(kv.tokens, device=q.device)
    return kv.over_ranks(kv.mass(q, kv.table(places)))


def norms(kv: LayerKv, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Of what each row gives to a token, mean over query heads, the L2 norm over rows.

    One launch a row: the op sums over rows, and here they are squared before.
    """
    positions = kv.table(rows)
    squares = torch.zeros(kv.tokens, device=q.device)
    for row in range(len(rows)):
        one = slice(row, row + 1)
        given = kv.over_ranks(kv.mass(q[one], positions[one])) / kv.query_heads
        squares += given.square()
    return squares.sqrt()


def values(kv: LayerKv, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The mass from each KV head's queries times the norm of the token's value, summed over heads.

    One launch a KV head.
    """
    positions, group = kv.table(rows), q.shape[1] // kv.kv_heads
    total = torch.zeros(kv.tokens, device=q.device)
    for head in range(kv.kv_heads):
        mine = q[:, head * group : (head + 1) * group]
        total += kv.mass(mine, positions, head) * kv.value_norms(head)
    return kv.over_ranks(total)


ASKED: dict[Probe, Callable[[LayerKv, torch.Tensor, Rows], torch.Tensor]] = {
    Probe.SCORES: scores,
    Probe.CONTEXT: context,
    Probe.NORMS: norms,
    Probe.VALUES: values,
}
"""What is measured once a layer's K, V are written, by its probe."""

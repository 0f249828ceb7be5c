"""Attention of a prompt's rows over pages in a basis: rows are turned into it, keys not out of it.

See MosaicKV, section 5.3. A chunk of a prompt reads all that lies before it, far more keys than it
has rows. What a query scores with the mean of all keys is the same for each of them, so it is part
of the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave import ops
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.states import States


@dataclass(frozen=True)
class LayerBasis:
    """A basis of one layer: means f32 [heads, D] and directions [heads, C, D] of either side.

    Directions of planes are as long as their steps.
    """

    key_mean: torch.Tensor
    key_directions: torch.Tensor
    value_mean: torch.Tensor
    value_directions: torch.Tensor

    @staticmethod
    def of(pool: PackedPool, layer: int, number: int) -> LayerBasis:
        """That of a layer, by its number in the pool."""
        assert pool.bases is not None
        data = pool.bases.bases.data[number, layer * pool.kv_heads : (layer + 1) * pool.kv_heads]
        # Behind the mean of planes are bits, and behind their steps how these are measured.
        first = 2 if pool.pages.format.kind == "planes" else 1
        rows = data[:, :, first : first + pool.head_dim]
        return LayerBasis(data[:, 0, 0], rows[:, 0], data[:, 1, 0], rows[:, 1])

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [R, H, D] along the directions of keys, 0 behind these."""
        turned = _by_head(q, self.key_directions.mT)
        missing = q.shape[2] - turned.shape[2]
        return torch.nn.functional.pad(turned, (0, missing)).to(q.dtype)

    def states(self, q: torch.Tensor, scale: float, states: States) -> States:
        """What attention over numbers in the basis means, for queries [R, H, D] as they were."""
        out, lse = states
        numbers = out[:, :, : self.value_directions.shape[1]]
        values = _by_head(numbers, self.value_directions)
        mean = self.value_mean.repeat_interleave(q.shape[1] // len(self.value_mean), 0)
        scores = _by_head(q, self.key_mean[:, :, None])[:, :, 0]
        return (values + mean).to(out.dtype), lse + scale * scores


def _by_head(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Rows [R, H, n] by the matrix [n, m] of the KV head that each reads: f32 [R, H, m]."""
    count, heads, width = rows.shape
    grouped = rows.float().view(count, len(matrices), heads // len(matrices), width)
    return torch.einsum("rkgn,knm->rkgm", grouped, matrices).reshape(count, heads, -1)


def attend_turned(
    basis: LayerBasis,
    rows: tuple[torch.Tensor, ops.Table],
    read: tuple[ops.PagedKv, ops.Table, ops.Table],
) -> States:
    """Attention of queries [R, H, D] and their positions over pages of numbers in a basis.

    `read`: the pages, their entries, none of which moved, and where each table of these ends.
    """
    (q, positions), (kv, entries, offsets) = rows, read
    turned = ops.attend_prefill(basis.queries(q), positions, entries, kv, entry_offsets=offsets)
    return basis.states(q, kv.scale, turned)

"""The arithmetic of one decoder layer around attention, on any set of rows.

Rows are independent in everything but attention. To keep a row's bits independent of which other
rows are in the call (so that a prefix hit changes no bit), rows that run to the end of the prompt
are laid out on a fixed grid of `TILE` positions: see `RowGrid`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvweave.runner.model_spec import LayerSpec, ModelSpec
from kvweave.runner.rope import rotate

TILE = 64
"""Rows of one tile of the grid: matrix products of this height and its multiples were measured
to give the same bits for a row on every BLAS tried; smaller ones take other kernels."""


@dataclass(frozen=True)
class RowGrid:
    """Where the real rows lie among the padded ones: `hidden[lead : lead + rows]`.

    `tiled` says that each tile must be computed in a call of its own, because this machine's
    library gives other bits to taller products.
    """

    lead: int
    rows: int
    padded: int
    tiled: bool

    @staticmethod
    def aligned(first_position: int, rows: int, tiled: bool) -> RowGrid:
        """Rows at consecutive positions from `first_position`, on the grid of positions."""
        lead = first_position % TILE
        return RowGrid(lead, rows, -(-(lead + rows) // TILE) * TILE, tiled)

    @staticmethod
    def packed(rows: int) -> RowGrid:
        """Scattered rows: no padding, no promise on bits."""
        return RowGrid(0, rows, rows, False)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, …] laid out on the grid, zeros around."""
        if self.padded == self.rows:
            return x
        out = x.new_zeros((self.padded, *x.shape[1:]))
        out[self.lead : self.lead + self.rows] = x
        return out

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The real rows of a padded tensor (a view)."""
        return x[self.lead : self.lead + self.rows]

    def apply(self, f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """F over padded rows, tile by tile when this machine needs it."""
        if not self.tiled:
            return f(x)
        return torch.cat([f(tile) for tile in torch.split(x, TILE)])


def project(
    spec: ModelSpec,
    layer: LayerSpec,
    grid: RowGrid,
    hidden: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q [R, H, D], k and v [R, G, D] of the real rows, rotated; hidden is [padded, E]."""
    attention = layer.attention
    x = grid.apply(layer.attention_in_norm, hidden)

    def heads(projection: torch.nn.Module, count: int) -> torch.Tensor:
        return grid.real(grid.apply(projection, x)).view(grid.rows, count, spec.head_dim)

    q = heads(attention.q_proj, spec.query_heads)
    k = heads(attention.k_proj, spec.kv_heads)
    v = heads(attention.v_proj, spec.kv_heads)
    if getattr(attention, "q_norm", None) is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin, spec.interleaved), rotate(k, cos, sin, spec.interleaved)
    return q, k, v


def finish(
    layer: LayerSpec, grid: RowGrid, hidden: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    """Output projection, residuals and feed-forward; attended is [R, H, D] of the real rows."""
    mixed = grid.pad(attended.reshape(grid.rows, -1))
    mixed = grid.apply(layer.attention.o_proj, mixed)
    if layer.attention_out_norm is not None:
        mixed = grid.apply(layer.attention_out_norm, mixed)
    hidden = hidden + mixed
    out = grid.apply(lambda x: _feed_forward(layer, x), hidden)
    return hidden + out


def _feed_forward(layer: LayerSpec, hidden: torch.Tensor) -> torch.Tensor:
    out = layer.feed_forward(layer.feed_forward_in_norm(hidden)[None])
    out = (out[0] if isinstance(out, tuple) else out)[0]
    if layer.feed_forward_out_norm is not None:
        out = layer.feed_forward_out_norm(out)
    result: torch.Tensor = out
    return result


def needs_tiling(layer: LayerSpec, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine's library makes a row's bits depend on the number of rows.

    Asked once, of real weights on random rows: 16 tiles at once against each tile alone. With a
    number of threads that is no power of two, elementwise loops end inside a tile, so it is so.
    """
    threads = torch.get_num_threads()
    if threads & (threads - 1):
        return True
    attention = layer.attention
    steps: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = [
        (attention.q_proj, width),
        (attention.k_proj, width),
        (attention.v_proj, width),
        (attention.o_proj, attention.o_proj.in_features),
        (lambda t: _feed_forward(layer, t), width),
    ]
    generator = torch.Generator().manual_seed(0)
    for step, columns in steps:
        x = torch.randn(16 * TILE, columns, generator=generator).to(device=device, dtype=dtype)
        if not torch.equal(step(x), torch.cat([step(tile) for tile in torch.split(x, TILE)])):
            return True
    return False

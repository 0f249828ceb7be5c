"""The arithmetic of one decoder layer around attention, on any set of rows.

Rows are independent in everything but attention. To keep a row's bits independent of which other
rows are in the call (so that a prefix hit changes no bit), rows that run to the end of the prompt
are laid out on a fixed grid of `TILE` positions: see `RowGrid`. On a GPU rows are packed, and a
row is the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.runner.model.joined import GatedProducts, is_plain
from kvweave.runner.model.layer_spec import LayerSpec
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.model.projections import Vectors
from kvweave.runner.model.rope import rotated

TILE = 64
"""Rows of one tile of the grid: matrix products of this height and its multiples were measured
to give the same bits for a row on every BLAS tried; smaller ones take other kernels."""

FEED_FORWARD_ROWS = 8192
"""Rows of one feed-forward, a multiple of TILE: tall enough for any BLAS, and the intermediate
states, several times wider than the hidden ones, stay small beside the KV of a long prompt."""


@dataclass(frozen=True)
class RowGrid:
    """Where the real rows lie among the padded ones: `hidden[lead : lead + rows]`.

    `tile`: rows of one tile, 1 when nothing is padded. `tiled` says that each tile must be
    computed in a call of its own, because this machine's library gives other bits to taller
    products.
    """

    lead: int
    rows: int
    padded: int
    tile: int
    tiled: bool

    @staticmethod
    def aligned(first_position: int, rows: int, tiled: bool) -> RowGrid:
        """Rows at consecutive positions from `first_position`, on the grid of positions."""
        lead = first_position % TILE
        return RowGrid(lead, rows, -(-(lead + rows) // TILE) * TILE, TILE, tiled)

    @staticmethod
    def packed(rows: int) -> RowGrid:
        """Scattered rows: no padding, no promise on bits."""
        return RowGrid(0, rows, rows, 1, False)

    def since(self, row: int) -> tuple[int, RowGrid]:
        """The padded row at which the tile of a real row begins, and the grid from there on."""
        cut = (self.lead + row) // self.tile * self.tile
        lead = self.lead + row - cut
        return cut, RowGrid(lead, self.rows - row, self.padded - cut, self.tile, self.tiled)

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
    turn: tuple[torch.Tensor, torch.Tensor] | None,
) -> Vectors:
    """Q [R, H, D], k and v [R, G, D] of the real rows; hidden is [padded, E].

    `turn`: cos and sin of the rows, by which q and k are rotated.
    """
    q, k, v = _heads(spec, layer, grid, hidden)
    if layer.query_norm is not None:
        q = layer.query_norm(q)
    if layer.key_norm is not None:
        k = layer.key_norm(k)
    if turn is not None:
        q, k = rotated(spec, turn, (q, k), owns_queries(layer) and owns_keys(layer))
    return q, k, v


def owns_queries(layer: LayerSpec) -> bool:
    """Whether nobody else holds what the layer makes of queries before it rotates them."""
    return layer.query_norm is None and layer.heads.is_queries_own


def owns_keys(layer: LayerSpec) -> bool:
    """The same of keys."""
    return layer.key_norm is None and layer.heads.is_keys_own


def _heads(spec: ModelSpec, layer: LayerSpec, grid: RowGrid, hidden: torch.Tensor) -> Vectors:
    x = grid.apply(layer.attention_in_norm, hidden)
    joined = layer.joined_heads
    if joined is not None and not grid.tiled and joined.holds:
        q, k, v = (made.view(grid.rows, -1, spec.head_dim) for made in joined(grid.real(x)))
        return q, k, v
    return layer.heads(lambda projection: grid.real(grid.apply(projection, x)))


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of all T rows of a prompt over each other: q [T, H, D], k, v [T, G, D]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


def add_attention(
    layer: LayerSpec, grid: RowGrid, hidden: torch.Tensor, attended: torch.Tensor
) -> None:
    """Adds the output projection of attended [R, H, D], the real rows', to hidden in place."""
    mixed = grid.pad(attended.reshape(grid.rows, -1))
    out, scale = layer.out, layer.residual_scale
    if layer.attention_out_norm is None and adds_its_product(hidden, out):
        hidden.addmm_(mixed, out.weight.t(), alpha=scale)
        return
    mixed = grid.apply(out, mixed)
    if layer.attention_out_norm is not None:
        mixed = grid.apply(layer.attention_out_norm, mixed)
    hidden.add_(mixed, alpha=scale)


def adds_its_product(hidden: torch.Tensor, out: Any) -> bool:
    """Whether a matrix may add its product to the hidden states itself: one rounding, one launch.

    On the CPU bits would then depend on how many rows are in the call.
    """
    return hidden.is_cuda and is_plain(out) and out.bias is None


def add_feed_forward(layer: LayerSpec, grid: RowGrid, hidden: torch.Tensor) -> None:
    """Adds the feed-forward of hidden [padded, E] to it in place."""
    gated = layer.gated
    plain = gated is not None and gated.holds and layer.feed_forward_out_norm is None
    for part in torch.split(hidden, FEED_FORWARD_ROWS):
        if gated is not None and plain and adds_its_product(hidden, gated.down):
            add_gated(gated, layer, part)
            continue
        part.add_(grid.apply(lambda x: _feed_forward(layer, x), part), alpha=layer.residual_scale)


def add_gated(gated: GatedProducts, layer: LayerSpec, part: torch.Tensor) -> None:
    """The same of some rows; nothing wide of one part is there any more when the next begins."""
    inner = gated.inner(layer.feed_forward_in_norm(part))
    part.addmm_(inner, gated.down.weight.t(), alpha=layer.residual_scale)


def finish(layer: LayerSpec, grid: RowGrid, hidden: torch.Tensor, attended: torch.Tensor) -> None:
    """Adds to hidden [padded, E] what a layer makes of attended [R, H, D], and its feed-forward."""
    if layer.is_parallel:
        add_feed_forward(layer, grid, hidden)
    add_attention(layer, grid, hidden, attended)
    if not layer.is_parallel:
        add_feed_forward(layer, grid, hidden)


def _feed_forward(layer: LayerSpec, hidden: torch.Tensor) -> torch.Tensor:
    out = layer.feed_forward(layer.feed_forward_in_norm(hidden)[None])
    out = (out[0] if isinstance(out, tuple) else out)[0]
    if layer.feed_forward_out_norm is not None:
        out = layer.feed_forward_out_norm(out)
    result: torch.Tensor = out
    return result


def needs_tiling(spec: ModelSpec) -> bool:
    """Whether this machine's library makes a row's bits depend on the number of rows.

    Asked once, of real weights on random rows: 16 tiles at once against each tile alone. With a
    number of threads that is no power of two, elementwise loops end inside a tile, so it is so.
    A GPU's library picks kernels by shape, and no grid makes that good: there it is never asked.
    """
    if spec.device.type != "cpu":
        return False
    threads = torch.get_num_threads()
    if threads & (threads - 1):
        return True
    layer = spec.layers[0]
    steps: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = [
        *((module, spec.width) for module in layer.heads.modules),
        (layer.out, spec.query_heads * spec.head_dim),
        (lambda t: _feed_forward(layer, t), spec.width),
    ]
    generator = torch.Generator().manual_seed(0)
    for step, columns in steps:
        x = torch.randn(16 * TILE, columns, generator=generator).to(spec.dtype)
        if not torch.equal(step(x), torch.cat([step(tile) for tile in torch.split(x, TILE)])):
            return True
    return False

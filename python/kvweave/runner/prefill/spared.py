"""Projection that leaves out K, V nobody writes: those of window heads for rows that are reused.

The weights of a projection stand head by head, so that some heads are some of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvweave.runner.kv.heads import SomeHeads
from kvweave.runner.model.joined import is_plain
from kvweave.runner.model.layer import RowGrid, owns_queries
from kvweave.runner.model.layer_spec import LayerSpec
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.model.rope import rotated

Turn = tuple[torch.Tensor, torch.Tensor] | None
"""Cos and sin of some rows; None in a layer without positions."""


@dataclass(frozen=True)
class Spared:
    """Local heads of a layer, whose K, V are computed for some rows alone, an index of them."""

    local: SomeHeads
    others: SomeHeads
    rows: torch.Tensor


def may_spare(layer: LayerSpec) -> bool:
    """Whether heads of the layer's k and v projections can be computed alone.

    Not where one matrix makes queries as well, where something else than a plain matrix does it,
    or listens to it; nor where the norm of keys is not the same for every head alone.
    """
    heads = layer.heads
    plain = heads.are_apart and is_plain(heads.key) and is_plain(heads.value)
    weight = getattr(layer.key_norm, "weight", None)
    alike = layer.key_norm is None or (
        weight is not None and tuple(weight.shape) == (heads.head_dim,)
    )
    return plain and alike


def project_sparing(
    spec: ModelSpec,
    layer: LayerSpec,
    grid: RowGrid,
    hidden: torch.Tensor,
    turn: Turn,
    spared: Spared,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q [R, H, D], k and v [R, G, D] of the real rows; what is spared is left as it comes.

    As `layer.project` otherwise.
    """
    x = grid.apply(layer.attention_in_norm, hidden)
    q = layer.heads.queries(lambda projection: grid.real(grid.apply(projection, x)))
    if layer.query_norm is not None:
        q = layer.query_norm(q)
    if turn is not None:
        (q,) = rotated(spec, turn, (q,), owns_queries(layer))
    x = grid.real(x)
    k, v = (x.new_empty(grid.rows, spec.kv_heads, spec.head_dim) for _ in range(2))
    _fill(spec, layer, x, turn, spared.others, None, (k, v))
    if len(spared.rows):
        some = None
        if turn is not None:
            some = turn[0].index_select(0, spared.rows), turn[1].index_select(0, spared.rows)
        x = x.index_select(0, spared.rows)
        _fill(spec, layer, x, some, spared.local, spared.rows, (k, v))
    return q, k, v


def project_heads(
    spec: ModelSpec,
    layer: LayerSpec,
    grid: RowGrid,
    hidden: torch.Tensor,
    turn: Turn,
    heads: SomeHeads,
    into: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """K and v of some heads for all real rows, written into k and v [R, G, D]."""
    x = grid.real(grid.apply(layer.attention_in_norm, hidden))
    _fill(spec, layer, x, turn, heads, None, into)


def _fill(
    spec: ModelSpec,
    layer: LayerSpec,
    x: torch.Tensor,
    turn: Turn,
    heads: SomeHeads,
    rows: torch.Tensor | None,
    into: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """K and v of some heads from normed states x [n, E], to some rows (None: all) of k and v."""
    if not heads.heads:
        return
    chosen = heads.index
    k = _some_heads(spec, layer.heads.key, x, chosen)
    if layer.key_norm is not None:
        k = layer.key_norm(k)
    if turn is not None:
        (k,) = rotated(spec, turn, (k,), layer.key_norm is None)
    v = _some_heads(spec, layer.heads.value, x, chosen)
    for made, whole in ((k, into[0]), (v, into[1])):
        if rows is None:
            whole.index_copy_(1, chosen, made)
        else:
            whole.index_put_((rows.long()[:, None], chosen), made)


def _some_heads(
    spec: ModelSpec, projection: Any, x: torch.Tensor, heads: torch.Tensor
) -> torch.Tensor:
    """What a projection gives for some KV heads alone: [n, heads, D]."""
    weight = projection.weight.view(spec.kv_heads, spec.head_dim, -1).index_select(0, heads)
    out = torch.nn.functional.linear(x, weight.flatten(0, 1))
    if projection.bias is not None:
        bias = projection.bias.view(spec.kv_heads, spec.head_dim).index_select(0, heads)
        out = out + bias.flatten()
    return out.view(len(x), len(heads), spec.head_dim)

"""Rotary positions of one request: cos and sin for its rows, frequencies for Δ-RoPE.

The model's own rotary module is asked, so every RoPE kind is as the model defines it: default,
linear, dynamic NTK, YaRN, Llama-3, LongRoPE, partial, one θ per layer type. Kinds that change
with the length (dynamic, LongRoPE) are asked once for the whole request; the frequencies they
give are the request's *regime*, part of every cache key, so KV of another regime never matches.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave.ops import RopeTable
from kvweave.runner.model_spec import ModelSpec


@dataclass(frozen=True)
class PositionTable:
    """cos and sin [T, rotary_dim] per rope key, the Δ-RoPE table, and the regime's hash."""

    cos: dict[str | None, torch.Tensor]
    sin: dict[str | None, torch.Tensor]
    rope: RopeTable
    regime: int


def _inv_freq(spec: ModelSpec, key: str | None) -> torch.Tensor:
    name = "inv_freq" if key is None else f"{key}_inv_freq"
    table: torch.Tensor = getattr(spec.rotary, name)
    return table.detach().float().cpu()


def position_table(spec: ModelSpec, length: int) -> PositionTable:
    """Positions [0, length) of a request that is `length` tokens long."""
    positions = torch.arange(length, device=spec.device)[None]
    like = torch.zeros(1, dtype=spec.dtype, device=spec.device)
    keys = sorted({layer.rope_key for layer in spec.layers if layer.rotates}, key=str)
    cos, sin = {}, {}
    for key in keys:
        asked = (like, positions) if key is None else (like, positions, key)
        c, s = spec.rotary(*asked)
        cos[key], sin[key] = c[0], s[0]
    tables = {key: _inv_freq(spec, key) for key in keys}
    width = max(t.numel() for t in tables.values())
    inv_freq = np.zeros((len(spec.layers), width), np.float32)
    for index, layer in enumerate(spec.layers):
        if layer.rotates:
            inv_freq[index] = tables[layer.rope_key].numpy()
    rope = RopeTable(inv_freq, "interleaved" if spec.interleaved else "half")
    regime = int.from_bytes(hashlib.sha256(inv_freq.tobytes()).digest()[:8], "little")
    return PositionTable(cos, sin, rope, regime)


def rows_of(
    spec: ModelSpec, positions: npt.NDArray[np.int32]
) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
    """Cos and sin [R, rotary_dim] per rope key, for one decode row of each of R requests.

    Each row is asked for alone where the frequencies depend on the request's length.
    """
    like = torch.zeros(1, dtype=spec.dtype, device=spec.device)
    asked = torch.from_numpy(positions).long().to(spec.device)
    turns = {}
    for key in sorted({layer.rope_key for layer in spec.layers if layer.rotates}, key=str):
        kind = spec.rotary.rope_type if key is None else spec.rotary.rope_type[key]
        lone = "dynamic" in kind or kind == "longrope"
        named = () if key is None else (key,)
        groups = torch.split(asked, 1) if lone else (asked,)
        pairs = [spec.rotary(like, group[None], *named) for group in groups]
        turns[key] = (
            torch.cat([cos[0] for cos, _ in pairs]),
            torch.cat([sin[0] for _, sin in pairs]),
        )
    return turns


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotates x [R, heads, D] by cos, sin [R, rotary_dim]; dims past rotary_dim pass through.

    The tables come as transformers makes them: halves repeated (half pairing) or, for families
    with interleaved pairs, one value a pair in the first half.
    """
    width = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    turned = x[..., :width]
    if interleaved:
        half = width // 2
        c, s = (t[..., :half].repeat_interleave(2, dim=-1) for t in (c, s))
        pair = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        pair = torch.cat((-second, first), dim=-1)
    turned = turned * c + pair * s
    if width == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., width:]), dim=-1)

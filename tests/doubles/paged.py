"""Keys and values both dense and in pages, for tests of the ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

import kvweave
from kvweave import ops

READS = (ops.attend_prefill, ops.attend_decode, ops.score_tokens)
"""Ops that read pages."""
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def as_read(given: tuple, named: dict) -> tuple[tuple, dict]:
    """Arguments of an op that reads pages, its `PagedKv` made of those that such a one holds.

    In order they are q, positions, entries, cache and layer.
    """
    order = ("q", "positions", "entries", "cache", "layer")
    named = {**dict(zip(order, given, strict=False)), **named}
    held = {field.name for field in fields(ops.PagedKv)} & named.keys()
    kv = ops.PagedKv(**{name: named.pop(name) for name in held})
    rows = [named.pop(name) for name in order[:3]]
    return (*rows, kv), named


def reads(op: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Calls an op that reads pages: see `as_read`."""
    given, named = as_read(given, named)
    return op(*given, **named)


def rope_table(layers: int, rotary_dim: int, pairing: str = "half", theta: float = 1e4):
    """Default frequencies, the same in every layer."""
    row = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    return ops.RopeTable(np.tile(row, (layers, 1)).astype(np.float32), pairing)


def rotated(
    x: torch.Tensor, inv_freq: torch.Tensor, positions: torch.Tensor, pairing: str = "half"
) -> torch.Tensor:
    """x [R, heads, D] turned to positions [R], in f64 from exact angles."""
    pairs = inv_freq.numel()
    angle = positions.double()[:, None, None] * inv_freq.double()
    wide = x.double()
    turned, rest = wide[..., : 2 * pairs], wide[..., 2 * pairs :]
    if pairing == "half":
        first, second = turned[..., :pairs], turned[..., pairs:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    a = first * angle.cos() - second * angle.sin()
    b = first * angle.sin() + second * angle.cos()
    joined = torch.cat((a, b), -1) if pairing == "half" else torch.stack((a, b), -1).flatten(-2)
    return torch.cat((joined, rest), -1)


@dataclass
class Paged:
    """One request of T tokens in every layer of an arena: K, V [L, T, G, D] as they were given."""

    cache: kvweave.KvCache
    request: kvweave.KvRequest
    pages: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def entries(self) -> np.ndarray:
        return self.request.entries()


def paged(
    generator: torch.Generator,
    tokens: int,
    *,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Paged:
    """Random K, V written through `write_pages` into a cache of its own."""
    shape = kvweave.KvShape(layers, kv_heads, head_dim, page_tokens, NAMES[dtype])
    cache = kvweave.KvCache(shape, blocks=4 * (tokens // page_tokens + 2))
    pages = torch.from_dlpack(cache.arena)
    request = cache.admit(np.arange(tokens, dtype=np.int32), reuse="none")
    rows = np.arange(tokens, dtype=np.int32)
    size = (2, layers, tokens, kv_heads, head_dim)
    k, v = torch.randn(size, generator=generator).to(dtype)
    for layer in range(layers):
        ops.write_pages(pages, layer, k[layer], v[layer], request.slots(rows))
    return Paged(cache, request, pages, k, v)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """f64 attention of q [R, H, D] over k, v [T, G, D] where mask [R, T]: out, lse, weights."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("rhd,thd->rht", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(mask[:, None], (scores - lse[..., None]).exp(), 0.0).nan_to_num(0.0)
    return torch.einsum("rht,thd->rhd", weights, v), lse, weights


def causal_mask(positions: torch.Tensor, tokens: int, window: int | None = None) -> torch.Tensor:
    """[R, T]: which keys a row at each position sees."""
    keys = torch.arange(tokens)
    mask = keys <= positions[:, None]
    if window is not None:
        mask &= keys > positions[:, None] - window
    return mask

"""torch's scaled_dot_product_attention over contiguous K, V of exactly the right shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvweave.lab.bench.contenders.contender import Contender
from kvweave.lab.bench.device_timing import Call
from kvweave.lab.bench.problems import Attention, Problem
from kvweave.lab.bench.shapes import Decode


def missing(device: torch.device) -> str:
    """It comes with torch."""
    return ""


def contenders(problem: Problem) -> Iterator[Contender]:
    """Decode, dense prefill, and with a mask what reads or computes less than everything."""
    if not isinstance(problem, Attention):
        return
    name = "SDPA" if problem.work.dense else "SDPA + mask"
    if isinstance(problem.work, Decode):
        yield Contender(name, lambda: _decode(problem))
        yield Contender(f"{name}, heads as rows", lambda: _heads_as_rows(problem))
    elif not problem.work.local:
        yield Contender(name, lambda: _prefill(problem))


def _decode(problem: Attention) -> Call:
    k, v, there = problem.pool.dense()
    q = problem.q[:, :, None]
    mask = None
    if not problem.work.dense:
        mask = there.repeat_interleave(q.shape[1] // len(there), 0)[None, :, None]

    def call() -> torch.Tensor:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[:, :, 0]

    return call


def _heads_as_rows(problem: Attention) -> Call:
    """The query heads of a KV head stand as rows: any backend reads its keys once."""
    s = problem.pool.shape
    k, v, there = problem.pool.dense()
    q = problem.q.view(len(problem.q), s.kv_heads, -1, s.head_dim)
    mask = None if problem.work.dense else there[None, :, None]

    def call() -> torch.Tensor:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.reshape(problem.q.shape)

    return call


def _prefill(problem: Attention) -> Call:
    k, v, _ = problem.pool.dense()
    q = problem.q.transpose(0, 1)[None]
    mask = None
    if not problem.work.dense:
        keys = torch.arange(problem.pool.tokens, device=problem.pool.device)
        mask = keys <= problem.pool.put(problem.positions)[:, None]

    def call() -> torch.Tensor:
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return call

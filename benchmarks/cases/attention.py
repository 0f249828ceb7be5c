"""`attend_prefill` and `attend_decode` against torch's attention and its matmul ceiling.

torch attends over contiguous K, V of exactly the right shape; ours reads pages in random order.
Scattered rows are what recovery policies compute: torch needs a mask of [rows, tokens] for them.
FLOPs are those of the causal pairs alone, 4·D for each (row, head, visible key).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvweave import ops
from kvweave.lab.bench.pages import PAGE, Shape, empty_pages, entries_of, shuffled_blocks, slots_of
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import Timing, compare

SHAPES = (Shape("SmolLM2", 1, 9, 3, 64), Shape("Llama-8B", 1, 32, 8, 128, 5e5))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Work:
    """One problem: q [R,H,D] at `positions` over `tokens` keys that both sides hold."""

    shape: Shape
    tokens: int
    positions: np.ndarray
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: torch.Tensor
    entries: np.ndarray

    @property
    def flops(self) -> float:
        pairs = float((self.positions.astype(np.int64) + 1).sum())
        return 4.0 * self.shape.head_dim * self.shape.heads * pairs

    def ours(self) -> torch.Tensor:
        s = self.shape
        kv = ops.PagedKv(self.pages, 0, s.kv_heads, s.head_dim**-0.5, s.rope())
        q, positions, entries = self.q, self.positions, self.entries
        if len(positions) == 1:
            offsets = np.array([0, len(entries)], np.int32)
            return ops.attend_decode(q, positions, entries, kv, entry_offsets=offsets)[0]
        return ops.attend_prefill(q, positions, entries, kv)[0]

    def torch_call(self) -> Callable[[], torch.Tensor]:
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        dense = len(self.positions) == self.tokens
        mask = None
        if not dense and len(self.positions) > 1:
            keys = torch.arange(self.tokens)
            mask = keys[None] <= torch.from_numpy(self.positions).long()[:, None]

        def call() -> torch.Tensor:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=dense, enable_gqa=True
            )
            return out[0].transpose(0, 1)

        return call


def work(shape: Shape, tokens: int, positions: np.ndarray, dtype: torch.dtype) -> Work:
    torch.manual_seed(tokens)
    k, v = torch.randn(2, tokens, shape.kv_heads, shape.head_dim).to(dtype)
    q = torch.randn(len(positions), shape.heads, shape.head_dim).to(dtype)
    count = -(-tokens // PAGE)
    blocks = shuffled_blocks(shape, count, seed=tokens)
    pages = empty_pages(shape, count, dtype)
    ops.write_pages(pages, 0, k, v, slots_of(blocks, tokens))
    entries = entries_of(blocks, tokens)
    return Work(shape, tokens, positions.astype(np.int32), q, k, v, pages, entries)


def problems(quick: bool) -> dict[str, Work]:
    """Dense rows, a scattered tenth of them, the same in runs of 64, and one decode row."""
    made = {}
    for shape in SHAPES:
        for tokens in (1024,) if quick else (2048, 4096):
            every = np.arange(tokens)
            chosen = np.random.default_rng(7).permutation(tokens)[: tokens // 10]
            rows = {
                "all rows": every,
                "10 % single rows": np.sort(chosen),
                "10 % in runs of 64": every[every % 640 < 64],
                "decode": every[-1:],
            }
            for dtype in (torch.float32, torch.bfloat16):
                kind = str(dtype).removeprefix("torch.")
                for what, positions in rows.items():
                    name = f"{shape.name} {tokens} {kind}, {what}"
                    made[name] = work(shape, tokens, positions, dtype)
    return made


def check(name: str, problem: Work) -> None:
    ours, theirs = problem.ours(), problem.torch_call()()
    worst = float((ours.float() - theirs.float()).abs().max())
    limit = TOLERANCE[problem.q.dtype]
    expect(worst <= limit, f"{name}: expected a difference <= {limit}, got {worst}")


def run(quick: bool) -> list[Row]:
    rows = ceiling(3 if quick else 15)
    for name, problem in problems(quick).items():
        check(name, problem)
        timed = compare(
            {"ours": problem.ours, "torch": problem.torch_call()},
            rounds=3 if quick else 9,
            at_least_s=0.02,
        )
        rows.append(_row(name, problem.flops, timed))
    return rows


def ceiling(rounds: int) -> list[Row]:
    """torch's own matmul in this process: what the machine does at its best."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, 1024, 1024).to(dtype)
        timed = compare({"matmul": lambda a=a, b=b: a @ b}, rounds=rounds, at_least_s=0.05)
        spent = timed["matmul"]
        beside = {"GFLOP/s": 2 * 1024**3 / spent.median_s / 1e9}
        name = f"torch matmul 1024³ {str(dtype).removeprefix('torch.')}"
        rows.append(Row(name, spent.median_s * 1e3, "ms", spent.p95_s * 1e3, beside))
    return rows


def _row(name: str, flops: float, timed: dict[str, Timing]) -> Row:
    ours, theirs = timed["ours"], timed["torch"]
    beside = {
        "GFLOP/s": flops / ours.median_s / 1e9,
        "torch ms": theirs.median_s * 1e3,
        "torch ÷ ours": theirs.median_s / ours.median_s,
    }
    return Row(name, ours.median_s * 1e3, "ms", ours.p95_s * 1e3, beside)

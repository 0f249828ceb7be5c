"""`rotate_rows` on the CPU: bytes read and written a second, beside torch's own expression of it.

Bytes are those of queries and keys, twice, and of the cosines and sines that are read. A plain copy
of as many by torch is the ceiling.
"""

from __future__ import annotations

import torch

from kvweave import ops
from kvweave.lab.bench.pages import Shape
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import compare

SHAPES = (Shape("SmolLM2", 30, 9, 3, 64), Shape("Llama-8B", 32, 32, 8, 128, 5e5))


def by_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What a transformers model computes for x [R, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def check(shape: Shape, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Queries against f64; sums of two products, rounded once."""
    wanted, got = by_torch(q.double(), cos.double(), sin.double()), q.clone()
    ops.rotate_rows(got, None, cos, sin)
    worst = float(((got.double() - wanted).abs() / wanted.abs().clamp(min=1.0)).max())
    limit = 1e-6 if q.dtype == torch.float32 else 2**-8
    expect(worst <= limit, f"{shape.name}: expected rows within {limit} of f64, got {worst}")


def run(quick: bool) -> list[Row]:
    made = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 64) if quick else (1, 64, 4096):
                made.append(_row(shape, dtype, rows, quick))
    return made


def _row(shape: Shape, dtype: torch.dtype, rows: int, quick: bool) -> Row:
    torch.manual_seed(0)
    q, k = (torch.randn(rows, n, shape.head_dim).to(dtype) for n in (shape.heads, shape.kv_heads))
    inv_freq = torch.from_numpy(shape.rope().inv_freq[0])
    angles = (torch.arange(rows)[:, None] * inv_freq).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    check(shape, q, cos, sin)
    flat = torch.cat((q.flatten(), k.flatten()))
    target = torch.empty_like(flat)
    contenders = {
        "ours": lambda: ops.rotate_rows(q, k, cos, sin),
        "torch": lambda: [by_torch(x, cos, sin) for x in (q, k)],
        "copy": lambda: target.copy_(flat),
    }
    timed = compare(contenders, rounds=5 if quick else 15, warm_up=2, at_least_s=0.01)
    moved = (2 * len(flat) + rows * shape.head_dim) * dtype.itemsize / 1e9
    ours, theirs, copied = (timed[name] for name in contenders)
    beside = {
        "µs": ours.median_s * 1e6,
        "torch µs": theirs.median_s * 1e6,
        "torch ÷ ours": theirs.median_s / ours.median_s,
        "share of copy": copied.median_s / ours.median_s,
    }
    name = f"{shape.name} {str(dtype).removeprefix('torch.')}, {rows} rows"
    return Row(name, moved / ours.median_s, "GB/s", moved / ours.p95_s, beside)

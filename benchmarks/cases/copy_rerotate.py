"""`copy_rerotate` on the CPU: bytes read and written a second, beside torch copying as many."""

from __future__ import annotations

import numpy as np
import torch

from kvweave import ops
from kvweave.lab.bench.pages import PAGE, Shape, empty_pages, shuffled_blocks
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import compare

SHAPES = (Shape("SmolLM2", 30, 9, 3, 64), Shape("Llama-8B", 32, 32, 8, 128, 5e5))
DELTA = 1234


def copies_of(shape: Shape, count: int) -> np.ndarray:
    """Copies [count, 6] of whole blocks from one half of the pages to the other, shuffled."""
    source = shuffled_blocks(shape, count, seed=1)
    target = shuffled_blocks(shape, count, seed=2) + count * shape.block_pages
    zero = np.zeros(count)
    columns = (source, zero, target, zero, zero + PAGE, zero + DELTA)
    return np.stack(columns, axis=1).astype(np.int32)


def check(shape: Shape, pages: torch.Tensor, copies: np.ndarray) -> None:
    """One block against the rotation written out, f64."""
    source, target = int(copies[0, 0]), int(copies[0, 2])
    block = slice(0, shape.block_pages)
    before, after = pages[source:][block].double(), pages[target:][block].double()
    expect(bool((before[:, 1] == after[:, 1]).all()), f"{shape.name}: V is not copied as it is")
    half = shape.head_dim // 2
    frequencies = shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = DELTA * frequencies.float().double()
    x, y = before[:, 0, :, :half], before[:, 0, :, half:]
    rotated = torch.cat((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()), -1)
    worst = float(((rotated - after[:, 0]).abs() / rotated.abs().clamp(min=1.0)).max())
    limit = 1e-5 if pages.dtype == torch.float32 else 2**-8
    expect(worst <= limit, f"{shape.name}: expected K within {limit} of f64, got {worst}")


def run(quick: bool) -> list[Row]:
    rows = []
    wanted = (16 if quick else 64) << 20
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            block_bytes = shape.block_pages * 2 * PAGE * shape.head_dim * dtype.itemsize
            count = -(-wanted // block_bytes)
            pages = empty_pages(shape, 2 * count, dtype)
            pages.normal_()
            copies, rope = copies_of(shape, count), shape.rope()
            ops.copy_rerotate(pages, copies, rope, kv_heads=shape.kv_heads)
            check(shape, pages, copies)
            half = len(pages) // 2
            contenders = {
                "ours": lambda p=pages, c=copies, r=rope, g=shape.kv_heads: ops.copy_rerotate(
                    p, c, r, kv_heads=g
                ),
                "torch": lambda p=pages, h=half: p[-h:].copy_(p[:h]),
            }
            timed = compare(contenders, rounds=5 if quick else 15, warm_up=2)
            moved = 2 * count * block_bytes / 1e9
            ours, theirs = timed["ours"], timed["torch"]
            beside = {
                "MiB": count * block_bytes / 2**20,
                "torch copy GB/s": moved / theirs.median_s,
                "share of copy": theirs.median_s / ours.median_s,
            }
            kind = str(dtype).removeprefix("torch.")
            slow = moved / ours.p95_s
            rows.append(Row(f"{shape.name} {kind}", moved / ours.median_s, "GB/s", slow, beside))
    return rows

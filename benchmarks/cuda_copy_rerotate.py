"""`copy_rerotate` on CUDA beside torch's device copy of the same bytes, in the same process.

    python -m pytest -q tests/test_cuda_copy_rerotate.py && \\
        python -m benchmarks.cuda_copy_rerotate --json copy_rerotate.json

Bytes are counted once for the read and once for the write, K and V. The ceiling is the best of
torch's copies at that size, measured here in turns with ours. Buffers are far larger than the
second-level cache, and blocks are copied in random order.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

import kvweave
from benchmarks.measure import Row, expect, summarise
from benchmarks.pages import PAGE, Shape, shuffled_blocks
from kvweave import ops

SHAPES = (
    Shape("Llama-8B", 32, 32, 8, 128, 5e5),
    Shape("Qwen-0.5B", 24, 14, 2, 64, 1e6),
    Shape("SmolLM2", 30, 9, 3, 64),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIB = (64, 512, 2048)
DELTA = 1234


@dataclass(frozen=True)
class Case:
    """Copies of `count` whole blocks between the halves of an arena."""

    shape: Shape
    dtype: torch.dtype
    count: int
    pairing: str = "half"
    delta: int = DELTA

    @property
    def block_bytes(self) -> int:
        return self.shape.block_pages * 2 * PAGE * self.shape.head_dim * self.dtype.itemsize

    @property
    def name(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.shape.name} {kind} {self.pairing} {self.count * self.block_bytes >> 20} MiB"

    def copies(self) -> torch.Tensor:
        source = shuffled_blocks(self.shape, self.count, seed=1)
        target = shuffled_blocks(self.shape, self.count, seed=2)
        target += self.count * self.shape.block_pages
        zero = np.zeros(self.count)
        columns = (source, zero, target, zero, zero + PAGE, zero + self.delta)
        return torch.from_numpy(np.stack(columns, 1).astype(np.int32)).cuda()

    def pages(self) -> torch.Tensor:
        count = (2 * self.count + 1) * self.shape.block_pages
        return torch.empty(
            count, 2, PAGE, self.shape.head_dim, dtype=self.dtype, device="cuda"
        ).normal_()

    def rope(self) -> ops.RopeTable:
        return ops.RopeTable(self.shape.rope().inv_freq, self.pairing)


def check(case: Case, pages: torch.Tensor, copies: torch.Tensor, rope: ops.RopeTable) -> None:
    """Two blocks against the definition on the CPU."""
    size = case.shape.block_pages
    for row in copies[:: max(1, len(copies) - 1)].tolist():
        small = torch.zeros(3 * size, 2, PAGE, case.shape.head_dim, dtype=case.dtype)
        small[size : 2 * size] = pages[row[0] : row[0] + size].cpu()
        table = np.array([[size, 0, 2 * size, 0, PAGE, case.delta]], np.int32)
        ops.copy_rerotate(small, table, rope, kv_heads=case.shape.kv_heads, backend="reference")
        got, wanted = pages[row[2] : row[2] + size].cpu(), small[2 * size :]
        expect(bool((got[:, 1] == wanted[:, 1]).all()), f"{case.name}: V is not copied as it is")
        apart = (got[:, 0].double() - wanted[:, 0].double()).abs()
        worst = float((apart / wanted[:, 0].double().abs().amax(-1, keepdim=True)).max())
        limit = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}[case.dtype]
        expect(worst <= limit, f"{case.name}: expected K within {limit}, got {worst}")


def timed(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call by CUDA events, contenders in turns."""
    for call in contenders.values():
        for _ in range(3):
            call()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        names = list(contenders)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            contenders[name]()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / 1e3)
    return samples


def bandwidth(case: Case, rounds: int) -> Row:
    pages, copies, rope = case.pages(), case.copies(), case.rope()

    def ours() -> None:
        ops.copy_rerotate(pages, copies, rope, kv_heads=case.shape.kv_heads)

    ours()
    check(case, pages, copies, rope)
    half = case.count * case.shape.block_pages
    source, target = pages[:half], pages[-half:]
    flat = (source.view(torch.uint8).flatten(), target.view(torch.uint8).flatten())
    samples = timed(
        {
            "ours": ours,
            "torch": lambda: target.copy_(source),
            "torch bytes": lambda: flat[1].copy_(flat[0]),
        },
        rounds,
    )
    found = {name: summarise(values) for name, values in samples.items()}
    moved = 2 * case.count * case.block_bytes / 1e9
    best = min(found["torch"].median_s, found["torch bytes"].median_s)
    beside = {
        "device copy GB/s": moved / best,
        "share of copy": best / found["ours"].median_s,
        "µs": found["ours"].median_s * 1e6,
    }
    ours_s = found["ours"]
    return Row(case.name, moved / ours_s.median_s, "GB/s", moved / ours_s.p95_s, beside)


def launch_cost() -> list[Row]:
    """One block: host time of a call, device time of a call and of a graph replay."""
    case = Case(SHAPES[0], torch.bfloat16, 1)
    pages, copies, rope = case.pages(), case.copies(), case.rope()

    def call() -> None:
        ops.copy_rerotate(pages, copies, rope, kv_heads=case.shape.kv_heads)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start = time.perf_counter()
    for _ in range(1000):
        call()
    host_us = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    samples = timed({"call": call, "replay": graph.replay}, 200)
    rows = [Row("one block, host time of a call", host_us, "µs", None, {})]
    for name, values in samples.items():
        timing = summarise(values)
        row = Row(f"one block, {name}", timing.median_s * 1e6, "µs", timing.p95_s * 1e6, {})
        rows.append(row)
    return rows


def cases(quick: bool) -> list[Case]:
    made = []
    for shape in SHAPES:
        for dtype in DTYPES:
            for mib in MIB[:1] if quick else MIB:
                one = Case(shape, dtype, 1)
                made.append(replace(one, count=max(1, (mib << 20) // one.block_bytes)))
    last = replace(made[0], pairing="interleaved")
    return [*made, last, replace(made[0], delta=0)]


def main(words: list[str] | None = None) -> int:
    """Runs all cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.cuda_copy_rerotate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes alone")
    parser.add_argument("--json", help="also write the rows there")
    chosen = parser.parse_args(words)
    if not torch.cuda.is_available() or not kvweave.cuda_status().startswith("available"):
        parser.error(f"expected a CUDA device, got {kvweave.cuda_status()}")
    torch.set_grad_enabled(False)
    rows = [bandwidth(case, 15 if chosen.quick else 50) for case in cases(chosen.quick)]
    rows += launch_cost()
    for row in rows:
        beside = "  ".join(f"{key} {value:.3f}" for key, value in row.of.items())
        print(f"{row.name:42} {row.value:10.1f} {row.unit:5} {beside}")
    if chosen.json:
        record = {
            "case": "cuda_copy_rerotate",
            "device": torch.cuda.get_device_name(),
            "kvweave": kvweave.__version__,
            "status": kvweave.cuda_status(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "rows": [asdict(row) for row in rows],
        }
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

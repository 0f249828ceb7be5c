"""What this device does at its best, measured in the same process as the ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave.lab.bench.device_timing import DeviceClock, Effort, spin
from kvweave.lab.bench.shapes import Copy, Decode, Merge, Prefill, Rotate, Score, Work, Write


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second copied (counting the read and the write) and read, bf16 FLOP a second."""

    copy: float
    read: float
    matmul: float
    launch_s: float
    """Seconds of a kernel that does nothing, as every sample contains them."""


@dataclass(frozen=True)
class Bound:
    """What a case must move or compute at least: `count` of `unit`, at the rate of a ceiling."""

    count: float
    unit: str
    ceiling: str

    def share(self, seconds: float, ceilings: Ceilings) -> float:
        """Time at the ceiling over the time taken."""
        return self.count / float(getattr(ceilings, self.ceiling)) / seconds


def bound_of(work: Work) -> Bound:
    """The larger of a case's two floors on this kind of device, which is the one that can hold.

    Bytes count each input once and each output once; FLOPs are those of visible pairs alone, 4·D
    for each (row, query head, key): twice 2·D, for q·k and for the values, or in `score_tokens`
    for q·k in both of its passes.
    """
    s, size = work.shape, 2
    match work:
        case Decode():
            rows = 2 * work.batch * s.heads * s.head_dim
            keys = 2 * work.batch * work.keys * s.head_dim
            stored = 1 if work.fp8 else size
            return Bound(float(s.layers * (stored * keys + size * rows)), "B", "read")
        case Prefill():
            group = s.heads // s.kv_heads
            return Bound(4.0 * s.head_dim * group * work.pairs, "FLOP", "matmul")
        case Score():
            pairs = work.rows * (work.tokens - (work.rows - 1) / 2)
            return Bound(4.0 * s.head_dim * s.heads * pairs, "FLOP", "matmul")
        case Copy():
            return Bound(2.0 * work.blocks * work.block_bytes, "B", "copy")
        case Write():
            return Bound(size * 4.0 * work.vectors * s.head_dim, "B", "copy")
        case Rotate():
            # The second halves of cosines and sines repeat the first.
            turns = work.rows * s.head_dim
            return Bound(float(size * (2 * work.elements + turns)), "B", "copy")
        case Merge():
            rows = work.rows * s.heads
            return Bound((work.parts + 1.0) * rows * (size * s.head_dim + 4), "B", "read")


def measure(clock: DeviceClock, device: torch.device, effort: Effort) -> Ceilings:
    """Large buffers, random numbers (zeros compute faster than data does)."""
    source = torch.empty(1 << 15, 1 << 15, device=device).normal_()
    target = torch.empty_like(source)
    vector = torch.randn(1 << 15, device=device)
    count = source.numel() * source.element_size()
    a, b = torch.randn(2, 8192, 8192, device=device).bfloat16()
    timed = clock.time(
        {
            "copy": lambda: target.copy_(source),
            "copy bytes": lambda: target.view(torch.uint8).copy_(source.view(torch.uint8)),
            "sum": lambda: source.sum(),
            "max": lambda: source.amax(),
            "product": lambda: source @ vector,
            "matmul": lambda: a @ b,
            "launch": lambda: spin(0),
        },
        effort,
    )
    spent = {name: timing.median_s for name, timing in timed.items()}
    return Ceilings(
        copy=2 * count / min(spent["copy"], spent["copy bytes"]),
        read=count / min(spent["sum"], spent["max"], spent["product"]),
        matmul=2 * 8192**3 / spent["matmul"],
        launch_s=spent["launch"],
    )

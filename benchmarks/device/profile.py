"""Where a GPU's time goes: seconds by class of kernel, and the gaps between kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

import torch

CLASSES = (
    ("attention", r"attend_|flash|fmha|sdpa|mha_|attention"),
    ("scores", r"score_"),
    ("copies", r"copy_rerotate"),
    ("unpacking", r"unpack_|restore_|spread_"),
    ("packing", r"pack_pages|pack_top_r|pack_planes"),
    ("writes", r"write_pages"),
    ("rotations", r"rotate_rows"),
    ("GEMM", r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|dot_kernel"),
    ("transfers", r"memcpy|memset"),
    ("norms", r"norm"),
    ("elementwise", r""),
)
"""Class by the first pattern found in a kernel's name."""


def class_of(kernel: str) -> str:
    """The class of a kernel by its name."""
    return next(name for name, found in CLASSES if re.search(found, kernel, re.IGNORECASE))


def profile(call: Callable[[], object]) -> tuple[dict[str, float], int]:
    """Milliseconds by class, the gaps among them, and how many kernels ran. Warm `call` first."""
    spans = []
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        call()
        torch.cuda.synchronize()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end, event.name))
    spans.sort()
    spent: dict[str, float] = defaultdict(float)
    reached = spans[0][0] if spans else 0.0
    for start, end, name in spans:
        spent["gaps"] += max(0.0, start - reached) / 1e3
        spent[class_of(name)] += (end - start) / 1e3
        reached = max(reached, end)
    return dict(spent), len(spans)

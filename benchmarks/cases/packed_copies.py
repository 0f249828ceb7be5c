"""How fast a GPU's exact pages come to the host, from where a text is packed finally.

A prompt's next chunk waits for the copy of the last one. *Memory that is kept* is touched and
pinned ahead, and used again by later texts (`kvweave/runner/tiers/copy_memory.py`); *memory as it
comes* is asked of the system for each copy, which gives it out page by page. The first copy waits
for the former to be pinned, and the next one may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise, turns
from kvweave.runner.kv.aside import Aside
from kvweave.runner.tiers.copy_memory import CopyMemory

MEBIBYTES = 268
ROUNDS = 5
SETTLED_S = 1.0
"""In so many seconds all that is pinned ahead has been."""


def run(quick: bool) -> list[Row]:
    device = torch.device("cuda:0")
    count = (8 if quick else MEBIBYTES) << 20
    pages = torch.empty(count // 2, dtype=torch.bfloat16, device=device).normal_()
    aside, memory = Aside(device), CopyMemory(8 * count, device)
    ways = {
        "memory that is kept": partial(memory.on_host, pages, aside),
        "memory as it comes": partial(aside.on_host, pages),
    }
    torch.cuda.synchronize()
    firsts = {what: _seconds(copy, pages) for what, copy in ways.items()}
    time.sleep(SETTLED_S)
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    for what in turns(list(ways), ROUNDS):
        seconds[what].append(_seconds(ways[what], pages))
    return [
        Row(
            f"{count / 1e6:.0f} MB to the host: {what}",
            count / 1e9 / summarise(some).median_s,
            "GB/s",
            None,
            {"the first GB/s": count / 1e9 / firsts[what]},
        )
        for what, some in seconds.items()
    ]


def _seconds(copy: Callable[[], torch.Tensor], pages: torch.Tensor) -> float:
    start = time.perf_counter()
    copied = copy()
    seconds = time.perf_counter() - start
    expect(copied.device.type == "cpu", "expected a copy on the host")
    expect(torch.equal(copied, pages.cpu()), "expected the same bits on the host")
    return seconds

"""An engine under load, over exact pages and over packed ones in as much of a device's memory.

Random weights at the shape of a known model, prompts of random tokens, which come all at once, an
arena of so many bytes: what callers hear, and how many requests decode at once. Packed pages have
room for more of them, and are packed and read at the cost of steps (MosaicKV, section 6.3, whose
load has one length).

`python -m benchmarks.cases.packed_load --json FILE [--task '{"packed": ["int4", "half-int4"]}']`
writes a run for `python -m benchmarks.report.record FILE`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.cases.engine_load import Load, Task, carry_out, model_of
from benchmarks.cases.host_load import better, close
from benchmarks.heard import figures
from benchmarks.load import shape_of
from kvweave.lab.bench.rows import Row

CASE = "packed_load"
EXACT = "exact"
ON_GPU = Task(requests=72, answer=(50, 1500), chunk=4096, arena_bytes=32 * 2**30)
QUICK = Task("tiny Llama", 6, (1400, 1600), (8, 40), 256, arena_bytes=3500 * 2**10)


class Most:
    """How many requests of an engine have decoded at once."""

    def __init__(self) -> None:
        self.most = 0

    def look(self, engine: Any) -> None:
        """Counts those that decode."""
        decoding = sum(live.done is not None for live in engine._live.values())
        self.most = max(self.most, decoding)


def rows_of(task: Task) -> list[Row]:
    """The load over exact pages and over those of each format, each beside the former."""
    model, first = model_of(task), list[Row]()
    rows: list[Row] = []
    for name in (EXACT, *task.packed):
        load = Load(task, model, kv_dtype=None if name == EXACT else name)
        load.warm()
        most = Most()
        heard, counted = load.come([0.0] * task.requests, most.look)
        beside = {**counted, "decoding at once": most.most}
        made = list(figures(f"{shape_of(task)}, at once: {name}", heard, beside))
        first = first or made
        for row, exact in zip(made, first, strict=True):
            row.of["× exact"] = better(row, exact.value, row.value)
        rows += made
        close(load)
        del load
    return rows


def run(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    return rows_of(ON_GPU if on_gpu and not quick else QUICK)


def main(words: list[str] | None = None) -> int:
    """Runs one task on the machine it is called on, and writes it down."""
    return carry_out(
        (CASE, __doc__), rows_of, ON_GPU if torch.cuda.is_available() else QUICK, words
    )


if __name__ == "__main__":
    sys.exit(main())

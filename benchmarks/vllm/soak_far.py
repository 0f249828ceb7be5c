"""The soak of pages in the host's memory: `python -m benchmarks.vllm.soak --mode far`.

An engine whose heads mostly read few pages, over virtual pages of little memory and some of the
host's, so that pages leave all the time, the host is full at times and requests wait or give way.
At random requests are aborted and prefix caches are reset with all that runs; a GPU's engine sleeps
whenever all has ended, when nothing may be left on the device or the host. A quiet engine, which
has room for all on its device, answers the same: a request that gave way has its answer computed
anew by all pages, so that it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak.asked import Asked
from benchmarks.vllm.model import write_ranked
from benchmarks.vllm.soak_checks import counted, held_far
from benchmarks.vllm.soak_compare import Comparison
from benchmarks.vllm.soak_engine import (
    ARCHITECTURE,
    SHAPE,
    lines_of,
    serving,
)
from benchmarks.vllm.soak_load import (
    ABORT,
    RESET,
    MixedLoad,
    answered_alone,
    request_of,
    watched,
)
from kvweave.adapters.vllm.serving import engine_options

PAGES, EVERY, WHOLE = 5, 16, 1
"""Pages that heads read, steps from one choice to the next, and heads of a layer that read all."""
BLOCKS, ROOMY, HOST_BYTES = 260, 4000, 4 << 20
"""Virtual pages of the device under pressure and without; memory of the host for 42 of them."""
LONGER = 2
"""Answers are so many times as long as those of other soaks: pages leave while these are said."""
EVENTS = ("preempted", "aborted", "reset", "stopped", "second turns", "spilled", "host full")
"""What must have happened in a soak: it takes up to four times its time for that."""
MOST_CHOSEN = 0.02
"""Share of the answers in which rounding may have chosen another page."""


def written_map(model: Path) -> Path:
    """The map beside a checkpoint: in each layer another head reads all."""
    layers, heads = SHAPE["num_hidden_layers"], SHAPE["num_key_value_heads"]

    def pages_of(layer: int, head: int) -> int:
        return 0 if (head - layer) % heads < WHOLE else PAGES

    return write_ranked(model, layers, heads, pages_of, EVERY)


@contextmanager
def engine(model: Path, *, quiet: bool) -> Iterator[Any]:
    """A vLLM 0.33 in this process. `quiet`: for a request at a time, all of it on the device."""
    ours = engine_options(
        ARCHITECTURE, heads=str(written_map(model)), virtual_pages=True, host_bytes=HOST_BYTES
    )
    blocks = {"num_gpu_blocks_override": ROOMY if quiet else BLOCKS}
    with serving(model, {**ours, **blocks}, quiet=quiet) as llm:
        yield llm


class FarLoad(MixedLoad):
    """A load that has pages leave all the time."""

    events, patience, drain_s, longer = EVENTS, 4, 5.0, LONGER

    def __init__(self, llm: Any, seed: int, path: Path) -> None:
        super().__init__(llm, seed, path)
        self.far = self.steps.scheduler.connector.manager.far

    def run(self, seconds: float) -> None:
        """So many seconds of it, and what is looked at in the end."""
        with self.path.open("w") as records:
            self.mix(records, seconds, time.monotonic())
        self.complaints += self.memory.complaints()
        self.complaints += [f"never happened: {what}" for what in self.never]

    def step(self, records: Any = None) -> None:
        """One step of the engine, what ended in it, and where pages are then."""
        super().step(records)
        self.happened["spilled"] = self.far.spilled
        self.happened["host full"] += self.far.held == self.far.blocks

    def ended_with(self, asked: Asked, answers: list[dict[str, Any]]) -> None:
        """Nobody's answer may end with an error."""
        if any(one["reason"] == "error" for one in answers):
            self.complaints.append(f"{asked.name} ended with an error")

    def chance(self) -> None:
        """What else may happen in a step."""
        drawn = self.numbers.random(2)
        if drawn[0] < ABORT and self.asked:
            self.abort()
        if drawn[1] < RESET:
            done = self.engine.reset_prefix_cache(reset_running_requests=True)
            self.happened["reset"] += 1
            if not done:
                self.complaints.append("prefix caches were not reset in the middle of a load")

    def end_all(self, records: Any) -> None:
        """Ends all there is, and one request more: with it workers hear what ended last."""
        while self.engine.has_unfinished_requests():
            self.step(records)
        self.ask()
        super().end_all(records)

    def left(self) -> list[str]:
        """What is held on the device or the host, and bytes told that nobody copied."""
        found = [f"{held} left" for held in held_far(self.llm)]
        copied = self.far.spilled * self.steps.scheduler.connector.home_bytes
        if (told := counted()["kvweave_spilled_bytes_total"]) > copied:
            found.append(f"{told} spilled bytes told of {copied}")
        return found


def load(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The load on an engine of its own; what happened, and what should not have."""
    with engine(folder / "model", quiet=False) as llm:
        return watched(FarLoad(llm, seed, folder / "records"), seconds)


def compare(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """How the answers of a load compare with those of an engine that has room for all."""
    records = lines_of(folder / "records")
    comparison = Comparison(records)
    with engine(folder / "model", quiet=True) as llm:
        until = time.monotonic() + seconds
        for number in np.random.default_rng(seed).permutation(len(records)).tolist():
            if time.monotonic() > until:
                break
            record = records[number]
            if record["preempted"]:
                comparison.counts["gave way"] += 1
                continue
            asked = request_of(record)
            said = answered_alone(llm, asked)
            llm.llm_engine.reset_prefix_cache()
            pairs = zip(record["answers"], said["answers"], strict=True)
            for at, (own, alone) in enumerate(pairs):
                verdict = comparison.verdict(own, alone)
                comparison.counts[verdict] += 1
                if verdict == "different":
                    comparison.different.append(f"{asked.name} (answer {at})")
    counts = comparison.counts
    total = counts["same"] + counts["tie"] + counts["different"]
    complaints = [] if total else ["nothing was compared"]
    if counts["different"] + counts["tie"] > max(1, MOST_CHOSEN * total):
        complaints.append(f"{counts['different']} of {total} answers are not the quiet ones")
    return {"complaints": complaints, **comparison.found()}

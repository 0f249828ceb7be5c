"""The soak of pages in the host's memory: `python -m benchmarks.vllm.soak --mode far`.

An engine whose heads mostly read few pages, over virtual pages of little memory and some of the
host's, so that pages leave all the time, the host is full at times and requests wait or give way.
At random requests are aborted and prefix caches are reset with all that runs; a GPU's engine sleeps
whenever all has ended, when nothing may be left on the device or the host. A quiet engine, which
has room for all on its device, answers the same: a request that gave way has its answer computed
anew by all pages, so that it is left out.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak.asked import Asked, Author
from benchmarks.soak.log_watch import LogWatch
from benchmarks.soak.memory import MIB, Memory
from benchmarks.vllm.device import has_gpu
from benchmarks.vllm.model import write_ranked
from benchmarks.vllm.soak_checks import counted, held_far
from benchmarks.vllm.soak_compare import Comparison
from benchmarks.vllm.soak_engine import (
    ARCHITECTURE,
    REQUESTS,
    SHAPE,
    Steps,
    lines_of,
    said,
    sampling,
    serving,
)
from kvweave.adapters.vllm.serving import engine_options

DRAIN_S = 5.0
ABORT, RESET = 0.03, 0.01
"""Chances, in a step: a request is aborted, prefix caches are reset with all that runs."""
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


class FarLoad:
    """A load on an engine; what ended is written to `path`, one JSON object a line."""

    def __init__(self, llm: Any, seed: int, path: Path) -> None:
        self.llm, self.engine, self.path = llm, llm.llm_engine, path
        self.author, self.steps = Author(seed), Steps(llm)
        self.numbers = np.random.default_rng([seed, 1])
        self.far = self.steps.scheduler.connector.manager.far
        self.asked: dict[str, Asked] = {}
        self.happened: Counter[str] = Counter()
        self.memory = Memory()
        self.complaints: list[str] = []

    @property
    def never(self) -> list[str]:
        """What has not happened yet."""
        return [what for what in EVENTS if not self.happened[what]]

    def run(self, seconds: float) -> None:
        """So many seconds of it, and what is looked at in the end."""
        start = time.monotonic()
        with self.path.open("w") as records:
            while (past := time.monotonic() - start) < seconds or (
                self.never and past < 4 * seconds
            ):
                level = int(self.numbers.integers(2, 2 * REQUESTS))
                until = time.monotonic() + DRAIN_S
                while time.monotonic() < until:
                    while len(self.asked) < level:
                        self.ask()
                    self.step(records)
                    self.chance()
                self.drain(records, time.monotonic() - start)
        self.complaints += self.memory.complaints()
        self.complaints += [f"never happened: {what}" for what in self.never]

    def ask(self) -> None:
        """One more request."""
        asked = self.author.request()
        asked.answer *= LONGER
        self.happened["second turns"] += asked.before is not None
        prompt = {"prompt_token_ids": asked.tokens}
        self.engine.add_request(asked.name, prompt, sampling(asked))
        self.asked[asked.name] = asked

    def step(self, records: Any) -> None:
        """One step of the engine, and what ended in it."""
        for output in self.engine.step():
            if not output.finished:
                continue
            asked, noted = self.asked.pop(output.request_id), self.steps.taken(output.request_id)
            found = said(output)
            self.happened["preempted"] += noted["preempted"]
            reasons = Counter(one["reason"] for one in found["answers"])
            self.happened["stopped"] += reasons["stop"]
            if reasons["error"]:
                self.complaints.append(f"{asked.name} ended with an error")
            self.author.answered(asked, found["answers"][0]["tokens"])
            print(json.dumps({**asdict(asked), **found, **noted}), file=records)
        self.happened["spilled"] = self.far.spilled
        self.happened["host full"] += self.far.held == self.far.blocks

    def chance(self) -> None:
        """What else may happen in a step."""
        drawn = self.numbers.random(2)
        if drawn[0] < ABORT and self.asked:
            name = str(self.numbers.choice(list(self.asked)))
            self.engine.abort_request([name])
            self.happened["preempted"] += self.steps.taken(name)["preempted"]
            del self.asked[name]
            self.happened["aborted"] += 1
        if drawn[1] < RESET:
            done = self.engine.reset_prefix_cache(reset_running_requests=True)
            self.happened["reset"] += 1
            if not done:
                self.complaints.append("prefix caches were not reset in the middle of a load")

    def drain(self, records: Any, at: float) -> None:
        """Ends all there is; then nothing may be left, and a GPU's engine sleeps and wakes."""
        while self.engine.has_unfinished_requests():
            self.step(records)
        # What ended last is said to the workers with the next step.
        self.ask()
        while self.engine.has_unfinished_requests():
            self.step(records)
        self.step(records)
        if self.asked:
            self.complaints.append(f"{len(self.asked)} requests without an end: {self.asked}")
            self.asked.clear()
        self.complaints += [f"at {at:.0f} s: {left} left" for left in held_far(self.llm)]
        copied = self.far.spilled * self.steps.scheduler.connector.home_bytes
        if (told := counted()["kvweave_spilled_bytes_total"]) > copied:
            self.complaints.append(f"at {at:.0f} s: {told} spilled bytes told of {copied}")
        if not self.engine.reset_prefix_cache():
            self.complaints.append(f"at {at:.0f} s: prefix caches were not reset")
        if has_gpu():
            self.llm.sleep(level=1)
            self.llm.wake_up()
            self.happened["slept"] += 1
        self.memory.look(at)


def load(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The load on an engine of its own; what happened, and what should not have."""
    with engine(folder / "model", quiet=False) as llm:
        logs = LogWatch()
        made = FarLoad(llm, seed, folder / "records")
        try:
            made.run(seconds)
        finally:
            logs.close()
        memory = made.memory
        return {
            "complaints": [*made.complaints, *logs.errors],
            "happened": dict(made.happened),
            "MiB": [round(size / MIB, 1) for size in memory.resident],
            "growth MiB": round(memory.growth(memory.resident) / MIB, 2),
            "objects": memory.objects,
        }


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
            asked = Asked(**{name: record[name] for name in Asked.__dataclass_fields__})
            prompt = {"prompt_token_ids": asked.tokens}
            llm.llm_engine.add_request(asked.name, prompt, sampling(asked))
            found: list[Any] = []
            while llm.llm_engine.has_unfinished_requests():
                found += llm.llm_engine.step()
            llm.llm_engine.reset_prefix_cache()
            pairs = zip(record["answers"], said(found[0])["answers"], strict=True)
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

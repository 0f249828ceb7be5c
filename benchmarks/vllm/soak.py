"""A mixed load for a long time: `python -m benchmarks.vllm.soak [--mode segments] [--seed 0]`.

One engine with a head map, segments, foresight and a knowledge base on disk, of a tiny random
Llama, on a GPU where there is one and else on the CPU. Prompts with and without marks, second turns
of chats, several answers, stop strings; at random requests are aborted, blocks run short, prefix
caches are reset, documents dropped and put, and a GPU's engine sleeps. Every few seconds the engine
is left to end all it has: nothing may be left then. Afterwards a quiet engine, which is asked one
request at a time, has to answer the same. Exit status 1 where anything is not as it should be.

With `--mode far` it is another engine, whose pages leave for the host's memory: `soak_far` (0.33).

On a CPU with a vLLM that was built for GPUs, `tests/vllm_plugin/engine` on PYTHONPATH has the ops
that it lacks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.soak.asked import DOCUMENTS, Asked, document
from benchmarks.vllm import soak_far
from benchmarks.vllm.device import prepare
from benchmarks.vllm.found import lines, say
from benchmarks.vllm.soak_checks import left_behind, metric_complaints
from benchmarks.vllm.soak_compare import Comparison
from benchmarks.vllm.soak_engine import Steps, engine, lines_of, written
from benchmarks.vllm.soak_load import (
    ABORT,
    RESET,
    MixedLoad,
    answered_alone,
    request_of,
    watched,
)
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.errors import PoolFull

CHANGE = 0.04
"""Chance, in a step, that a document goes and another comes."""
EVENTS = ("preempted", "aborted", "reset", "put", "dropped", "brought", "evicted", "stopped")
EVENTS += ("second turns",)
"""What must have happened in a soak: it takes up to four times its time for that."""


class Load(MixedLoad):
    """A load that has documents come and go."""

    events, patience, drain_s = EVENTS, 2, 3.0

    def __init__(self, llm: Any, seed: int, path: Path) -> None:
        super().__init__(llm, seed, path)
        self.base = KnowledgeBase(llm.collective_rpc)
        self.ended: Counter[str] = Counter()
        self._documents = 0

    def run(self, seconds: float) -> None:
        """So many seconds of it, and what is looked at in the end."""
        start = time.monotonic()
        for _ in range(DOCUMENTS):
            self.put()
        with self.path.open("w") as records:
            self.mix(records, seconds, start)
            for number in list(self.author.there):
                self.drop(number)
            # What calls changed is reported with the next step.
            self.ask()
            self.drain(records, time.monotonic() - start)
        held = self.base.store()["held"]
        if held:
            self.complaints.append(f"{held} blocks held without documents")
        self.complaints += metric_complaints(self.ended) + self.memory.complaints()
        self.complaints += [f"never happened: {what}" for what in self.never]

    def ended_with(self, asked: Asked, reasons: Counter[str]) -> None:
        """Counts answers that ended."""
        self.ended["finished"] += reasons.total()

    def chance(self) -> None:
        """What else may happen in a step."""
        drawn = self.numbers.random(3)
        if drawn[0] < ABORT and self.asked:
            self.abort()
        if drawn[1] < RESET:
            self.reset()
        if drawn[2] < CHANGE:
            self.drop(int(self.numbers.choice(self.author.there)))
            self.put()

    def reset(self) -> None:
        """Prefix caches in the middle of a load; vLLM refuses it while a document is on its way."""
        try:
            if not self.engine.reset_prefix_cache(reset_running_requests=True):
                self.complaints.append("prefix caches were not reset in the middle of a load")
        except RuntimeError as error:
            if "remote KV transfer" not in str(error):
                raise
            self.happened["reset refused"] += 1
        else:
            self.happened["reset"] += 1

    def put(self) -> None:
        """A new document; one that the store has no room for is refused, and the next one comes."""
        self._documents += 1
        space, name, tokens = document(self._documents)
        try:
            self.base.insert(name, tokens, space)
        except PoolFull:
            self.happened["refused"] += 1
        self.author.there.append(self._documents)
        self.happened["put"] += 1

    def drop(self, number: int) -> None:
        """A document goes, whoever is being answered about it."""
        self.author.there.remove(number)
        space, name, _ = document(number)
        if any(entry["name"] == name for entry in self.base.entries(space)):
            self.base.delete(name, space)
            self.happened["dropped"] += 1

    def left(self) -> list[str]:
        """What is held although all has ended; and what the store has done."""
        found = self.base.store()
        self.happened["brought"] = found["brought_documents"]
        self.happened["evicted"] = found["evictions"]
        return [f"{held} left" for held in left_behind(self.llm)]


def load(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The load on an engine of its own; what happened, and what should not have."""
    with engine(folder / "model", quiet=False) as llm:
        made = Load(llm, seed, folder / "records")
        return watched(made, seconds) | {"ended": dict(made.ended)}


class Quiet:
    """An engine that is asked one request at a time, each with its documents and first turn."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.steps = llm, Steps(llm)
        self.base = KnowledgeBase(llm.collective_rpc)
        self._there: set[int] = set()

    def answer(self, record: dict[str, Any], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What it says to a request of a load. `known`: the load's, by name."""
        asked = request_of(record)
        for number in set(asked.documents) - self._there:
            space, name, tokens = document(number)
            self.base.insert(name, tokens, space)
            self._there.add(number)
        if asked.before in known:
            self.answer(known[asked.before], known)
        return {**answered_alone(self.llm, asked), **self.steps.taken(asked.name)}


def quiet(
    folder: Path, records: list[dict[str, Any]], seconds: float, seed: int
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests of a load in another order, and what a quiet engine says, for so many seconds."""
    known = {record["name"]: record for record in records}
    with engine(folder / "model", quiet=True) as llm:
        alone, until = Quiet(llm), time.monotonic() + seconds
        for number in np.random.default_rng(seed).permutation(len(records)).tolist():
            if time.monotonic() > until:
                return
            yield records[number], alone.answer(records[number], known)


def compare(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """How the answers of a load compare with a quiet engine's."""
    records = lines_of(folder / "records")
    comparison = Comparison(records)
    for record, alone in quiet(folder, records, seconds, seed):
        comparison.add(record, alone)
    return {"complaints": comparison.complaints(), **comparison.found()}


MODES = {
    "segments": {"load": load, "compare": compare},
    "far": {"load": soak_far.load, "compare": soak_far.compare},
}
"""What is run in processes of their own, one after the other."""


def main(words: list[str] | None = None) -> int:
    """Returns the exit status: 1 where there is something to complain of."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--quiet-seconds", type=float, help="of the quiet engine; half of those")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="segments", help="what the engine has")
    parser.add_argument("--folder", type=Path, help="where records stay; else nowhere")
    parser.add_argument("--phase", choices=MODES["segments"], help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    seconds = {"load": given.seconds, "compare": given.quiet_seconds or given.seconds / 2}
    if given.phase:
        prepare()
        say(
            given.phase,
            **MODES[given.mode][given.phase](given.folder, seconds[given.phase], given.seed),
        )
        return 0
    with TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        written(folder)
        own = ["--folder", str(folder), "--seed", str(given.seed), "--mode", given.mode]
        complaints: list[str] = []
        for phase, limit in seconds.items():
            words = ["--phase", phase, "--seconds", str(limit), "--quiet-seconds", str(limit)]
            for found in lines("benchmarks.vllm.soak", [*own, *words]):
                complaints += found["complaints"]
                if not found.get("same", 1):
                    complaints.append("no answer could be compared")
    print("\n".join(complaints) or "nothing to complain of", flush=True)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())

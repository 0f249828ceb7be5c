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
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.soak.asked import DOCUMENTS, Asked, Author, document
from benchmarks.soak.log_watch import LogWatch
from benchmarks.soak.memory import MIB, Memory
from benchmarks.vllm import soak_far
from benchmarks.vllm.device import has_gpu, prepare
from benchmarks.vllm.found import lines, say
from benchmarks.vllm.soak_checks import left_behind, metric_complaints
from benchmarks.vllm.soak_compare import Comparison
from benchmarks.vllm.soak_engine import (
    REQUESTS,
    Steps,
    engine,
    lines_of,
    said,
    sampling,
    written,
)
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.errors import PoolFull

DRAIN_S = 3.0
ABORT, RESET, CHANGE = 0.03, 0.01, 0.04
"""Chances, in a step: a request is aborted, prefix caches are reset, a document goes and comes."""
EVENTS = ("preempted", "aborted", "reset", "put", "dropped", "brought", "evicted", "stopped")
EVENTS += ("second turns",)
"""What must have happened in a soak: it takes up to four times its time for that."""


class Load:
    """A load on an engine; what ended is written to `path`, one JSON object a line."""

    def __init__(self, llm: Any, seed: int, path: Path) -> None:
        self.llm, self.engine, self.path = llm, llm.llm_engine, path
        self.base = KnowledgeBase(llm.collective_rpc)
        self.author, self.steps = Author(seed), Steps(llm)
        self.numbers = np.random.default_rng([seed, 1])
        self.asked: dict[str, Asked] = {}
        self.happened: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.memory = Memory()
        self.complaints: list[str] = []
        self._documents = 0

    def run(self, seconds: float) -> None:
        """So many seconds of it, and what is looked at in the end."""
        start = time.monotonic()
        for _ in range(DOCUMENTS):
            self.put()
        with self.path.open("w") as records:
            while (past := time.monotonic() - start) < seconds or (
                self.never and past < 2 * seconds
            ):
                level = int(self.numbers.integers(2, 2 * REQUESTS))
                until = time.monotonic() + DRAIN_S
                while time.monotonic() < until:
                    while len(self.asked) < level:
                        self.ask()
                    self.step(records)
                    self.chance()
                self.drain(records, time.monotonic() - start)
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

    @property
    def never(self) -> list[str]:
        """What has not happened yet."""
        return [what for what in EVENTS if not self.happened[what]]

    def ask(self) -> None:
        """One more request."""
        asked = self.author.request()
        self.happened["second turns"] += asked.before is not None
        prompt = {"prompt_token_ids": asked.tokens}
        self.engine.add_request(asked.name, prompt, sampling(asked))
        self.asked[asked.name] = asked

    def step(self, records: Any = None) -> None:
        """One step of the engine, and what ended in it."""
        for output in self.engine.step():
            if not output.finished:
                continue
            asked, noted = self.asked.pop(output.request_id), self.steps.taken(output.request_id)
            found = said(output)
            self.happened["preempted"] += noted["preempted"]
            self.ended["finished"] += len(found["answers"])
            self.happened["stopped"] += sum(a["reason"] == "stop" for a in found["answers"])
            self.author.answered(asked, found["answers"][0]["tokens"])
            print(json.dumps({**asdict(asked), **found, **noted}), file=records)

    def chance(self) -> None:
        """What else may happen in a step."""
        drawn = self.numbers.random(3)
        if drawn[0] < ABORT and self.asked:
            name = str(self.numbers.choice(list(self.asked)))
            self.engine.abort_request([name])
            self.happened["preempted"] += self.steps.taken(name)["preempted"]
            del self.asked[name]
            self.happened["aborted"] += 1
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

    def drain(self, records: Any, at: float) -> None:
        """Ends all there is; then nothing may be left, and a GPU's engine sleeps and wakes."""
        while self.engine.has_unfinished_requests():
            self.step(records)
        # What ended last is said to the workers with the next step.
        self.step(records)
        if self.asked:
            self.complaints.append(f"{len(self.asked)} requests without an end: {self.asked}")
            self.asked.clear()
        self.complaints += [f"at {at:.0f} s: {left} left" for left in left_behind(self.llm)]
        if not self.engine.reset_prefix_cache():
            self.complaints.append(f"at {at:.0f} s: prefix caches were not reset")
        if has_gpu():
            self.llm.sleep(level=1)
            self.llm.wake_up()
            self.happened["slept"] += 1
        found = self.base.store()
        self.happened["brought"] = found["brought_documents"]
        self.happened["evicted"] = found["evictions"]
        self.memory.look(at)


def load(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The load on an engine of its own; what happened, and what should not have."""
    with engine(folder / "model", quiet=False) as llm:
        logs = LogWatch()
        made = Load(llm, seed, folder / "records")
        try:
            made.run(seconds)
        finally:
            logs.close()
        memory = made.memory
        return {
            "complaints": [*made.complaints, *logs.errors],
            "happened": dict(made.happened),
            "ended": dict(made.ended),
            "MiB": [round(size / MIB, 1) for size in memory.resident],
            "growth MiB": round(memory.growth(memory.resident) / MIB, 2),
            "objects": memory.objects,
        }


class Quiet:
    """An engine that is asked one request at a time, each with its documents and first turn."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.steps = llm, Steps(llm)
        self.base = KnowledgeBase(llm.collective_rpc)
        self._there: set[int] = set()

    def answer(self, record: dict[str, Any], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What it says to a request of a load. `known`: the load's, by name."""
        asked = Asked(**{name: record[name] for name in Asked.__dataclass_fields__})
        for number in set(asked.documents) - self._there:
            space, name, tokens = document(number)
            self.base.insert(name, tokens, space)
            self._there.add(number)
        if asked.before in known:
            self.answer(known[asked.before], known)
        self.llm.llm_engine.add_request(
            asked.name, {"prompt_token_ids": asked.tokens}, sampling(asked)
        )
        found: list[Any] = []
        while self.llm.llm_engine.has_unfinished_requests():
            found += self.llm.llm_engine.step()
        return {**said(found[0]), **self.steps.taken(asked.name)}


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

"""A mixed load for a long time: `python -m benchmarks.vllm.soak [--mode segments] [--seed 0]`.

One engine with a head map, segments, foresight and a knowledge base on disk, of a tiny random
Llama, on a GPU where there is one and else on the CPU. Prompts with and without marks, second turns
of chats, several answers, stop strings, answers by a grammar; at random requests are aborted,
blocks run short, caches are reset, those of the connector too, documents dropped and put. Every few
seconds the engine is left to end all it has: nothing may be left then. It sleeps, each third time
at level 2, after which its weights are loaded anew. Afterwards a quiet engine, which is asked one
request at a time, has to answer the same. Exit status 1 where anything is not as it should be.

With `--mode int4`, `half-int4` or `planes-3` pages of segments are packed, and there is no map:
`soak_engine.Served`. With `--mode server` clients ask a server over HTTP: `soak_server`. With
`--mode far` it is another engine, whose pages leave for the host's memory: `soak_far` (0.33).
Several modes are run one after the other, and `--record` keeps what they come to.

On a CPU with a vLLM that was built for GPUs, `tests/vllm_plugin/engine` on PYTHONPATH has the ops
that it lacks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from benchmarks.quality.sampled import show
from benchmarks.soak.asked import CHOICE, DOCUMENTS, WEIGHTS, Asked, document, text
from benchmarks.vllm import soak_far, soak_server
from benchmarks.vllm.device import prepare
from benchmarks.vllm.found import lines, say
from benchmarks.vllm.soak_checks import left_behind, metric_complaints
from benchmarks.vllm.soak_compare import Comparison
from benchmarks.vllm.soak_engine import (
    ALLOWED,
    CHUNK,
    PACKED,
    SEGMENTS,
    Served,
    Steps,
    engine,
    lines_of,
    written,
)
from benchmarks.vllm.soak_load import (
    ABORT,
    RESET,
    MixedLoad,
    answered_alone,
    request_of,
    watched,
)
from benchmarks.vllm.soak_rows import rows_of
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.errors import PoolFull
from kvweave.lab.bench.rows import Row

CASE = "vllm_soak"
CHANGE, FORGET, FORGET_FIRST = 0.04, 0.01, 0.1
"""Chances, in a step: a document goes and another comes, caches are reset with the connector's, and
these while they never were: a short soak has few steps."""
LEVELS = (1, 2, 0)
"""At which level the engine sleeps, one time after another that all has ended."""
FIRST = 12
"""Prompts of a chunk each that come first: a basis that pages are packed in is made of these."""
EVENTS = ("preempted", "aborted", "reset", "put", "dropped", "brought", "evicted", "stopped")
EVENTS += ("second turns", "forgot", "slept", "slept deeply")
"""What must have happened in a soak: it takes up to four times its time for that."""


class Load(MixedLoad):
    """A load that has documents come and go."""

    events, patience, drain_s = EVENTS, 2, 3.0
    weights: ClassVar[Mapping[str, int]] = {**WEIGHTS, CHOICE: 1}

    def __init__(self, llm: Any, seed: int, path: Path) -> None:
        super().__init__(llm, seed, path)
        begun(llm)
        self.base = KnowledgeBase(llm.collective_rpc)
        self._documents = self._drained = 0

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
        self.complaints += metric_complaints(self.answers) + self.memory.complaints()
        self.complaints += [f"never happened: {what}" for what in self.never]

    def ended_with(self, asked: Asked, answers: list[dict[str, Any]]) -> None:
        """What a grammar bounds says nothing else."""
        if asked.kind == CHOICE and not ALLOWED.issuperset(*(one["tokens"] for one in answers)):
            self.complaints.append(f"{asked.name}: an answer that its grammar does not allow")

    def chance(self) -> None:
        """What else may happen in a step."""
        drawn = self.numbers.random(4)
        if drawn[0] < ABORT and self.asked:
            self.abort()
        if drawn[1] < RESET:
            self.reset()
        if drawn[2] < CHANGE:
            self.drop(int(self.numbers.choice(self.author.there)))
            self.put()
        if drawn[3] < (FORGET if self.happened["forgot"] else FORGET_FIRST):
            # vLLM's own cache is not reset while somebody runs.
            self.engine.reset_prefix_cache(reset_connector=True)
            self.happened["forgot"] += 1

    def sleep(self) -> None:
        """At a level, or not at all; after level 2 its weights are loaded again, the same ones."""
        level = LEVELS[self._drained % len(LEVELS)]
        self._drained += 1
        if not level:
            return
        self.llm.sleep(level=level)
        self.llm.wake_up()
        self.happened["slept deeply" if level == 2 else "slept"] += 1
        if level == 2:
            self.llm.collective_rpc("reload_weights")
            resident = [e["name"] for e in self.base.entries() if e["resident_blocks"]]
            if resident:
                self.complaints.append(f"documents of memory that was given back: {resident}")
            begun(self.llm)

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


def begun(llm: Any) -> None:
    """Has an engine compute its first prompts, the same in all of them."""
    for number in range(FIRST):
        marks = {"segments": [[0, CHUNK]], "policy": "full", "namespace": "begun"}
        answered_alone(llm, Asked("begun", "full", text(CHUNK, 11, number), 1, marks))


def load(folder: Path, seconds: float, seed: int, served: Served = SEGMENTS) -> dict[str, Any]:
    """The load on an engine of its own; what happened, and what should not have."""
    with engine(folder / "model", served, quiet=False) as llm:
        made = Load(llm, seed, folder / "records")
        return watched(made, seconds)


class Quiet:
    """An engine that is asked one request at a time, each with its documents and first turn."""

    def __init__(self, llm: Any) -> None:
        begun(llm)
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
    folder: Path, records: list[dict[str, Any]], seconds: float, seed: int, served: Served
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests of a load in another order, and what a quiet engine says, for so many seconds."""
    known = {record["name"]: record for record in records}
    with engine(folder / "model", served, quiet=True) as llm:
        alone, until = Quiet(llm), time.monotonic() + seconds
        for number in np.random.default_rng(seed).permutation(len(records)).tolist():
            if time.monotonic() > until:
                return
            yield records[number], alone.answer(records[number], known)


def compare(folder: Path, seconds: float, seed: int, served: Served = SEGMENTS) -> dict[str, Any]:
    """How the answers of a load compare with a quiet engine's."""
    records = lines_of(folder / "records")
    comparison = Comparison(records, served)
    for record, alone in quiet(folder, records, seconds, seed, served):
        comparison.add(record, alone)
    return {"complaints": comparison.complaints(), **comparison.found()}


MODES = {
    "segments": {"load": load, "compare": compare},
    **{
        kind: {"load": partial(load, served=served), "compare": partial(compare, served=served)}
        for kind, served in PACKED.items()
    },
    "server": {"load": soak_server.load, "compare": soak_server.compare},
    "far": {"load": soak_far.load, "compare": soak_far.compare},
}
"""What is run in processes of their own, one after the other."""


def main(words: list[str] | None = None) -> int:
    """Returns the exit status: 1 where there is something to complain of."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--quiet-seconds", type=float, help="of the quiet engine; half of those")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, nargs="+", default=["segments"], help="in turns")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    parser.add_argument("--folder", type=Path, help="where records stay; else nowhere")
    parser.add_argument("--phase", choices=MODES["segments"], help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    seconds = {"load": given.seconds, "compare": given.quiet_seconds or given.seconds / 2}
    if given.phase:
        prepare()
        (mode,) = given.mode
        phase = MODES[mode][given.phase]
        say(given.phase, **phase(given.folder, seconds[given.phase], given.seed))
        return 0
    rows: list[Row] = []
    complaints: list[str] = []
    for mode in given.mode:
        with TemporaryDirectory() as made:
            folder = given.folder or Path(made)
            found = phases(folder, mode, seconds, given.seed)
        own = [text for phase in found.values() for text in phase["complaints"]]
        if not found["compare"].get("same"):
            own.append("no answer could be compared")
        rows += rows_of(mode, found["load"], found["compare"], len(own))
        complaints += [f"{mode}: {text}" for text in own]
    show(CASE, rows, given.record)
    print("\n".join(complaints) or "nothing to complain of", flush=True)
    return int(bool(complaints))


def phases(
    folder: Path, mode: str, seconds: dict[str, float], seed: int
) -> dict[str, dict[str, Any]]:
    """What the load and the comparison of a mode found, each in a process of its own."""
    written(folder)
    own = ["--folder", str(folder), "--seed", str(seed), "--mode", mode]
    found: dict[str, dict[str, Any]] = {}
    for phase, limit in seconds.items():
        words = ["--phase", phase, "--seconds", str(limit), "--quiet-seconds", str(limit)]
        for line in lines("benchmarks.vllm.soak", [*own, *words]):
            found[phase] = line
    return found


if __name__ == "__main__":
    sys.exit(main())

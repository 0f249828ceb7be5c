"""An engine under load whose device holds few requests whole, over the device and over the host.

Random weights at the shape of a known model, prompts of random tokens, an arena of so many bytes on
the device. *all*: heads read everything, and all pages lie on the device. *over the host*: of every
four KV heads one reads everything, the others choose pages every 16 steps, and pages that these do
not read lie in the host's memory (FlexiCache, section 4), while the device has little room left.
*mirrored* besides copies pages there as they fill, where the task asks for that (`copies`);
*always* has them lie there whether the device has room or not, and *fp8*, *late* and *sits out* (of
steps, till pages have come as a whole) are asked for there too, as `Runner(host_dtype=…)` and
`Runner(host_arrivals=…)` have them. All get the same requests, all at once, and then at the rate at
which *all* got through its own. What callers hear is measured, what the cache says that requests
held on the device while they decoded, for each of their tokens, how much was copied to the host,
and the bounds that pages were chosen by, which lie beside the arena: a task may leave room for them
by its `arena_bytes`.

`python -m benchmarks.cases.host_load --json FILE [--task '{"copies": ["spill", "mirror"]}']` writes
a run for `python -m benchmarks.report.record FILE`; vLLM with the same memory takes the same task
by `python -m benchmarks.vllm.serve --jobs load --task '{"memory": …, "rate": …}'`. Where contenders
were measured on GPUs of their own (`"whole": false` for one without *all*), `--join FILE...` sets
their runs, vLLM's too, beside each other and writes one to FILE of `--json`; vLLM may have had
packages of other versions, which the run names as its own. *Cadence* is that of the paper: one KV
head in four is ranked at every step instead of reading everything.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.engine_load import Load, Task, carry_out, model_of
from benchmarks.cases.top_k_step import bounds_bytes, choosing
from benchmarks.heard import Heard, figures
from benchmarks.load import AT_ONCE, POISSON, arrivals, shape_of
from benchmarks.report.record import joined
from kvweave.lab.bench.rows import Row, expect
from kvweave.runner.model.model_spec import describe

CASE, JOINED, JOINED_AT_ONCE = "host_load", "host_load_whole", "host_load_at_once"
"""What a run is called, and one whose contenders had processes of their own, where requests came at
a rate and where all came at once."""
JOINED_AT_RATIO = "host_load_ratio"
"""Such a run with 2.8 times as much of the host's memory as of the device's, as the paper has."""
JOINED_ARRIVALS = "host_load_arrivals"
"""Such a run of contenders that do otherwise while pages are on their way."""
JOINED_COPIES = "host_load_copies"
"""Such a run of contenders that copy pages to the host when room is short, or as they fill."""
VLLM_CASE = "vllm_load"
"""What a run of vLLM under this load is called: `benchmarks.vllm.serve.case_of`."""
PAGES, WHOLE_EVERY = 64, 4
ALL, STOCK = "all", "stock"
"""What others are set beside; vLLM as it is, as `benchmarks.vllm.serve` calls it."""
CADENCE = "cadence"
OTHERWISE: dict[str, dict[str, Any]] = {
    "fp8": {"host_dtype": "fp8"},
    "late": {"host_arrivals": "late"},
    "sits out": {"host_arrivals": "whole"},
    "always": {"host_free_share": 1.0},
}
"""What a runner is asked for besides, by how a contender is named."""
HOST_OVER_DEVICE = 6
"""Host memory for so many times the arena, where a task says no other."""
ON_GPU = Task(requests=200, answer=(50, 1500), chunk=4096, layers=4, arena_bytes=2 * 2**30)
ON_CPU = Task("small Llama", 12, (400, 1200), (16, 64), 256, arena_bytes=48 * 2**20)
QUICK = Task("tiny Llama", 4, (80, 160), (8, 40), 64, arena_bytes=400 * 2**10)


class Held:
    """Bytes on the device that decoding requests hold, beside those that all their KV would be.

    Both are sums over looks, of which one is taken every so many steps: of all requests, and of
    those that are long.
    """

    EVERY = 32
    LONG = 20_000

    def __init__(self, load: Load) -> None:
        self.load = load
        self.looks = 0
        self.bytes, self.whole = [0, 0], [0, 0]
        self.most = 0
        self.bounds = 0
        self._copied = self._copied_ever()

    def _copied_ever(self) -> int:
        return sum(int(pool.stats()["copied_bytes"]) for pool in self.load.runner.host.values())

    @property
    def copied(self) -> int:
        """Bytes that have gone to the host since the beginning."""
        return self._copied_ever() - self._copied

    def look(self, engine: Any) -> None:
        """Looks at the requests of an engine that decode."""
        self.looks += 1
        if self.looks % self.EVERY:
            return
        lives = [live for live in engine._live.values() if live.done is not None]
        shape = self.load.runner.cache.shape
        token = shape.layers * shape.kv_heads * shape.page_bytes // shape.page_tokens
        for request in (live.done.request for live in lives):
            for which in range(1 + (request.length > self.LONG)):
                self.bytes[which] += sum(request.kv_bytes())
                self.whole[which] += token * request.length
        self.most = max(self.most, len(lives))
        self.bounds = max(self.bounds, bounds_bytes(self.load.runner._decoder))

    @property
    def shares(self) -> dict[str, float]:
        """Of the bytes that all their KV would be, of all requests and of long ones."""
        names = "KV held", f"KV held beyond {self.LONG}"
        known = zip(names, self.bytes, self.whole, strict=True)
        return {name: held / whole for name, held, whole in known if whole}


def rows_of(task: Task, pages: int = PAGES) -> list[Row]:
    """The load at once and at a rate, over the device and over the host."""
    model = model_of(task)
    rows: list[Row] = []
    rate = task.rate
    for what, how in contenders(task, model, pages):
        load = Load(task, model, **how)
        for pool in load.runner.host.values():
            # A server has its memory before requests come.
            pool.home.wait()
        load.warm()
        made = list(loaded(load, what, rate))
        rate = rate or made[0].of["requests/s"]
        rows += made
        close(load)
        del load
    beside(rows)
    return rows


def contenders(task: Task, model: Any, pages: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is measured, and what its runner is asked for."""
    if task.whole:
        yield ALL, {}
    spec = describe(model)
    how: dict[str, Any] = {"heads": choosing(spec, pages, WHOLE_EVERY)}
    how["host_bytes"] = task.host_bytes or HOST_OVER_DEVICE * task.arena_bytes
    how["host_ahead_bytes"] = how["host_bytes"]
    how["host_arrivals"] = "exact"
    for copies in task.copies:
        if copies == CADENCE:
            heads = choosing(spec, pages, unstable_every=WHOLE_EVERY)
            yield f"over the host, {CADENCE}", {**how, "heads": heads, "host_arrivals": "late"}
            continue
        if copies in OTHERWISE:
            yield f"over the host, {copies}", {**how, **OTHERWISE[copies]}
            continue
        named = "over the host" + (", mirrored" if copies == "mirror" else "")
        yield named, {**how, "host_copies": copies}


def loaded(load: Load, what: str, rate: float) -> Iterator[Row]:
    """Its figures, and what requests held, of both ways to come."""
    task = load.task
    if AT_ONCE in task.ways:
        held = Held(load)
        heard, counted = load.come([0.0] * task.requests, held.look)
        rows = named(f"{shape_of(task)}, at once: {what}", heard, counted, held)
        rate = rate or rows[0].of["requests/s"]
        yield from rows
    if POISSON in task.ways:
        rate, apart = arrivals(replace(task, rate=rate), None, task.seed)
        held = Held(load)
        heard, counted = load.come(apart, held.look)
        yield from named(f"{shape_of(task)}, Poisson at {rate:.3g}/s: {what}", heard, counted, held)


def named(name: str, heard: list[Heard], counted: dict[str, Any], held: Held) -> list[Row]:
    beside = {**counted, "decoding at once": held.most, **held.shares}
    beside["copied GB"], beside["bounds GB"] = held.copied / 1e9, held.bounds / 1e9
    return list(figures(name, heard, beside))


def beside(rows: list[Row]) -> None:
    """Sets each figure of the host beside that of the device, and of vLLM, where they are known."""
    known = {row.name: row for row in rows}
    for over in rows:
        load, _, figure = over.name.split(": ")
        others = {"× all": f"{load}: {ALL}: {figure}", "× vLLM": f"{load}: {figure}: {STOCK}"}
        for key, name in others.items():
            if name == over.name or name not in known:
                continue
            over.of[key] = better(over, known[name].value, over.value)
            if "a token" in over.of:
                per_token = known[name].of["a token"], over.of["a token"]
                over.of[f"{key}, a token"] = better(over, *per_token)


def better(row: Row, other: float, own: float) -> float:
    """How many times as good a figure of a row is as another: more tokens, or less time."""
    return own / other if row.unit == "tokens/s" else other / own


def close(load: Load) -> None:
    """Gives all memory back to whoever comes next."""
    for pool in load.runner.host.values():
        expect(pool.stats()["held"] == 0, "expected host memory back, got some held")
    del load.runner
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(quick: bool) -> list[Row]:
    if torch.cuda.is_available():
        return rows_of(replace(ON_GPU, requests=24) if quick else ON_GPU)
    return rows_of(QUICK if quick else ON_CPU, pages=4 if quick else 16)


def main(words: list[str] | None = None) -> int:
    """Runs one task on the machine it is called on, and writes it down."""
    words = sys.argv[1:] if words is None else words
    if "--join" in words:
        return join(words)
    task = ON_GPU if torch.cuda.is_available() else ON_CPU
    return carry_out((CASE, __doc__), rows_of, task, words)


def versions_of(run: dict[str, Any]) -> dict[str, str]:
    """The packages that our own contenders had; none of a run of vLLM's."""
    packages: dict[str, str] = {} if run["case"] == VLLM_CASE else run["machine"]["packages"]
    return packages


def as_part(run: dict[str, Any], known: dict[str, str], case: str | None) -> dict[str, Any]:
    """A run as one of several, of a case that is named or follows from how requests came.

    What vLLM had in another version than the others is told apart.
    """
    if run["case"] == VLLM_CASE:
        had = run["machine"]["packages"].items()
        of = {name if known.get(name, v) == v else f"{name} of vLLM": v for name, v in had}
        run = {**run, "machine": {**run["machine"], "packages": of}}
    at_once = all(f", {AT_ONCE}: " in row["name"] for row in run["rows"])
    return {**run, "case": case or (JOINED_AT_ONCE if at_once else JOINED)}


def join(words: list[str]) -> int:
    """Sets runs of several processes beside each other, and writes them as one."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.cases.{CASE}")
    parser.add_argument("--join", type=Path, nargs="+", required=True, help="runs, *all* first")
    parser.add_argument("--json", type=Path, required=True, help="file for the run")
    cases = [JOINED, JOINED_AT_ONCE, JOINED_AT_RATIO, JOINED_ARRIVALS, JOINED_COPIES]
    parser.add_argument("--case", choices=cases)
    chosen = parser.parse_args(words)
    runs = [json.loads(path.read_text()) for path in chosen.join]
    known = {name: version for run in runs for name, version in versions_of(run).items()}
    whole = joined([as_part(run, known, chosen.case) for run in runs])
    rows = [Row(**row) for row in whole["rows"]]
    beside(rows)
    chosen.json.write_text(json.dumps({**whole, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

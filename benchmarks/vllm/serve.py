"""vLLM with the plugin beside vLLM without it: `python -m benchmarks.vllm.serve [--json FILE]`.

Random weights at a known shape, each engine in a process of its own. `stock` is vLLM as it is,
`off` the same with the plugin loaded and nothing asked of it, `ours` its model on our attention
backend, `heads` one with an eighth of global KV heads, and, where they are asked for, `top_k` one
whose heads all read 64 pages in a decode step and `mapped` that of `heads` with a store of
segments, an eighth of the KV memory, and `far` one of whose heads a quarter read all and the others
64 pages, which may lie in the host's memory. Results are printed as they come; FILE is a run for
`python -m benchmarks.report.record FILE`, whose case follows from the mode and the jobs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.report.record import of_device
from benchmarks.vllm.engine import ENGINES, JOBS, MODES, Task
from benchmarks.vllm.found import Found, lines
from benchmarks.vllm.model import FAR, MAPPED
from kvweave.errors import InvalidArgument
from kvweave.lab.bench.rows import Row

LOAD = {"capacity", "throughput", "load", "beside"}
"""Jobs of many requests at once."""
MILLI = 1e3
GIB = 2**30
CAPACITY: dict[str, Any] = {"layers": 4, "memory": 3 * GIB, "chunk": 8192, "context": 65536}
CAPACITY["store"] = CAPACITY["memory"] // 8


def case_of(mode: str, jobs: list[str], engines: Sequence[str] = (), ranks: int = 1) -> str:
    """What a record calls a run: `vllm_load` where every job is of many requests at once.

    `vllm_top_k` is one of an engine whose heads choose, `vllm_mapped` one of an engine that has
    segments beside a map, `vllm_mapped_ranks` of several ranks of it, `vllm_far` one of an engine
    over host memory. Raises InvalidArgument for jobs that are not recorded in this mode.
    """
    if ranks > 1:
        if mode == "graphs" and MAPPED in engines:
            return "vllm_mapped_ranks"
        text = f"ranks: a run has a record with mode graphs and {MAPPED}, got {mode}, {engines}"
        raise InvalidArgument(text, expected=f"mode graphs, engine {MAPPED}", got=mode)
    if mode == "graphs" and FAR in engines:
        return "vllm_far"
    if mode == "graphs" and "top_k" in engines:
        return "vllm_top_k"
    if mode == "graphs" and MAPPED in engines:
        return "vllm_mapped"
    if mode == "graphs":
        return "vllm_load" if LOAD.issuperset(jobs) else "vllm"
    if mode == "compiled" and LOAD.isdisjoint(jobs):
        return "vllm_compiled"
    expected = "mode graphs, or compiled with jobs of latency and decode"
    got = f"mode {mode} with {', '.join(jobs)}"
    text = f"json: expected a run that has a record, of {expected}, got {got}"
    raise InvalidArgument(text, expected=expected, got=got)


def tasks(jobs: list[str], engines: list[str], given: Found) -> Iterator[Task]:
    """What to run: capacity has an engine of few layers and of little memory, to be filled soon."""
    for job in jobs:
        for engine in engines:
            if job == "capacity" and engine in ("ours", "top_k"):
                continue  # Their pages are those of stock, but for bounds.
            defaults = {**CAPACITY, "requests": 0} if job == "capacity" else {}
            yield Task(engine, job, **{**defaults, **given})


def at_rate_of_first(task: Task, found: list[Found]) -> Task:
    """A task whose requests come as often as those of the first engine: ratios are of one load."""
    known = [line for line in found if line["what"] == "throughput" and line["arrivals_s"]]
    if task.rate or not task.poisson or task.job != "throughput" or not known:
        return task
    return replace(task, rate=known[0]["arrivals_s"])


def found_by(task: Task, limit_s: float) -> Iterator[Found]:
    """What an engine in a process of its own finds, and that it has failed where it did."""
    try:
        yield from lines("benchmarks.vllm.engine", [json.dumps(asdict(task))], limit_s)
    except subprocess.CalledProcessError as error:
        named = {"engine": task.engine, "job": task.job, "mode": task.mode}
        failed = {**named, "what": "failed", "exit": error.returncode}
        print(json.dumps(failed), flush=True)
        yield failed


NAMES = {
    "ttft": ("TTFT, {tokens} tokens", "seconds", MILLI, "ms"),
    "decode": ("decode step, B={batch}, {tokens} tokens", "seconds", MILLI, "ms"),
    "fit": ("requests of {tokens} tokens that fit", "requests", 1, ""),
    "served": ("requests of {tokens} tokens that ran at once", "at_once", 1, ""),
    "throughput": ("throughput, {requests} requests{come}", "rate", 1, "tokens/s"),
    "first": ("first token, {requests} requests{come}", "value", 1, "s"),
    "between": ("between tokens, {requests} requests{come}", "value", 1, "ms"),
    "device": ("KV on the device at most, {requests} requests{come}", "bytes", 1 / GIB, "GiB"),
    "row": ("{title}", "value", 1, "{unit}"),
}
BESIDE = {
    "served": ("requests", "preempted", "seconds", "answered", "layers", "chunk"),
    "throughput": ("read", "said", "seconds", "out_s", "requests_s", "arrivals_s"),
    "first": ("p99", "worst", "arrivals_s"),
    "between": ("p99", "worst", "arrivals_s"),
    "device": ("mean", "arrivals_s"),
}


def rows_of(found: list[Found]) -> list[Row]:
    """A row for each figure, with its ratio to stock's."""
    figures = [line for line in found if line["what"] in NAMES]
    stock = {_title(line): _value(line) for line in figures if line["engine"] == "stock"}
    rows = []
    for line in figures:
        title, value = _title(line), _value(line)
        beside = {**line.get("of", {}), **{key: line[key] for key in BESIDE.get(line["what"], ())}}
        if title in stock and line["engine"] != "stock":
            beside = {"÷ stock": round(value / stock[title], 4), **beside}
        scale, unit = NAMES[line["what"]][2:]
        p95 = line["p95"] * scale if line.get("p95") is not None else None
        named = f"{title}: {line['engine']}"
        rows.append(Row(named, round(value, 4), unit.format(**line), p95, beside))
    return rows


def _title(line: Found) -> str:
    title = NAMES[line["what"]][0].format(**line)
    return title if line["mode"] == "graphs" else f"{title}, {line['mode']}"


def _value(line: Found) -> float:
    _, key, scale, _ = NAMES[line["what"]]
    return float(line[key]) * scale


def parser_of_words() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.serve", description=__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["latency", "capacity"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES[:3]))
    parser.add_argument("--mode", choices=MODES, default="graphs", help="how steps run")
    parser.add_argument("--task", type=json.loads, default={}, help="fields of a task, JSON")
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism")
    parser.add_argument("--limit", type=float, default=300, help="seconds a process may take")
    parser.add_argument("--json", type=Path, help="where the run goes, after every process")
    return parser


def main(words: list[str] | None = None) -> int:
    """Runs the chosen jobs; returns the exit status, 1 when an engine failed."""
    parser = parser_of_words()
    chosen = parser.parse_args(words)
    found: list[Found] = []
    given = {"mode": chosen.mode, **chosen.task}
    if chosen.ranks > 1:
        given["others"] = {"tensor_parallel_size": chosen.ranks, **given.get("others", {})}
    try:
        of_run = given["mode"], chosen.jobs, chosen.engines, chosen.ranks
        case = case_of(*of_run) if chosen.json else ""
    except InvalidArgument as error:
        parser.error(str(error))
    for task in tasks(chosen.jobs, chosen.engines, given):
        found.extend(found_by(at_rate_of_first(task, found), chosen.limit))
        if chosen.json:
            run = of_device(case, rows_of(found))
            chosen.json.write_text(json.dumps(run, indent=1) + "\n")
    for row in rows_of(found):
        beside = ", ".join(f"{name} {value}" for name, value in row.of.items())
        p95 = "" if row.p95 is None else f" (p95 {row.p95:.4g})"
        print(f"{row.name}: {row.value:.4g} {row.unit}{p95}; {beside}", flush=True)
    return int(any(line["what"] == "failed" for line in found))


if __name__ == "__main__":
    sys.exit(main())

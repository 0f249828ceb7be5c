"""Hardware counters of the kernels that miss a target: `python -m benchmarks.device.counters`.

Each case of `kvweave bench ops` runs alone under Nsight Compute (`ncu`), warmed once; what the last
call launched is read from the counters, caches cold and clocks as they are. Without `--cases` they
are those that miss their target in the newest record of that benchmark; with `--packed` calls over
packed pages, all in one process. `--json FILE` is a run for
`python -m benchmarks.report.record FILE`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.device.packed_calls import PACKED
from benchmarks.report.record import of_device
from benchmarks.report.results import newest
from kvweave.lab.bench.rows import Row
from kvweave.lab.bench.shapes import CASES, GRAPH

CASE, PACKED_CASE = "counters", "counters_packed"
MISSED_IN = "cuda_ops"
"""The record whose missed targets are looked at."""
TIME = "gpu__time_duration.sum"
# A counter of ncu, and what a table calls it.
COUNTERS = {
    "sm__cycles_elapsed.max": "K cycles",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
    "lts__t_sector_hit_rate.pct": "L2 hits %",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor %",
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed": "issue slots %",
    "sm__warps_active.avg.per_cycle_active": "warps a SM",
    "launch__registers_per_thread": "registers",
    "launch__waves_per_multiprocessor": "waves",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Why warps that could not issue waited; ncu's names.
STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "barrier",
    "wait",
    "branch_resolving",
    "no_instruction",
    "math_pipe_throttle",
    "mio_throttle",
    "lg_throttle",
    "membar",
    "sleeping",
    "gmma",
    "dispatch_stall",
    "imc_miss",
    "not_selected",
)
NAME, MARK = "Kernel Name", "spin_kernel"
"""What ncu calls a kernel's name; that of one of torch's, launched between two cases."""


def missed(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Cases that miss a target in the record, in its order; a graph replay counts as its case.

    Raises ValueError where no run of the ops is there, or one of cases that are not known.
    """
    if MISSED_IN not in runs:
        raise ValueError(f"records: expected a run of {MISSED_IN}, got none; name --cases")
    rows = runs[MISSED_IN]["rows"]
    names = [row["name"] for row in rows if row["of"].get("met") == "no"]
    cases = list(dict.fromkeys(name.removesuffix(GRAPH) for name in names))
    unknown = set(cases) - {case.name for case in CASES}
    if unknown:
        raise ValueError(f"records: expected known cases, got {'; '.join(sorted(unknown))}")
    return cases


def _prepared(name: str) -> Callable[[], Any]:
    """The call of a case on this process' GPU."""
    if name in PACKED:
        return PACKED[name]()
    import torch

    from kvweave.lab.bench.contenders import OURS
    from kvweave.lab.bench.problems import problem

    work = next(case.work for case in CASES if case.name == name)
    data = problem(work, torch.device("cuda", torch.cuda.current_device()))
    return next(iter(OURS.contenders(data))).prepare()


def run_once(names: Sequence[str]) -> None:
    """Each case's call: once to warm up, once between the marks that ncu heeds.

    A kernel of torch's is launched behind each, by which `by_case` tells them apart.
    """
    import torch

    for name in names:
        call = _prepared(name)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        call()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        del call
        torch.cuda.empty_cache()


def counted(names: Sequence[str], ncu: str) -> list[dict[str, float]]:
    """Counters of the kernel that takes longest of those that each case launches; one process.

    Errors: `RuntimeError` with what ncu said when it counted nothing.
    """
    wanted = [TIME, *COUNTERS, *(STALL.format(stall) for stall in STALLS)]
    words = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    words += ["--profile-from-start", "off", "--metrics", ",".join(wanted)]
    words += [sys.executable, "-m", "benchmarks.device.counters", "--run", *names]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = by_case(done.stdout)
    if done.returncode or len(found) != len(names) or not all(found):
        raise RuntimeError(f"{', '.join(names)}: {(done.stdout + done.stderr)[-2000:]}")
    read = [[{name: _number(each.get(name, "")) for name in wanted} for each in of] for of in found]
    return [max(of, key=lambda kernel: kernel[TIME]) for of in read]


def by_case(said: str) -> list[list[dict[str, str]]]:
    """Kernels as a table of ncu's has them, case by case: each ends with a `MARK`."""
    lines = [line for line in said.splitlines() if line.startswith('"')]
    cases: list[list[dict[str, str]]] = []
    own: list[dict[str, str]] = []
    # Behind the names comes a line of units.
    names, _, *kernels = csv.reader(io.StringIO("\n".join(lines))) if len(lines) > 1 else ([], [])
    for kernel in kernels:
        told = dict(zip(names, kernel, strict=True))
        if MARK in told.get(NAME, ""):
            cases.append(own)
            own = []
        else:
            own.append(told)
    return cases


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def row_of(case: str, kernel: dict[str, float]) -> Row:
    """A kernel as a row: its time, its counters, and the three longest stalls."""
    beside: dict[str, Any] = {}
    for counter, name in COUNTERS.items():
        value = kernel[counter]
        beside[name] = round(value / 1e3 if name == "K cycles" else value, 2)
    waits = {stall: kernel[STALL.format(stall)] for stall in STALLS}
    longest = sorted(waits, key=lambda stall: waits[stall], reverse=True)[:3]
    beside["stalls"] = ", ".join(f"{s.replace('_', ' ')} {waits[s]:.2g}" for s in longest)
    return Row(case, round(kernel[TIME] / 1e3, 2), "µs", None, beside)


def main(words: list[str] | None = None) -> int:
    """Counts the chosen cases; returns the exit status, 1 when one could not be counted."""
    parser = argparse.ArgumentParser(prog="benchmarks.device.counters", description=__doc__)
    names = [*(case.name for case in CASES), *PACKED]
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--cases", nargs="+", choices=names)
    either.add_argument("--packed", action="store_true", help="calls over packed pages")
    parser.add_argument("--run", nargs="+", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where the run goes, after every process")
    chosen = parser.parse_args(words)
    if chosen.run:
        run_once(chosen.run)
        return 0
    try:
        cases = chosen.cases or ([] if chosen.packed else missed(newest()))
    except ValueError as error:
        parser.error(str(error))
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        parser.exit(1, "expected ncu (NVIDIA Nsight Compute) on the path, got none\n")
    rows: list[Row] = []
    failed = False
    for some in [list(PACKED)] if chosen.packed else [[name] for name in cases]:
        try:
            found = map(row_of, some, counted(some, ncu))
            for row in found:
                rows.append(row)
                print(row, flush=True)
        except RuntimeError as error:
            failed = True
            print(error, file=sys.stderr, flush=True)
        if chosen.json and rows:
            named = PACKED_CASE if chosen.packed else CASE
            chosen.json.write_text(json.dumps(of_device(named, rows), indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

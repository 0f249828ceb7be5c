"""Hardware counters of the kernels that miss a target: `python -m benchmarks.device.counters`.

Each case of `kvweave bench ops` runs alone under Nsight Compute (`ncu`), warmed once; what the last
call launched is read from the counters, caches cold and clocks as they are. Without `--cases` they
are those that miss their target in the newest record of that benchmark. `--json FILE` is a run for
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
from pathlib import Path
from typing import Any

from benchmarks.report.record import of_device
from benchmarks.report.results import newest
from kvweave.lab.bench.rows import Row
from kvweave.lab.bench.shapes import CASES, GRAPH, Case

CASE = "counters"
MISSED_IN = "cuda_ops"
"""The record whose missed targets are looked at."""
TIME = "gpu__time_duration.sum"
# A counter of ncu, and what a table calls it.
COUNTERS = {
    "sm__cycles_elapsed.max": "K cycles",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
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


def run_once(case: Case) -> None:
    """The case's call: once to warm up, once between the marks that ncu heeds."""
    import torch

    from kvweave.lab.bench.contenders import OURS
    from kvweave.lab.bench.problems import problem

    data = problem(case.work, torch.device("cuda", torch.cuda.current_device()))
    call = next(iter(OURS.contenders(data))).prepare()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def counted(case: Case, ncu: str) -> dict[str, float]:
    """Counters of the kernel that takes longest of those that the case launches.

    Errors: `RuntimeError` with what ncu said when it counted nothing.
    """
    wanted = [TIME, *COUNTERS, *(STALL.format(stall) for stall in STALLS)]
    words = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    words += ["--profile-from-start", "off", "--metrics", ",".join(wanted)]
    words += [sys.executable, "-m", "benchmarks.device.counters", "--one", case.name]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 3:
        raise RuntimeError(f"{case.name}: {(done.stdout + done.stderr)[-2000:]}")
    # Behind the names comes a line of units.
    names, _, *kernels = csv.reader(io.StringIO("\n".join(lines)))
    told = [dict(zip(names, kernel, strict=True)) for kernel in kernels]
    found = [{name: _number(each.get(name, "")) for name in wanted} for each in told]
    return max(found, key=lambda kernel: kernel[TIME])


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def row_of(case: Case, kernel: dict[str, float]) -> Row:
    """A kernel as a row: its time, its counters, and the three longest stalls."""
    beside: dict[str, Any] = {}
    for counter, name in COUNTERS.items():
        value = kernel[counter]
        beside[name] = round(value / 1e3 if name == "K cycles" else value, 2)
    waits = {stall: kernel[STALL.format(stall)] for stall in STALLS}
    longest = sorted(waits, key=lambda stall: waits[stall], reverse=True)[:3]
    beside["stalls"] = ", ".join(f"{s.replace('_', ' ')} {waits[s]:.2g}" for s in longest)
    return Row(case.name, round(kernel[TIME] / 1e3, 2), "µs", None, beside)


def main(words: list[str] | None = None) -> int:
    """Counts the chosen cases; returns the exit status, 1 when one could not be counted."""
    parser = argparse.ArgumentParser(prog="benchmarks.device.counters", description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names)
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where the run goes, after every case")
    chosen = parser.parse_args(words)
    known = {case.name: case for case in CASES}
    if chosen.one:
        run_once(known[chosen.one])
        return 0
    try:
        cases = chosen.cases or missed(newest())
    except ValueError as error:
        parser.error(str(error))
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        parser.exit(1, "expected ncu (NVIDIA Nsight Compute) on the path, got none\n")
    rows: list[Row] = []
    failed = False
    for name in cases:
        try:
            rows.append(row_of(known[name], counted(known[name], ncu)))
            print(rows[-1], flush=True)
        except RuntimeError as error:
            failed = True
            print(error, file=sys.stderr, flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(of_device(CASE, rows), indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

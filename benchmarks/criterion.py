"""What criterion measures in the Rust core, as rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.report.record import ROOT
from kvweave.lab.bench.rows import Row, expect


def criterion_rows(bench: str, quick: bool) -> list[Row]:
    """Runs a criterion bench of the core crate: its medians, nanoseconds an element."""
    with tempfile.TemporaryDirectory() as folder:
        words = [cargo(), "bench", "--locked", "-p", "kvweave-core", "--bench", bench]
        if quick:
            words += ["--", "--measurement-time", "0.5", "--warm-up-time", "0.2"]
        environment = {**os.environ, "CRITERION_HOME": folder}
        subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        measured = sorted(Path(folder).rglob("new/benchmark.json"))
        expect(bool(measured), "expected criterion to write figures, got none")
        return [row_of(path) for path in measured]


def cargo() -> str:
    """The path of cargo, which the core's figures need."""
    found = shutil.which("cargo")
    expect(found is not None, "the core's figures need cargo on PATH")
    return str(found)


def row_of(path: Path) -> Row:
    """What criterion wrote of one benchmark: its median and 95th percentile, ns an element."""
    about = json.loads(path.read_text())
    estimates = json.loads((path.parent / "estimates.json").read_text())
    sample = json.loads((path.parent / "sample.json").read_text())
    elements = (about.get("throughput") or {}).get("Elements", 1)
    each = np.array(sample["times"]) / np.array(sample["iters"]) / elements
    value = estimates["median"]["point_estimate"] / elements
    p95 = float(np.percentile(each, 95))
    return Row(about["full_id"], value, "ns", p95, {"elements": elements})

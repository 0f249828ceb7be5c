"""What benchmarks of quality share: a folder of samples that an interrupted run goes on from."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.report import record
from kvweave.lab.bench.rows import Row


def parser_of(case: str, says: str | None) -> argparse.ArgumentParser:
    """A command line with the folder of samples and `--record`."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{case}", description=says)
    parser.add_argument("logs", type=Path, help="folder that keeps the samples")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    return parser


def log_of(logs: Path, name: str) -> Path:
    """Where the samples of a job are kept."""
    return logs / f"{re.sub(r'[^a-z0-9]+', '-', name)}.jsonl"


def show(case: str, rows: list[Row], recorded: bool) -> None:
    """Prints rows, and keeps them as a run of this machine."""
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        print(f"{row.name:<{width}} {row.value:.4f} {row.of}")
    if recorded:
        print(f"recorded in {record.append(case, rows)}")

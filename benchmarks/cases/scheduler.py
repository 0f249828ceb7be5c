"""The scheduler: what a plan for a whole batch costs, and how fast real traces are replayed."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from typing import Any

from benchmarks.criterion import cargo, criterion_rows
from benchmarks.report.record import ROOT
from kvweave.lab.bench.rows import Row, expect

LIMIT_US = {"plan/decode/256": 20.0}
"""What the design asks for: a plan with 256 requests that decode."""
REPLAY_LIMIT_S = 60.0
REPLAY = "the_whole_conversation_is_replayed"


def run(quick: bool) -> list[Row]:
    return [*plans(quick), replay()]


def plans(quick: bool) -> list[Row]:
    """Microseconds a step's plan, and a plan with the answers to it and who comes and goes."""
    rows = []
    for row in criterion_rows("scheduler", quick):
        beside: dict[str, Any] = {"limit": LIMIT_US[row.name]} if row.name in LIMIT_US else {}
        p95 = None if row.p95 is None else row.p95 / 1e3
        rows.append(replace(row, value=row.value / 1e3, unit="µs", p95=p95, of=beside))
    return rows


def replay() -> Row:
    """An hour of chats, 12 031 requests, through the scheduler in virtual time, once."""
    words = [cargo(), "test", "--release", "--locked", "-p", "kvweave-core"]
    words += ["--test", "scheduler_replay", REPLAY, "--", "--exact", "--nocapture"]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    told = re.search(r": replayed in ([0-9.]+) s", done.stdout)
    steps = re.search(r"(\d+) steps", done.stdout)
    expect(told is not None and steps is not None, f"expected a replay, got {done.stdout!r}")
    assert told is not None
    assert steps is not None
    beside = {"limit": REPLAY_LIMIT_S, "requests": 12_031, "steps": int(steps[1])}
    return Row("replay of Mooncake's conversation", float(told[1]), "s", None, beside)

"""What a soak comes to, as rows: what happened on each runner, and the slopes of memory."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.soak.memory import MIB, MOST_GROWTH, Memory
from benchmarks.soak.probes import Probes
from benchmarks.soak.tally import Tally
from kvweave.lab.bench.rows import Row

COUNTED = {
    "answers": ("finished",),
    "prompt tokens": ("prompt tokens",),
    "answer tokens": ("answer tokens",),
    "requests cancelled, left, timed out or not read": (
        *("cancelled", "left", "timed out", "stopped reading", "cancelled by the end"),
    ),
    "times that a request gave way": ("preempted",),
    "documents inserted, deleted, restored, prefetched": ("put", "dropped", "restored"),
    "tenants forgotten": ("tenants forgotten",),
    "restarts, and times that all was given up": ("restarts", "emptied"),
}
"""What a row says, and which counts it sums up."""
COUNTED_WHERE_THEY_HAPPEN = (
    *("times that host memory was taken", "blocks copied to host memory"),
    *("longer than the device", "host memory was full", "tokens drafted", "drafts accepted"),
    *("pages packed beside their prompt", "pages packed behind their prompt"),
    *("documents packed finally", "documents left as they were packed"),
)
"""Counts that are a row of those kinds of runners which have any."""
_HOUR = 3600.0


def rows_of(
    memory: Memory,
    seconds: float,
    loads: Sequence[tuple[str, Tally, Probes, dict[str, int]]],
    complaints: int,
) -> list[Row]:
    """Rows of a soak of so many seconds, with so many complaints in all.

    `loads`: of each runner its name, what happened, its questions, and what else was counted.
    """
    rows = [
        Row("hours", seconds / _HOUR, "h", None, {}),
        Row("complaints", complaints, "", None, {}),
    ]
    for name, tally, probes, looked in loads:
        rows += [Row(f"{name}: {what}", n, "", None, {}) for what, n in counts_of(tally).items()]
        rows += [Row(f"{name}: {what}", n, "", None, {}) for what, n in looked.items()]
        beside: dict[str, float] = {"ties": probes.ties}
        what = f"{name}: answers that were compared with quiet ones"
        rows.append(Row(what, probes.compared, "", None, beside))
    for what, samples in (
        ("resident memory", memory.resident),
        ("bytes that the C library has given out", memory.allocated),
    ):
        half = len(samples) // 2
        span = memory.seconds[-1] - memory.seconds[half]
        beside = {
            "MiB at half time": samples[half] / MIB,
            "MiB in the end": samples[-1] / MIB,
            "bound, MiB/h": MOST_GROWTH / MIB / span * _HOUR if span else 0.0,
        }
        slope = memory.slope(samples) / MIB * _HOUR
        rows.append(Row(f"slope of {what}, second half", slope, "MiB/h", None, beside))
    return rows


def counts_of(tally: Tally) -> dict[str, int]:
    """What happened on a runner, by what a row says."""
    counts = tally.counts
    found = {what: sum(counts[name] for name in names) for what, names in COUNTED.items()}
    prefetched = [n for what, n in counts.items() if what.startswith("prefetched from")]
    found["documents inserted, deleted, restored, prefetched"] += sum(prefetched)
    refused = [n for what, n in counts.items() if what.startswith("refused")]
    found["requests and documents refused"] = sum(refused)
    found |= {what: counts[what] for what in COUNTED_WHERE_THEY_HAPPEN if counts[what]}
    for source in sorted(tally.sources):
        found[f"documents of prompts, from {source}"] = tally.sources[source]
    return found

"""What a soak of an engine comes to, as rows of a record."""

from __future__ import annotations

from typing import Any

from kvweave.lab.bench.rows import Row

COUNTED = {
    "times that a request gave way": ("preempted",),
    "requests aborted": ("aborted",),
    "requests aborted by a sleep": ("aborted by a sleep",),
    "streams that their clients left": ("left",),
    "times that a stranger asked": ("spied",),
    "documents put and dropped": ("put", "dropped"),
    "documents read from the disk": ("brought",),
    "blocks evicted": ("evicted",),
    "attempts to reset caches": ("reset refused", "reset"),
    "times that caches were reset, the connector's too": ("reset", "forgot"),
    "times that it slept, at level 2": ("slept", "slept deeply"),
    "pages copied to the host": ("spilled",),
}
"""What a row says, and which counts it sums up; the last of several stands beside it too."""
_HOUR = 3600.0


def rows_of(mode: str, load: dict[str, Any], quiet: dict[str, Any], complaints: int) -> list[Row]:
    """Rows of one mode: what its load and its comparison found, and complaints of both."""
    happened, memory = load["happened"], load["MiB"]
    rows = [
        Row(f"{mode}: hours", load["seconds"] / _HOUR, "h", None, {}),
        Row(f"{mode}: complaints", complaints, "", None, {}),
        Row(f"{mode}: answers", load["answers"], "", None, {}),
    ]
    for what, names in COUNTED.items():
        counts = [happened.get(name, 0) for name in names]
        if any(counts):
            beside = {f"of these {names[-1]}": counts[-1]} if len(names) > 1 else {}
            rows.append(Row(f"{mode}: {what}", sum(counts), "", None, beside))
    compared = sum(quiet.get(verdict, 0) for verdict in ("same", "tie", "different"))
    beside = {name: quiet.get(name, 0) for name in ("tie", "different")}
    rows.append(
        Row(f"{mode}: answers that were compared with quiet ones", compared, "", None, beside)
    )
    rows += [
        Row(f"{mode}: log-probabilities, {name}", quiet[name], "nats", None, {})
        for name in quiet
        if name.endswith("apart by at most")
    ]
    beside = {"at half time": memory[len(memory) // 2]}
    rows.append(Row(f"{mode}: resident memory in the end", memory[-1], "MiB", None, beside))
    return rows

"""Writes the newest records into the README: `python -m benchmarks.results`.

The figures there are never typed by hand. Each table names the machine that measured it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, ROOT

START, END = "<!-- results -->\n", "<!-- end of results -->"
TITLES = {
    "quality": "Nearness to full on held-out text, 4 segments encoded apart, KL in nats a token",
    "ttft": "Time to first token, SmolLM2-135M f32, four documents that are all cached",
    "block_manager": "Block manager, beside quoted figures of vLLM 0.33.0 (not run here)",
    "attention": "Attention over pages in random order, beside torch's over contiguous tensors",
    "copy_rerotate": "Copying and rotating pages on the CPU, beside torch's plain copy",
    "ttft_cuda": "Time to first token on a GPU, random weights, bf16, 97 % of the prompt cached",
    "cuda_ops": "Ops on CUDA beside their peers in the same process (above 1 ours is faster)",
}
# Rows of a long case that a README has room for.
SHOWN = {"attention": " 4096 "}
COMMANDS = {
    "quality": "python -m benchmarks.quality out/quality",
    "cuda_ops": "kvweave bench ops",
}
HIDDEN = {"elements", "tokens", "text"}
# Columns of a case that has more than a README has room for.
COLUMNS = {
    "ttft_cuda": ("÷ full", "rows", "bound s", "of bound", "peak GiB", "÷ planned", "limit s"),
}
VALUE = {"quality": "KL to full"}


def newest(folder: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """The last run of each case."""
    runs = [run for path in folder.rglob("*.json") for run in json.loads(path.read_text())]
    runs.sort(key=lambda run: run["time"])
    return {run["case"]: run for run in runs}


def markdown(runs: dict[str, dict[str, Any]]) -> str:
    """One table a case, each under the command that prints it."""
    if not runs:
        return "Nothing was recorded yet: `make bench RECORD=1`.\n"
    return "\n".join(_table(case, runs[case]) for case in TITLES if case in runs)


def _table(case: str, run: dict[str, Any]) -> str:
    # A row without a value is of an op that gave no right answer.
    rows = [r for r in run["rows"] if SHOWN.get(case, "") in r["name"] and "value" in r]
    found = dict.fromkeys(key for row in rows for key in row["of"] if key not in HIDDEN)
    beside = [key for key in found if key in COLUMNS.get(case, found)]
    machine = run["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in machine["packages"].items())
    command = COMMANDS.get(case, f"make bench CASE={case}")
    lines = [
        f"**{TITLES[case]}** — `{command}`, {run['time'][:10]}: "
        f"{machine['processor']}, {machine['cores']} cores; {versions}.",
        *_ceilings(run),
        "",
    ]
    spread = ["p95"] if any(row["p95"] is not None for row in rows) else []
    heads = ["what", VALUE.get(case, "median"), *spread, *beside]
    lines += [_line(heads), "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        measured = f"{_figure(row['value'])} {row['unit']}".rstrip()
        p95 = ["" if row["p95"] is None else _figure(row["p95"]) for _ in spread]
        cells = [_figure(row["of"][key]) if key in row["of"] else "" for key in beside]
        lines.append(_line([row["name"], measured, *p95, *cells]))
    return "\n".join(lines) + "\n"


def _ceilings(run: dict[str, Any]) -> list[str]:
    """What the device did at its best in the same run, for cases that measure it."""
    found = run.get("ceilings")
    if found is None:
        return []
    return [
        f"Ceilings in the same run: copy {found['copy'] / 1e12:.2f} TB/s (read and written), "
        f"read {found['read'] / 1e12:.2f} TB/s, bf16 matmul {found['matmul'] / 1e12:.0f} TFLOP/s, "
        f"empty launch {found['launch_s'] * 1e6:.1f} µs."
    ]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_figure, value))}]"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def filled(readme: str, runs: dict[str, dict[str, Any]]) -> str:
    """The README with the tables between its two marks."""
    before, rest = readme.split(START)
    return before + START + "\n" + markdown(runs) + "\n" + END + rest.split(END)[1]


def main() -> int:
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text(encoding="utf-8"), newest()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

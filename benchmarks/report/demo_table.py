"""The demo's means as a record, and as a table of them.

`make demo JSON=out.json`, then `python -m benchmarks.report.record out.json` on the same machine,
then `python -m benchmarks.report.results`.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

CASE = "demo"
MILLI = 1e3


def is_demo(document: dict[str, Any]) -> bool:
    """Whether this is what `kvweave demo --json` wrote."""
    return {"means", "rows", "model", "threads"} <= document.keys()


def run_of(document: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """A run of this machine, to be recorded: a row a policy, its mean over all prompts.

    Raises ValueError for a demo of one prompt, which has no means.
    """
    means = document["means"]
    if not means:
        raise ValueError("means: expected a demo of several prompts, got one of a single prompt")
    rows = [
        {
            "name": mean["policy"],
            "value": mean["ttft_s"] * MILLI,
            "unit": "ms",
            "p95": None,
            "of": {
                "rows": mean["row_share"],
                "÷ full": mean["ttft_ratio"],
                "first token": mean["first_token"],
                "KL": mean["kl"],
            },
        }
        for mean in means
    ]
    # What could be reused is what a policy that gives all of it back reused.
    cached = max(m["reused_prefix"] + m["reused_segment"] for m in means) / means[0]["tokens"]
    about = {key: document[key] for key in ("model", "device", "mode", "threads")}
    about |= {"prompts": max(row["prompt"] for row in document["rows"])}
    about |= {"tokens": means[0]["tokens"], "cached": cached}
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = {"case": CASE, "time": time, "commit": "unknown", "machine": machine}
    return {**found, "about": about, "rows": rows}


def markdown(run: dict[str, Any]) -> str:
    """A sentence that says what was run where, and a row a policy."""
    about, machine = run["about"], run["machine"]
    lines = [
        f"The demo's means over its {about['prompts']} prompts of {about['tokens']:.0f} tokens, "
        f"{_percent(about['cached'])} of them cached (`make demo`,",
        f"{machine['cores']} cores of {machine['processor']}, {run['time'][:10]}; KL per token "
        "over the answer that `full` gives):",
        "",
        "| policy | rows computed | time to first token | ÷ full | first token is full's | KL |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in run["rows"]:
        of = row["of"]
        cells = [row["name"], _percent(of["rows"]), f"{row['value']:.0f} ms", f"{of['÷ full']:.2f}"]
        cells += [_percent(of["first token"]), f"{of['KL']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

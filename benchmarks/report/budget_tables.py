"""Policies by budgets of whole heads, a table a task: how `results` shows `heads_quality`."""

from __future__ import annotations

from typing import Any

NO_MAP = "no map"


def budget_tables(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown for rows named "model, task…: policy @ share %", or without a share.

    A cell is KL to full, share of right first tokens and of full's ten likeliest tokens kept, and
    recall where a task has answers. Intervals stay in the record.
    """
    jobs: dict[str, dict[str, dict[str, str]]] = {}
    samples = {}
    budgets = [NO_MAP]
    for row in rows:
        job, _, name = row["name"].rpartition(": ")
        policy, _, share = name.partition(" @ ")
        share = f"{share} whole" if share else NO_MAP
        jobs.setdefault(job, {}).setdefault(policy, {})[share] = _cell(row)
        samples[job] = row["of"]["n"]
        budgets += [share] if share not in budgets else []
    lines = [
        "A cell: KL to `full` without a map, nats a token · first tokens that are full's · of",
        "full's ten likeliest first tokens · recall, where there are answers. The record has 95 %",
        "intervals and FLOPs.",
    ]
    for job, policies in jobs.items():
        lines += ["", f"### {job}, {samples[job]} samples", ""]
        lines += ["| policy | " + " | ".join(budgets) + " |", "|---|" + "---|" * len(budgets)]
        for policy, cells in policies.items():
            lines.append("| " + " | ".join([policy, *(cells.get(b, "") for b in budgets)]) + " |")
    return lines


def _cell(row: dict[str, Any]) -> str:
    of = row["of"]
    parts = [f"{row['value']:.3f}", f"{of['1st']:.0%}", f"{of['top-10']:.0%}"]
    if "recall" in of:
        parts.append(f"{of['recall']:.2f}")
    return " · ".join(parts)

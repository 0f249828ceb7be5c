"""What is reused of a prompt whose pages are packed, as a plan."""

from __future__ import annotations

import json
from typing import Any

from kvweave.cache import ReusePlan


def plan_beside_packed(plan: ReusePlan, reused: int) -> ReusePlan:
    """The plan of exact pages with what was found packed behind them: so many leading tokens."""
    if reused == plan.reused_prefix:
        return plan
    known: dict[str, Any] = json.loads(plan.to_json())
    spans: list[dict[str, Any]] = [{"start": 0, "end": reused, "kind": "prefix"}]
    spans += [{**span, "start": max(span["start"], reused)} for span in known["spans"]]
    kept = [span for span in spans if span["start"] < span["end"]]
    return ReusePlan.from_json(json.dumps({**known, "spans": kept}))

"""What the dashboard for Grafana asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "vllm-dashboard.json").read_text())
SUM = re.compile(r"sum(?: by \(([^)]*)\) )?\((?:rate\()?([\w:]+)\{")
OF_POOL = (
    "kvweave_kv_bytes",
    "kvweave_stalls_total",
    "kvweave_given_back_bytes_total",
    "kvweave_spilled_bytes_total",
)
"""What head classes and virtual pages have, and segments have not."""
OF_TIER = "vllm:kv_offload_kvweave_"
"""How names begin that vLLM's tiered offloading has, where our store is a tier of it."""


def queried() -> dict[str, set[str]]:
    """The metrics of all queries, and by which labels they are told apart or chosen."""
    found: dict[str, set[str]] = {}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            sums = SUM.findall(target["expr"])
            # Every metric is in some sum.
            assert len(sums) == target["expr"].count("{"), target["expr"]
            for labels, name in sums:
                found.setdefault(name, {"model_name"}).update(labels.split(", ") if labels else ())
    return found


def part_of(name: str) -> str:
    """Which part of the plugin has a metric: `pool`, `tier`, or `segments` with vLLM's own."""
    if name in OF_POOL:
        return "pool"
    return "tier" if name.startswith(OF_TIER) else "segments"


def missing(samples: Iterable[Any], part: str) -> dict[str, set[str]]:
    """Metrics of the dashboard that lack labels, of which each has one, in these samples."""
    there: dict[str, set[str]] = {}
    for sample in samples:
        there.setdefault(sample.name, set()).update(sample.labels)
    return {
        name: lacks
        for name, labels in queried().items()
        if part_of(name) == part and (lacks := labels - there.get(name, set()))
    }

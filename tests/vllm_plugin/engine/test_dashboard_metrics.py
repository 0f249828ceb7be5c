"""Every metric that the plugin has, as its own code makes them, is on the dashboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from kvweave.adapters.vllm.metrics.named import NamedMetrics
from kvweave.adapters.vllm.metrics.pool import PoolMetrics
from kvweave.adapters.vllm.metrics.segments import SegmentMetrics
from kvweave.adapters.vllm.store_tier.metrics import metric_definitions
from vllm_dashboard import DOCS, OF_TIER, part_of, queried

LABELS = ["model_name", "engine"]


class Noted:
    """A kind of metric that nothing is registered of: its name as `/metrics` has it, and labels."""

    made: dict[str, set[str]]

    def __init__(self, name: str, labelnames: list[str], **_: Any) -> None:
        self.made[name + self.suffix] = set(labelnames) - {"engine"}

    suffix = ""

    def labels(self, *values: object) -> Noted:
        return self

    def inc(self, by: float) -> None:
        pass


def noted(metrics: type[NamedMetrics]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    gauge = type("NotedGauge", (Noted,), {"made": found})
    counter = type("NotedCounter", (Noted,), {"made": found, "suffix": "_total"})
    kinds: dict[Any, Any] = {Gauge: gauge, Counter: counter, Histogram: None}
    metrics(SimpleNamespace(kv_transfer_config=None), kinds, LABELS, {0: ["m", "0"]})
    return found


def of_tier() -> Iterator[tuple[str, set[str]]]:
    for name, known in metric_definitions().items():
        counts = isinstance(known, OffloadingCounterMetadata)
        yield name + ("_total" if counts else ""), {"model_name", *known.labelnames}


@pytest.mark.parametrize("part", ["segments", "pool", "tier"])
def test_every_metric_of_ours_is_in_some_panel(part: str) -> None:
    """With labels that it has, and on the page that says what it means."""
    kinds = {"segments": SegmentMetrics, "pool": PoolMetrics}
    has = dict(of_tier()) if part == "tier" else noted(kinds[part])
    assert has
    ours = ("kvweave_", OF_TIER)
    asked = {name: labels for name, labels in queried().items() if name.startswith(ours)}
    assert {name for name in asked if part_of(name) == part} == set(has)
    page = (DOCS / "vllm.md").read_text(encoding="utf-8")
    for name, labels in has.items():
        assert asked[name] <= labels, name
        assert re.search(rf"`{re.escape(name)}[`{{]", page), name

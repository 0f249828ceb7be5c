"""Reports of workers as metrics of vLLM's own registry."""

from __future__ import annotations

from collections import Counter as Counts
from dataclasses import fields
from types import SimpleNamespace

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from kvweave.adapters.vllm.metrics.segments import BY_LABEL, COUNTS, STORE, SegmentMetrics
from kvweave.adapters.vllm.segments.stats import SegmentStats

TYPES = {kind: kind for kind in (Counter, Gauge, Histogram)}
ENGINE = {"model_name": "m", "engine": "0"}


def made() -> SegmentMetrics:
    config = SimpleNamespace(kv_transfer_config=None)
    return SegmentMetrics(config, TYPES, list(ENGINE), {0: ["m", "0"], 1: ["m", "1"]})


def shown(name: str, **labels: str) -> float | None:
    found = prometheus_client.REGISTRY.get_sample_value(f"kvweave_{name}", {**ENGINE, **labels})
    return None if found is None else float(found)


def test_every_count_of_a_report_is_shown() -> None:
    known = {field.name for field in fields(SegmentStats)} - {STORE[0], "outcomes", "documents"}
    listed = [field for field, *_ in (*COUNTS.values(), *BY_LABEL.values())]
    assert sorted(listed) == sorted(known)


def test_reports_add_up() -> None:
    metrics = made()
    assert shown("reused_tokens_total") == 0
    report = SegmentStats(reused_tokens=7, hits=Counts(frozen=5), misses=Counts(fresh=2))
    metrics.observe(report.to_dict())
    metrics.observe({**report.to_dict(), "store_bytes": {"free": -64, "held": 64}})
    metrics.observe({**report.to_dict(), "store_bytes": {"held": -16}}, 1)
    assert shown("reused_tokens_total") == 14
    assert shown("reused_tokens_total", engine="1") == 7
    assert shown("hit_tokens_total", kind="frozen") == 10
    assert shown("missed_tokens_total", reason="fresh") == 4
    assert shown("store_bytes", tier="device", state="held") == 64
    assert shown("store_bytes", tier="device", state="held", engine="1") == -16


def test_another_engine_of_the_process_starts_anew() -> None:
    made().observe(SegmentStats(rows=3).to_dict())
    made()
    assert shown("rows_total") == 0

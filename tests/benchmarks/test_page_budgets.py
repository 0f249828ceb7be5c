"""The sweep of budgets: what it measures, and its tables."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import page_budgets
from benchmarks.quality.page_budgets import (
    Way,
    by_period,
    by_share,
    in_bounds,
    more_than,
    over_host,
    ways_of,
)
from kvweave.lab.profile import DecodeEffect, Stability
from kvweave.lab.profile.stability import TaskStability

OVERLAP = np.array([[0.1, 0.4], [0.6, 0.9]])
TASK = TaskStability("text", OVERLAP[..., None], OVERLAP[None])
STABILITY = Stability("m", 8, 40, (TASK,), {})
"""A head in four is unstable, the first; of two in four the second is the other."""


def classes_of(way: Way) -> list[dict[str, Any]]:
    made = json.loads(way.heads(STABILITY, steps=40).to_json())
    return [entry["class"] for entry in made["heads"]]


def test_each_way_is_one_thing_otherwise() -> None:
    ways = ways_of(8)
    assert len(set(ways)) == len(ways)
    assert {way.pages for way in ways} == {8}
    maps = [json.dumps(classes_of(way)) for way in ways]
    assert len(set(maps)) == len(maps)
    every_one = ways_of(8, every_one=True)
    assert len(set(every_one)) == 3 * 4 * 2 * 2
    assert set(ways) <= set(every_one)
    # Over host memory the map is the same, and what comes from there is exact, fp8 or late.
    over = over_host(8, ["exact", "fp8"])
    settings = [way.runner_settings() for way in over]
    assert all(asked.pop("host_bytes") > 0 for asked in settings)
    exact = {"host_arrivals": "exact", "host_free_share": 1.0}
    assert settings == [exact, {**exact, "host_dtype": "fp8"}]
    assert {json.dumps(classes_of(way)) for way in over} == {maps[0]}
    assert ways[0].runner_settings() == {}
    late = over_host(8, ["exact", "late"])
    assert [way.estimate for way in late] == [False, False, True, True]
    assert [way.runner_settings().get("host_arrivals") for way in late] == 2 * ["exact", "late"]


@pytest.mark.parametrize(
    ("way", "unstable", "stable"),
    [
        (Way(8), {"kind": "full"}, {"rerank_every": 16}),
        (Way(8, "ranked"), {"rerank_every": 1}, {"rerank_every": 16}),
        (Way(8, "as stable"), {"rerank_every": 16}, {"rerank_every": 16}),
        (Way(8, every=None), {"kind": "full"}, {"rerank_every": 41}),
        (
            Way(8, "ranked", 64, "mean", True),
            {"rerank_every": 1, "score": "mean", "estimate": True},
            {"rerank_every": 64, "score": "mean", "estimate": True},
        ),
    ],
)
def test_maps_are_as_a_way_says(way: Way, unstable: Any, stable: Any) -> None:
    first, *others = classes_of(way)
    chooses = {"kind": "top_k", "pages": 8}
    assert first == (unstable if "kind" in unstable else {**chooses, **unstable})
    assert others == [{**chooses, **stable}] * 3


def test_the_share_of_unstable_heads_is_swept() -> None:
    ways = by_share(8, [0.0, 0.25, 0.5, 1.0])
    assert ways[0] == Way(8)
    assert len(ways) == len(set(ways)) == 1 + 1 + 1 + 2 + 2
    whole = {
        way.share: [c["kind"] for c in classes_of(way)] for way in ways if way.unstable == "full"
    }
    top, full = "top_k", "full"
    assert whole == {
        0.25: [full, top, top, top],
        0.0: [top] * 4,
        0.5: [full, full, top, top],
        1.0: [full] * 4,
    }
    ranked = next(way for way in ways if way.unstable == "ranked" and way.share == 0.5)
    assert [c["rerank_every"] for c in classes_of(ranked)] == [1, 1, 16, 16]


def test_periods_are_measured_by_each_score() -> None:
    asked = [(way.every, way.score) for way in by_period(8, [16, 4, 1, 4])]
    assert asked == [(every, score) for every in (16, 4, 1) for score in ("min-max", "mean")]


def test_bounds_in_fp8_stand_beside_those_that_keys_are() -> None:
    ways = in_bounds(8, ["fp8"])
    assert [(way.score, way.bounds) for way in ways] == [
        ("min-max", ""),
        ("min-max", "fp8"),
        ("mean", ""),
        ("mean", "fp8"),
    ]
    assert [way.runner_settings() for way in ways[:2]] == [{}, {"bounds_dtype": "fp8"}]
    assert classes_of(ways[0]) == classes_of(ways[1])


def test_pages_begun_since_a_ranking_are_counted() -> None:
    assert Way(8, every=1).read(64, 16) == 8
    assert Way(8, every=16).read(64, 16) == 8
    assert Way(8, every=32).read(64, 16) == 8.5
    assert Way(8, every=None).read(64, 16) == 8 + (0 + 1 + 2 + 3) / 4


def test_ways_are_compared_in_pairs_of_answers() -> None:
    def effect(*kl: float) -> DecodeEffect:
        return DecodeEffect(8, float(np.mean(kl)), max(kl), 1.0, kl)

    more = more_than(effect(0.3, 0.5, 0.8), effect(0.2, 0.4, 0.7))
    assert more.value == pytest.approx(0.1)
    assert (more.low, more.high) == (pytest.approx(0.1), pytest.approx(0.1))


def test_unstable_heads_that_texts_share_are_a_table() -> None:
    class Measured:
        def to_dict(self) -> dict[str, Any]:
            shared = [[1.0, 0.5], [0.5, 1.0]]
            return {"tasks": ["a", "b"], "shared_by_tasks": shared, "shared_by_chance": 0.25}

    lines = list(page_budgets.shared_heads(Measured()))  # type: ignore[arg-type]
    assert lines[2:] == ["| a | 1.00 | 0.50 |", "| b | 0.50 | 1.00 |", "By chance: 0.25."]

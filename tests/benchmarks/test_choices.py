"""The benchmark of choices between loading and computing, on made times and a tiny model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.cases.choices import Asked, Choices, Documents, rows_of
from families import tiny


def test_a_choice_is_right_where_its_way_is_faster() -> None:
    loaded, computed = {64: 3.0, 128: 4.0, 256: 5.0}, {64: 1.0, 128: 4.5, 256: 9.0}
    chosen = [(64, "computed"), (128, "remote"), (256, "remote"), (256, "computed")]
    found = Choices(chosen, loaded, computed)
    assert found.right == [True, True, True, False]
    # What lies within 5 % of the faster way is not told apart.
    assert Choices(chosen, {**loaded, 128: 4.4}, computed).apart == [True, True, False]
    assert found.lost == pytest.approx((1 + 4 + 5 + 9) / (1 + 4 + 5 + 5) - 1)
    assert found.crossover == 128
    assert Choices(chosen, computed, loaded).crossover is None
    assert Choices([], {64: 1.0}, {64: 2.0}).crossover == 64


def test_both_ways_of_a_length_take_the_medians_of_its_documents() -> None:
    asked = [Asked(64, "remote", {"remote": s, "computed": 4.0 - s}) for s in (1.0, 1.5, 3.0)]
    asked.append(Asked(128, "computed", {"remote": 9.0, "computed": 8.0}))
    found = Choices.of(asked)
    assert (found.loaded, found.computed) == ({64: 1.5, 128: 9.0}, {64: 2.5, 128: 8.0})
    assert found.right == [True] * 4
    assert found.lost == 0


def test_documents_come_no_faster_than_the_store_is(tmp_path: Path) -> None:
    documents = Documents(tiny("llama"), tmp_path, (64, 96), 3)
    try:
        documents.store.bytes_per_s = 96 * documents.runner.cache.shape.token_bytes / 0.3
        text, tiers = documents.texts[96][0], documents.runner.tiers
        assert tiers is not None
        before, known = tiers.measured, tiers.measured.speeds
        begun = time.perf_counter()
        took = documents.ask_for(text, "remote")
        assert 0.3 <= took <= time.perf_counter() - begun
        assert documents.ask_for(text, "computed") > 0
        # Whoever asks so has the runner learn nothing.
        assert tiers.measured is before
        assert tiers.measured.speeds == known
        rows = rows_of(documents, 1, (0.01, 100.0), middle=96)
        assert [row.name.split(": ")[1] for row in rows] == ["the faster way"] * 3
        assert rows[-1].of["choices"] == 8
        assert 0 <= rows[-1].value <= 1
        assert 0 <= rows[-1].of["from"] <= rows[-1].of["apart"] <= rows[-1].of["to"] <= 1
    finally:
        documents.runner.close()

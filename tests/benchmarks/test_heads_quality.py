"""Measuring under head maps: maps at a budget, what is measured, its rows and its picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvweave
from benchmarks.cases import ttft_heads
from benchmarks.quality import heads as bench
from families import tiny
from kvweave.lab.drawing.budget_figure import Point, save_budget
from kvweave.lab.eval import Measurement, task_of
from kvweave.runner.model.model_spec import describe


def kinds(heads):
    return [entry["class"]["kind"] for entry in json.loads(heads.to_json())["heads"]]


def test_jobs_are_tasks_that_exist_and_differ():
    for job in bench.JOBS:
        task_of(job.task, job.length, job.corpus)
    assert len({job.name for job in bench.JOBS}) == len(bench.JOBS)


class Measurer:
    """Stands for a sample under a map: names what it is asked to measure."""

    def policy(self, policy, role, name):
        assert role == "policy"
        return policy.name, name


def test_every_policy_is_measured_under_a_budget():
    asked = list(bench.under(Measurer(), 0.25))
    assert [name for _, name in asked] == [f"{name} @ 25 %" for name in bench.UNDER_MAP]
    # With all heads whole, the others are what they are without a map.
    whole = [name for _, name in bench.under(Measurer(), 1.0)]
    assert whole == ["redknot @ 100 %", "weave @ 100 %"]


def measured(sample, policy, kl, role="policy", answer=""):
    return Measurement(
        sample, policy, role, 100, 0, 90, 10, 0.1, 1.0, 50, 2, 10, 0, 0.5, (kl, 3 * kl), 1.0, True,
        0.8, answer, "materialise", "", True, 0, 0, 0, None,
    )  # fmt: skip


def found(answer=""):
    kls = {"naive": 0.1, "full @ 25 %": 0.03, "redknot @ 25 %": 0.04, "redknot @ 100 %": 0.0}
    for sample in range(6):
        yield replace(measured(sample, "full", 0.0, "full", answer), flops=100)
        for policy, kl in kls.items():
            yield measured(sample, policy, kl * (1 + sample / 10), answer=answer)


def test_rows_say_how_sure_they_are():
    job = bench.JOBS[0]
    rows = {row.name.split(": ")[1]: row for row in bench.rows_of(job, "m", list(found()))}
    assert list(rows) == ["full", "naive", "full @ 25 %", "redknot @ 25 %", "redknot @ 100 %"]
    row = rows["redknot @ 25 %"]
    assert row.value == pytest.approx(2 * 0.04 * 1.25)
    low, high = row.of["95 %"]
    assert low < row.value < high
    assert (row.of["FLOPs ÷ full"], row.of["n"], row.of["top-10"]) == (0.5, 6, pytest.approx(0.8))
    low, high = row.of["KL − full's under the map, 95 %"]
    assert low < 2 * 0.01 * 1.25 < high
    assert [name for name, row in rows.items() if len(row.of) == 8] == ["redknot @ 25 %"]
    assert "recall" not in row.of
    answered = bench.rows_of(job, "m", list(found("42")))
    assert all(row.of["recall"] == 0.5 for row in answered)


def test_curves_are_drawn(tmp_path: Path):
    path = tmp_path / "curves.png"
    bench.draw_curves(path, bench.JOBS[0], "m", list(found()))
    assert path.stat().st_size > 10_000
    once = path.read_bytes()
    bench.draw_curves(path, bench.JOBS[0], "m", list(found()))
    assert path.read_bytes() == once
    nan = float("nan")
    save_budget(tmp_path / "one.svg", "t", "u", {"a": [Point(0.5, 0.0, nan, nan)]}, {})
    with pytest.raises(kvweave.InvalidArgument, match="expected at least one curve, got none"):
        save_budget(path, "t", "u", {"a": []}, {})


def test_an_eighth_of_the_heads_is_whole_at_eight_a_layer():
    spec = replace(describe(tiny("llama", num_hidden_layers=16)), kv_heads=8)
    made = kinds(ttft_heads.one_head_a_layer(spec))
    assert made.count("full") == len(made) // 8
    by_layer = np.asarray(made).reshape(16, 8)
    assert (by_layer == "full").sum(1).tolist() == [1] * 16


def test_schedules_are_the_authors_counts_of_layers():
    for layers in (8, 32, 64):
        made = ttft_heads.under_map(layers)
        dense = [made[f"redknot, {name}"].dense_layers(layers) for name in ("balanced", "speed")]
        assert dense == [min(20, layers), 3]

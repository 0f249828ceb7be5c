"""Cases that measure whole runners, on models of two layers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.cases import (
    packed_capacity,
    packed_kinds,
    packed_prefill,
    packed_prefill_final,
    packed_rows,
    packed_step,
    packed_worker,
    packed_worker_final,
    workflow,
    zeroing,
)
from benchmarks.device.models import random_model
from families import tiny
from kvweave.runner import Packing
from kvweave.runner.tiers import final_packing


def test_agents_in_a_ring_find_what_a_workflow_keeps() -> None:
    ring = workflow.Ring(agents=4, text=64, task=8, answer=2, rounds=3)
    found = {}
    for eviction, told in (("lru", False), ("cost-aware", True)):
        times, found[told] = workflow.stepped(tiny("llama"), ring, 0.5, eviction, told)
        assert len(times) == 8
    assert found[False] == 0.0 < found[True]


def test_steps_over_packed_pages_are_timed() -> None:
    load = packed_step.Load("tiny", 2, 2, 256)
    rows = [packed_step.stepped(tiny("llama"), load, kind, 70) for kind in (None, "int4")]
    assert all(row.value > 0 for row in rows)
    assert rows[1].of["KV GB"] < rows[0].of["KV GB"]


@pytest.mark.long
def test_steps_are_timed_over_packed_pages_of_every_kind() -> None:
    (load,) = packed_kinds.ON_CPU
    rows = packed_kinds.stepped(random_model(load.model, "cpu", layers=load.layers), load)
    assert [row.name for row in rows] == [f"{load.title}: {k.name}" for k in packed_kinds.KINDS]
    assert all(row.value > 0 for row in rows)
    held = {kind.name: row.of["KV GB"] for kind, row in zip(packed_kinds.KINDS, rows, strict=True)}
    exact, packed, shared = held["exact"], held["INT4"], held["INT4, a document that all share"]
    chosen, basis = held["INT4, a tenth chosen every 16 steps"], held["half-int4"]
    own, mixed = (
        held["half-int4, segments in bases of their own"],
        held["segments in three formats"],
    )
    # One document in the place of two, and pages of a half, or in part of a half and a quarter.
    assert shared < packed == chosen < exact
    assert basis == own < packed
    assert mixed < packed


def test_prompts_are_packed_beside_and_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_prefill, "PREFILLS", 1)
    ways = [Packing("half-int4", beside=beside) for beside in (True, False)]
    rows = packed_prefill.prefilled(("tiny Llama", 2, 600), "cpu", ways)
    exact, beside, behind = (row.name.split(": ")[1] for row in rows)
    assert (exact, beside, behind) == ("exact", "half-int4", "half-int4, behind")
    assert all(row.value > 0 for row in rows)
    assert rows[0].of["÷ exact"] == 1.0


def test_prompts_are_packed_finally_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_prefill_final, "PREFILLS", 1)
    load = packed_prefill_final.QUICK
    rows = packed_prefill_final.prefilled(load, "cpu")
    whats = [row.name.removeprefix(f"{load.title}: ") for row in rows]
    assert whats[:2] == ["exact", "int4, behind"]
    assert whats[2:] == [
        f"int4, by a strategy in segments of {load.segment}",
        f"half-int4, in segments of {load.segment}",
        f"planes-3, in segments of {load.planes}",
    ]
    assert rows[0].of == {"÷ exact": 1.0}
    assert all(row.value > 0 and row.of["final s"] > 0 for row in rows[2:])
    # Of its two KV heads one stays in INT4.
    assert [row.of["formats"] for row in rows[2:]] == [2, 1, 1]


def test_steps_are_timed_while_a_document_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = final_packing.Made

    def late(*given: Any) -> Any:
        time.sleep(1)
        return made(*given)

    monkeypatch.setattr(final_packing, "Made", late)
    quiet, beside = packed_worker.run(quick=True)
    assert quiet.value > 0
    assert beside.of["÷ quiet"] == beside.value / quiet.value


def test_steps_are_timed_while_texts_come_to_lie_in_several_formats() -> None:
    rows = packed_worker_final.run(quick=True)
    whats = [row.name.split(", ", 3)[3] for row in rows]
    document, segments = "a document, by a strategy", "segments, by a strategy"
    assert whats[0] == "in quiet"
    assert f"{document}: switched" in whats
    assert whats[-2:] == [f"{segments}: switched", f"{segments}: 2 of 2 lie so"]
    assert all(row.of["÷ quiet"] == row.value / rows[0].value for row in rows)
    assert [row.of["formats"] for row in rows[-2:]] == [2, 2]


@pytest.mark.long
def test_steps_of_all_layers_are_timed_beside_a_document() -> None:
    rows = packed_worker_final.whole(quick=True)
    whats = [row.name.split(", ", 3)[3] for row in rows]
    assert whats[0] == "in quiet"
    assert whats[-1] == "a document, by a strategy: switched"
    assert rows[-1].of["formats"] == 2
    assert all(row.of["÷ quiet"] == row.value / rows[0].value for row in rows)


@pytest.mark.long
def test_more_fits_where_pages_are_packed() -> None:
    rows = {row.name.split(", ")[1]: row for row in packed_capacity.run(quick=True)}
    exact, packed = rows["one request: exact"], rows["one request: int4"]
    # 16 MB of 2048 bytes a token, but for the null block and room for the answer, in whole pages.
    assert exact.value == (8192 - 16 - 2) // 64 * 64
    assert 1.5 < packed.of["÷ exact"] < 3.7
    assert rows["requests of 512: exact"].value == (512 - 1) // (512 // 16 + 1)
    assert all(row.of["KV GB"] <= (16 << 20) / 1e9 for row in rows.values())


@pytest.mark.long
def test_rows_are_timed_over_pages_as_they_lie_and_over_a_copy() -> None:
    rows = packed_rows.compared(random_model("small Llama", "cpu", layers=1), 512, (2,), rounds=1)
    assert [row.name.split(",")[0] for row in rows] == list(packed_rows.FORMATS)
    assert all(row.value > 0 and row.of["copied"] > 0 for row in rows)


def test_zeroing_is_timed_beside_the_same_answers() -> None:
    runners = {zeroes: zeroing._runner(tiny("llama"), 64, zeroes) for zeroes in (False, True)}
    for answer in (zeroing._computed, zeroing._brought):
        assert zeroing._row("tiny", runners, 64, answer, 2).value > 0
    filled = zeroing._filling("tiny", runners[True], 64, 2)
    assert filled.of["GB/s"] > 0
    for runner in runners.values():
        runner.close()

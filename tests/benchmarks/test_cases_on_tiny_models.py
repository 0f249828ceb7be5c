"""Cases that measure whole runners, on models of two layers."""

from __future__ import annotations

from benchmarks.cases import packed_step, workflow, zeroing
from families import tiny


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


def test_zeroing_is_timed_beside_the_same_answers() -> None:
    runners = {zeroes: zeroing._runner(tiny("llama"), 64, zeroes) for zeroes in (False, True)}
    for answer in (zeroing._computed, zeroing._brought):
        assert zeroing._row("tiny", runners, 64, answer, 2).value > 0
    filled = zeroing._filling("tiny", runners[True], 64, 2)
    assert filled.of["GB/s"] > 0
    for runner in runners.values():
        runner.close()

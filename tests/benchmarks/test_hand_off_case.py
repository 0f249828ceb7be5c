"""The benchmark of handing prompts over runs, between two processes on a CPU."""

from __future__ import annotations

import pytest

from benchmarks.cases.hand_off import Problem, rows_of


@pytest.mark.long
@pytest.mark.parametrize("mapped", [False, True])
def test_a_prompt_is_handed_over_and_its_tokens_are_the_same(
    mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl_cu13", reason="the extra kvweave[nixl] is not installed")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    (row,) = rows_of(Problem("tiny Llama", "cpu", "cpu", 600), mapped, 1)
    steps = [row.of[name] for name in ("export s", "offer s", "take s", "resume s")]
    assert all(step > 0 for step in steps)
    assert row.value == pytest.approx(sum(steps))
    assert (row.of["÷ dense"] < 1) == mapped

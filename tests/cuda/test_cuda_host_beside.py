"""Pinned host memory on a GPU beside segments in place, drafts that are verified, and healing."""

from __future__ import annotations

from typing import Any

import pytest

from cached_prompts import knowledge
from families import random_tokens, tiny
from host_memory import both, host_runner, nothing_is_held, spills
from kvweave.runner import Healing, Runner, Sampling
from kvweave.runner.kv import host_arena
from ranked_pages import FULL, WINDOW, top_k
from versions import needs_cuda

pytestmark = needs_cuda

MIXED = [top_k(4, 5), FULL, top_k(6, 3), WINDOW, top_k(4, 16)]
WARM = Sampling(temperature=0.8, seed=3)
ASK: dict[str, Any] = {"max_new_tokens": 40, "stop": ()}


def captured(runner: Runner) -> bool:
    """Whether steps are replayed from graphs."""
    graphs = runner._decoder.graphs
    assert graphs is not None
    return graphs.capturable and any(size.graph is not None for size in graphs._sizes.values())


@pytest.mark.parametrize("dtype", [None, "fp8"])
@pytest.mark.parametrize("policy", ["naive", "sparsex", "foresight"])
def test_segments_in_place(policy: str, dtype: str | None) -> None:
    """With exact copies as on the device; with fp8 ones as where memory is not pinned."""
    model, settings = tiny("llama").cuda(), {"page_tokens": 8, "mode": "share"}
    kinds, answers = [top_k(5, 4), FULL, top_k(12, 7), WINDOW], []
    runners = list(both(model, kinds, host_dtype=dtype, **settings))
    if dtype is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_arena, "register", lambda *_given: False)
            runners[0] = host_runner(model, kinds, host_dtype=dtype, **settings)
    for runner in runners:
        parts = knowledge(runner, 3)
        said = [runner.generate(parts, policy, sampling=WARM, **ASK).tokens for _ in range(2)]
        answers.append(said)
        assert nothing_is_held(runner)
    assert answers[0] == answers[1]
    assert spills(runners[1]) >= 4
    assert captured(runners[1])


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("sampling", [None, WARM])
@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_drafted_answers_are_dense(mode: str, sampling: Any, is_pinned: bool) -> None:
    """In f32, where the rounding of two kernels turns no token of these texts."""
    model, settings = tiny("llama").cuda(), {"page_tokens": 16, "mode": mode}
    full = [FULL if kind["kind"] == "top_k" else kind for kind in MIXED]
    dense = host_runner(model, full, None, **settings)
    with pytest.MonkeyPatch.context() as patch:
        if not is_pinned:
            patch.setattr(host_arena, "register", lambda *_given: False)
        host = host_runner(model, MIXED, speculate=4, **settings)
    prompts = [random_tokens(length, length) for length in (1, 90, 130, 300)]
    ask = {**ASK, "sampling": sampling, "remember": False}
    parts = [knowledge(runner, 2) for runner in (dense, host)]
    wanted = dense.generate_batch([*prompts, parts[0]], "naive", **ask)
    made = host.generate_batch([*prompts, parts[1]], "naive", **ask)
    assert [one.tokens for one in made] == [one.tokens for one in wanted]
    assert spills(host) >= 6
    assert not is_pinned or captured(host)
    assert nothing_is_held(host)


@pytest.mark.parametrize("bound", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_answers_that_are_healed(mode: str, bound: float) -> None:
    healing = Healing(every=3, bound=bound, rise=1.0, share=0.2, most=0.6)
    found, settings = [], {"page_tokens": 8, "mode": mode}
    for runner in both(tiny("llama").cuda(), [top_k(5, 4), FULL, top_k(6, 7)], **settings):
        parts = knowledge(runner, 3)
        made = runner.generate(parts, "naive", healing=healing, sampling=WARM, **ASK)
        found.append((made.tokens, made.report.healing.healed, made.report.healing.recomputed))
        assert nothing_is_held(runner)
    assert found[0] == found[1]
    assert (found[0][1] > 0) == (bound == 0.0)
    assert spills(runner) > 1

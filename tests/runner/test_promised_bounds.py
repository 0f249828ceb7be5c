"""Engines take room for the bounds of a request's pages when they admit it, or have it wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from families import random_tokens, tiny
from host_memory import PAGE, host_runner, nothing_is_held
from kvweave import PoolFull
from kvweave.runner import Runner
from kvweave.runner.decode.kept_bounds import KeptBounds
from ranked_pages import FULL, top_k

KINDS = [top_k(4, 4), FULL]
ASK: dict[str, Any] = {"max_new_tokens": 24, "stop": (), "remember": False}
LENGTH = 120


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def kept(runner: Runner) -> list[KeptBounds]:
    """The bounds of all heads that choose, of whoever decodes."""
    return [group.bounds for slots in runner._decoder._slots for group in slots.chosen.groups]


def promises(runner: Runner) -> int:
    """Requests that have room for bounds by now."""
    return sum(len(slots.chosen._promises) for slots in runner._decoder._slots)


def with_memory_for(places: int, patch: pytest.MonkeyPatch) -> None:
    """Devices have memory for so many bounds of a group, and no more."""
    zeros = KeptBounds._zeros

    def some(self: KeptBounds, wanted: int) -> Any:
        if wanted > places:
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory for {wanted}")
        return zeros(self, wanted)

    patch.setattr(KeptBounds, "_zeros", some)


@pytest.mark.parametrize("host", [None, 1 << 24])
def test_whose_bounds_find_no_memory_waits_until_another_has_ended(
    llama: Any, host: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for those of one and a half: all are answered, one after the other."""
    prompts = [random_tokens(LENGTH, seed) for seed in range(3)]
    resident = host_runner(llama, KINDS, None)
    wanted = [resident.generate(prompt, "full", **ASK).tokens for prompt in prompts]
    with_memory_for(pages_of(LENGTH + 24) * 3 // 2, monkeypatch)
    runner = host_runner(llama, KINDS, host)
    engine, most = runner.engine(chunk_tokens=32), 0
    asked = [engine.submit(prompt, "full", **ASK) for prompt in prompts]
    while engine.live:
        engine.must_step()
        most = max(most, engine.metrics()["decoding"])
    assert most == 1
    assert [request.result().tokens for request in asked] == wanted
    assert promises(runner) == 0
    assert nothing_is_held(runner)


def test_whose_bounds_never_fit_fails_alone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for others as long as there are any; what they say is what they would have said."""
    short, long = random_tokens(40, 1), random_tokens(200, 2)
    wanted = host_runner(llama, KINDS, None).generate(short, "full", **ASK).tokens
    with_memory_for(pages_of(64) * 2, monkeypatch)
    runner = host_runner(llama, KINDS, None)
    engine = runner.engine(chunk_tokens=32)
    first = engine.submit(short, "full", **ASK)
    never = engine.submit(long, "full", **ASK)
    engine.run()
    with pytest.raises(PoolFull, match="bounds: expected memory for those of 224 tokens"):
        never.result()
    assert first.result().tokens == wanted
    again = engine.submit(short, "full", **ASK)
    engine.run()
    assert again.result().tokens == wanted
    assert promises(runner) == 0
    assert nothing_is_held(runner)


def test_decoding_takes_no_memory_that_admission_has_not(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is said, bounds lie where they lay when the last request was admitted."""
    runner = host_runner(llama, KINDS)
    engine = runner.engine(chunk_tokens=64)
    asked = [engine.submit(random_tokens(LENGTH + 7 * s, s), "full", **ASK) for s in range(4)]
    while any(engine.state(request) in ("waiting", "prefilling") for request in asked):
        engine.must_step()
    room = [len(bounds.values) for bounds in kept(runner)]
    assert all(places >= sum(pages_of(LENGTH + 7 * s + 24) for s in range(4)) for places in room)

    def refused(_bounds: KeptBounds, wanted: int) -> Any:
        raise AssertionError(f"expected no more places, got {wanted}")

    monkeypatch.setattr(KeptBounds, "_zeros", refused)
    engine.run()
    assert all(len(request.result().tokens) == 24 for request in asked)


def test_room_comes_back_from_whoever_ends_in_whatever_state(llama: Any) -> None:
    """Cancelled while it waits, is prefilled, or decodes; and prompts that callers prefilled."""
    runner = host_runner(llama, KINDS)
    engine = runner.engine(token_budget=48, chunk_tokens=16, max_running=8)
    draws = np.random.default_rng(0)
    asked = [engine.submit(random_tokens(LENGTH, seed), "full", **ASK) for seed in range(6)]
    for request in asked:
        for _ in range(int(draws.integers(0, 12))):
            engine.step()
        engine.cancel(request)
    assert engine.live == 0
    assert promises(runner) == 0
    with runner.prefill(random_tokens(LENGTH, 7), "full") as done:
        request = engine.submit_prefilled(done, max_new_tokens=24, stop=())
        engine.step()
        assert promises(runner) == 1
        engine.run()
        assert len(request.result().tokens) == 24
        assert promises(runner) == 0
    assert nothing_is_held(runner)


def test_where_nobody_chooses_nothing_is_promised(llama: Any) -> None:
    runner = host_runner(llama, [FULL], None)
    assert runner._decoder.promise(1000) is None

"""Admission by working sets over host memory, and prompts that are computed in parts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import random_tokens, tiny
from host_memory import PAGE, held_at_home, host_runner, nothing_is_held
from kvweave import PoolFull, TransferFailed
from kvweave.policies import policy_of
from kvweave.runner import Runner
from kvweave.runner.kv import parted_kv
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.parted_kv import PartedKv
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.parted_job import PartedJob
from ranked_pages import FULL, WINDOW, top_k

CHOOSE = top_k(4, 4)
MIXED = [top_k(4, 5), FULL, top_k(6, 3), WINDOW, top_k(4)]
ASK: dict[str, Any] = {"max_new_tokens": 24, "stop": (), "remember": False}


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def ample(model: Any, kinds: list[Any], prompts: list[Any], **ask: Any) -> list[list[int]]:
    """Answers where the device has room for everything."""
    runner = host_runner(model, kinds, None, max_tokens=8192)
    return [runner.generate(prompt, "full", **{**ASK, **ask}).tokens for prompt in prompts]


def block_bytes(runner: Runner) -> int:
    return next(iter(runner.host.values())).block_bytes


def working_set(runner: Runner, part: int) -> int:
    """Pages of one head that a request has on the device at a time, at most."""
    (pool,) = runner.host.values()
    return pool.slots + max(part // PAGE + 1, -(-pool.budget.every // PAGE) + 2)


# ---- what is answered -----------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [[CHOOSE], MIXED, [top_k(5, 4, estimate=True), FULL]])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_prompt_in_parts_is_what_it_is_as_a_whole(
    name: str, kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the device has room for, where not all heads keep all; pages come in threes."""
    monkeypatch.setattr(parted_kv, "SCRATCH_PAGES", 3)
    model, tokens = tiny(name), random_tokens(230, 3)
    resident = host_runner(model, kinds, None)
    runner = host_runner(model, kinds, max_tokens=200)
    with resident.prefill(tokens, "full") as whole, runner.prefill(tokens, "full") as done:
        torch.testing.assert_close(done.logits, whole.logits, atol=2e-5, rtol=2e-5)
        assert done.kv.is_spilled
        assert (done.report.tokens, done.report.recomputed) == (230, 230)
    assert nothing_is_held(runner)
    wanted = resident.generate(tokens, "full", **ASK).tokens
    assert runner.generate(tokens, "full", **ASK).tokens == wanted
    assert nothing_is_held(runner)


@pytest.mark.parametrize("first", [1, 13, 31])
def test_a_first_part_that_is_cut_short_is_computed_before_windows_move_on(
    llama: Any, first: int
) -> None:
    """As where others take most of a step's tokens; 13 ends within a page."""
    tokens = random_tokens(230, 3)
    resident = host_runner(llama, MIXED, None)
    runner = host_runner(llama, MIXED, max_tokens=200)
    policy, prompt = policy_of("full"), runner.tokenize(tokens)
    job = PartedJob(runner._prefiller, prompt, policy, Lookup("", False, False), 32)
    for to in (first, first + 40, 200, 230):
        job.advance(to)
    with resident.prefill(tokens, "full") as whole, job.finish() as done:
        torch.testing.assert_close(done.logits, whole.logits, atol=2e-5, rtol=2e-5)
    assert nothing_is_held(runner)


def test_a_prompt_many_times_the_device_is_answered(llama: Any) -> None:
    tokens = random_tokens(480, 5)
    runner = host_runner(llama, [CHOOSE], max_tokens=100)
    assert [runner.generate(tokens, "full", **ASK).tokens] == ample(llama, [CHOOSE], [tokens])
    assert nothing_is_held(runner)


def test_what_is_found_of_it_is_its_first_part(llama: Any) -> None:
    tokens = random_tokens(300, 6)
    runner = host_runner(llama, [CHOOSE], max_tokens=100)
    ask = {**ASK, "remember": True}
    first = runner.generate(tokens, "prefix", **ask)
    again = runner.generate(tokens, "prefix", **ask)
    assert (first.report.reused_prefix, again.tokens) == (0, first.tokens)
    assert 0 < again.report.reused_prefix <= 100 // 4
    assert nothing_is_held(runner)


def test_more_is_appended_where_all_of_it_finds_room_again(llama: Any) -> None:
    """Half of the device is another's while the prompt comes, so that it comes in parts."""
    tokens, more = random_tokens(150, 7), random_tokens(9, 8)
    resident, runner = (
        host_runner(llama, [CHOOSE], None),
        host_runner(llama, [CHOOSE], max_tokens=220),
    )
    other = runner.prefill(random_tokens(100, 1), "full", remember=False)
    with resident.prefill(tokens, "full") as whole, runner.prefill(tokens, "full") as done:
        assert done.kv.is_spilled
        with pytest.raises(PoolFull):
            runner.extend(done, more)
        other.release()
        wanted, said = resident.extend(whole, more), runner.extend(done, more)
        torch.testing.assert_close(said, wanted, atol=2e-5, rtol=2e-5)
        assert not done.kv.is_spilled
    assert nothing_is_held(runner)


# ---- who is admitted ------------------------------------------------------------------------


def test_requests_of_which_one_would_fill_the_device_decode_at_once(llama: Any) -> None:
    """The device holds one such prompt; by working sets all six are there."""
    prompts = [random_tokens(400, seed) for seed in range(6)]
    wanted = ample(llama, [CHOOSE], prompts, max_new_tokens=60)
    runner = host_runner(llama, [CHOOSE], max_tokens=440)
    engine = runner.engine(token_budget=512, chunk_tokens=32)
    asked = [engine.submit(p, "full", **{**ASK, "max_new_tokens": 60}) for p in prompts]
    most = held = 0
    while engine.live:
        engine.must_step()
        runner.cache.check()
        most = max(most, engine.metrics()["decoding"])
        held = max(held, held_at_home(runner))
    assert most == 6
    assert held > 5 * 99
    assert engine.metrics()["preempted"] == 0
    assert [request.result().tokens for request in asked] == wanted
    assert nothing_is_held(runner)


def test_a_request_holds_its_working_set_and_no_more(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most is there when a part has been computed, just before its pages go home."""
    runner = host_runner(llama, [CHOOSE], max_tokens=200)
    engine, spill, most = runner.engine(chunk_tokens=32), PartedKv.spill, 0

    def held() -> int:
        return int(runner.cache.stats()["groups"][0]["held"])

    def seen(kv: PartedKv, computed: int) -> None:
        nonlocal most
        most = max(most, held())
        spill(kv, computed)

    monkeypatch.setattr(PartedKv, "spill", seen)
    request = engine.submit(random_tokens(450, 1), "full", **ASK)
    while engine.live:
        engine.must_step()
        most = max(most, held())
    assert len(request.result().tokens) == 24
    assert most == working_set(runner, 32)


def test_whose_working_set_never_fits_is_refused(llama: Any) -> None:
    """Of a head that keeps everything there is no home; nor of more than host memory has."""
    runner = host_runner(llama, [CHOOSE, FULL], max_tokens=200)
    with pytest.raises(PoolFull):
        runner.engine(chunk_tokens=32).submit(random_tokens(480, 1), "full", **ASK)
    size = block_bytes(host_runner(llama, [CHOOSE]))
    small = host_runner(llama, [CHOOSE], 60 * size, max_tokens=100)
    engine = small.engine(chunk_tokens=32)
    with pytest.raises(PoolFull, match="host's memory"):
        engine.submit(random_tokens(480, 1), "full", **ASK)
    other = engine.submit(random_tokens(150, 1), "full", **ASK)
    engine.run()
    assert len(other.result().tokens) == 24
    assert nothing_is_held(small)


def test_who_waits_for_host_memory_stops_nobody(llama: Any) -> None:
    """Room at home for one of two long prompts: a short one is answered meanwhile."""
    size = block_bytes(host_runner(llama, [CHOOSE]))
    runner = host_runner(llama, [CHOOSE], 90 * size, max_tokens=200)
    prompts = [random_tokens(300, 1), random_tokens(300, 2), random_tokens(20, 3)]
    wanted = ample(llama, [CHOOSE], prompts)
    engine = runner.engine(chunk_tokens=32)
    asked = [engine.submit(p, "full", **ASK) for p in prompts]
    while asked[0].outcome is None:
        engine.must_step()
        assert engine.state(asked[1]) == "waiting"
    assert asked[2].outcome == "finished"
    engine.run()
    assert engine.metrics()["preempted"] == 0
    assert [request.result().tokens for request in asked] == wanted
    assert nothing_is_held(runner)


# ---- whatever happens -----------------------------------------------------------------------


def test_pages_that_cannot_be_brought_fail_their_prompt_alone(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_tokens(300, 1), random_tokens(60, 2)]
    wanted = ample(llama, [CHOOSE], prompts)
    runner = host_runner(llama, [CHOOSE], max_tokens=200)
    contents = HostPool.contents

    def broken(pool: HostPool, *given: Any) -> torch.Tensor:
        if len(given) > 1:
            raise TransferFailed("host memory: expected pages, got none")
        return contents(pool, *given)

    engine = runner.engine(chunk_tokens=32)
    with monkeypatch.context() as patch:
        patch.setattr(HostPool, "contents", broken)
        asked = [engine.submit(p, "full", **ASK) for p in prompts]
        engine.run()
    assert [request.outcome for request in asked] == ["failed", "finished"]
    with pytest.raises(TransferFailed):
        asked[0].result()
    assert asked[1].result().tokens == wanted[1]
    assert nothing_is_held(runner)
    assert runner.generate(prompts[0], "full", **ASK).tokens == wanted[0]


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**20),
    blocks=st.sampled_from([60, 130, 1000]),
    copies=st.sampled_from(["spill", "mirror"]),
)
def test_whatever_happens_nothing_is_lost(seed: int, blocks: int, copies: str) -> None:
    """Prompts shorter and longer than the device come, are cancelled, give way and end."""
    model, draws = tiny("llama", num_hidden_layers=2), np.random.default_rng(seed)
    kinds = [top_k(4, int(draws.integers(2, 9)))]
    resident = host_runner(model, kinds, None)
    size = block_bytes(host_runner(model, kinds))
    runner = host_runner(model, kinds, size * blocks, max_tokens=180, host_copies=copies)
    engine = runner.engine(token_budget=80, chunk_tokens=24, max_running=6)
    asked = []
    for _ in range(250):
        if len(asked) < 8 and draws.random() < 0.3:
            prompt = random_tokens(int(draws.integers(1, 400)), int(draws.integers(0, 4)))
            most = int(draws.integers(1, 40))
            how = {"max_new_tokens": most, "stop": (), "reserve": draws.random() < 0.3}
            with suppress(PoolFull):
                asked.append((engine.submit(prompt, "prefix", **how), prompt, most))
        if asked and draws.random() < 0.02:
            engine.cancel(asked[int(draws.integers(len(asked)))][0])
        engine.step()
        runner.cache.check()
    engine.run()
    assert {request.outcome for request, *_ in asked} <= {"finished", "cancelled"}
    for request, prompt, most in asked:
        if request.outcome == "finished" and engine.metrics()["preempted"] == 0:
            wanted = resident.generate(prompt, "full", max_new_tokens=most, stop=())
            assert request.result().tokens == wanted.tokens
    assert nothing_is_held(runner)

"""Transfers over host memory that fail: once, twice, always, for one request or for all."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_batches import decoding
from families import random_tokens, tiny
from host_faults import ALWAYS, ASK, Faults, LateCopies, answered
from host_memory import both, host_runner, nothing_is_held, spills
from kvweave import InvalidArgument, PoolFull, TransferFailed
from kvweave.runner import Runner
from kvweave.runner.kv import host_pool
from kvweave.runner.kv.transfers import TRIES, Transfers
from ranked_pages import FULL, stepping_as_on_a_gpu, top_k

KINDS = [top_k(4, 4), FULL, top_k(5, 3)]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def counted(runner: Runner, name: str) -> int:
    return sum(int(pool.stats()[name]) for pool in runner.host.values())


# ---- one transfer ---------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_transfer_is_tried_again(times: int) -> None:
    transfers, tried = Transfers(), list[int]()

    def transfer() -> None:
        tried.append(1)
        if len(tried) <= times:
            raise OSError("not now")

    transfers.make("spill", transfer)
    assert len(tried) == times + 1
    assert (transfers.retried, transfers.failed) == (times, 0)


def test_a_transfer_that_always_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    transfers, tried = Transfers(), list[int]()

    def transfer() -> None:
        tried.append(1)
        raise RuntimeError("the bus is gone")

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(TransferFailed, match="spill: expected pages .*, got .*the bus is"):
                transfers.make("spill", transfer)
    assert len(tried) == 3 * TRIES
    assert (transfers.retried, transfers.failed) == (3 * (TRIES - 1), 3)
    assert [record.message.count("the bus is gone") for record in caplog.records] == [1]


@pytest.mark.parametrize("error", [InvalidArgument("wrong"), KeyboardInterrupt()])
def test_what_will_not_pass_is_not_tried_again(error: BaseException) -> None:
    transfers, tried = Transfers(), list[int]()

    def transfer() -> None:
        tried.append(1)
        raise error

    with pytest.raises(type(error)):
        transfers.make("spill", transfer)
    assert (len(tried), transfers.retried, transfers.failed) == (1, 0, 0)


# ---- in an engine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wanted(llama: Any) -> list[list[int]]:
    resident = host_runner(llama, KINDS, None)
    return [resident.generate(random_tokens(100 + n, n), "full", **ASK).tokens for n in range(3)]


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("whose", [None, 1])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("place", ["aside", "before a ranking", "at a ranking"])
def test_what_fails_and_then_passes_changes_no_token(
    llama: Any, wanted: Any, place: str, times: int, whose: int | None, as_on_a_gpu: bool
) -> None:
    runner, faults = host_runner(llama, KINDS), Faults(place, times)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    asked = answered(runner, faults, whose)
    assert [request.result().tokens for request in asked] == wanted
    assert faults.hit == counted(runner, "retried") == times
    assert counted(runner, "failed") == 0
    assert spills(runner) == 6
    assert nothing_is_held(runner)


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("whose", [None, 1])
@pytest.mark.parametrize("place", ["aside", "before a ranking"])
def test_pages_that_cannot_be_spilled_stay_on_the_device(
    llama: Any, wanted: Any, place: str, whose: int | None, copies: str
) -> None:
    """Nobody fails: what lies there is read there, and every ranking tries again."""
    runner, faults = host_runner(llama, KINDS, host_copies=copies), Faults(place, ALWAYS)
    asked = answered(runner, faults, whose)
    assert [request.result().tokens for request in asked] == wanted
    assert counted(runner, "failed") >= 2
    assert faults.hit == TRIES * counted(runner, "failed")
    assert nothing_is_held(runner)
    assert answered(runner, Faults(place, 0), None)[0].result().tokens == wanted[0]


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("whose", [None, 1])
def test_who_cannot_be_brought_what_it_chose_fails_alone(
    llama: Any, wanted: Any, whose: int | None, as_on_a_gpu: bool
) -> None:
    runner = host_runner(llama, KINDS)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    asked = answered(runner, Faults("at a ranking", ALWAYS), whose)
    for number, request in enumerate(asked):
        if whose in (None, number):
            assert request.outcome == "failed"
            with pytest.raises(TransferFailed, match="host memory: expected pages"):
                request.result()
        else:
            assert request.result().tokens == wanted[number]
    assert nothing_is_held(runner)
    again = answered(runner, Faults("at a ranking", 0), None)
    assert [request.result().tokens for request in again] == wanted


def test_a_call_that_is_wrong_ends_its_step_and_loses_nothing(llama: Any, wanted: Any) -> None:
    runner = host_runner(llama, KINDS)

    def failing(*_given: Any, **_named: Any) -> None:
        raise InvalidArgument("moves: expected others, got these")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_pool, "carry_pages", failing)
        asked = answered(runner, Faults("back", 0), None)
    assert {request.outcome for request in asked} == {"failed"}
    with pytest.raises(InvalidArgument, match="moves"):
        asked[0].result()
    assert nothing_is_held(runner)
    again = answered(runner, Faults("back", 0), None)
    assert [request.result().tokens for request in again] == wanted


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**20),
    often=st.sampled_from([0.02, 0.3, 0.8]),
    copies=st.sampled_from(["spill", "mirror"]),
    arrivals=st.sampled_from(["exact", "whole", "late"]),
)
def test_whatever_fails_who_finishes_says_what_it_says_without(
    seed: int, often: float, copies: str, arrivals: str
) -> None:
    """Any transfer fails by chance; some requests are cancelled, and room is short.

    What is late depends on when pages were spilled: then nothing is compared, and nothing lost.
    """
    model, draws = tiny("llama", num_hidden_layers=2), np.random.default_rng(seed)
    resident = host_runner(model, KINDS, None)
    how = {"host_copies": copies, "host_arrivals": arrivals}
    runner = host_runner(model, KINDS, 1 << 18, max_tokens=700, **how)
    engine = runner.engine(token_budget=80, chunk_tokens=48, max_running=4)
    carry = host_pool.carry_pages

    def failing(*given: Any, **named: Any) -> None:
        if draws.random() < often:
            raise RuntimeError("the bus is gone")
        carry(*given, **named)

    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_pool, "carry_pages", failing)
        for _ in range(150):
            if len(asked) < 6 and draws.random() < 0.3:
                prompt = random_tokens(int(draws.integers(1, 160)), len(asked))
                most = int(draws.integers(1, 40))
                with suppress(PoolFull):
                    ask = {**ASK, "max_new_tokens": most}
                    asked.append((engine.submit(prompt, "full", **ask), prompt, most))
            if asked and draws.random() < 0.03:
                engine.cancel(asked[int(draws.integers(len(asked)))][0])
            engine.step()
            runner.cache.check()
        engine.run()
    for request, prompt, most in asked:
        if request.outcome == "failed":
            with pytest.raises(TransferFailed):
                request.result()
        elif request.outcome == "finished" and arrivals != "exact":
            assert len(request.result().tokens) == most
        elif request.outcome == "finished" and engine.metrics()["preempted"] == 0:
            made = resident.generate(prompt, "full", **{**ASK, "max_new_tokens": most})
            assert request.result().tokens == made.tokens
    assert nothing_is_held(runner)


# ---- what needs all pages, and who comes back -------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
def test_a_transfer_back_that_passes_in_the_end(llama: Any, times: int) -> None:
    found, faults = [], Faults("back", times)
    for runner in both(llama, KINDS):
        with runner.prefill(random_tokens(100, 1), "full", remember=False) as done:
            runner.decode(done, max_new_tokens=9, stop=())
            with faults.at_work():
                found.append(runner.extend(done, [1, 2, 3]))
        assert nothing_is_held(runner)
    assert faults.hit == times
    assert torch.equal(*found)


def test_a_transfer_back_that_fails_releases_the_request(llama: Any) -> None:
    runner = host_runner(llama, KINDS)
    with runner.prefill(random_tokens(100, 1), "full", remember=False) as done:
        runner.decode(done, max_new_tokens=9, stop=())
        with Faults("back", ALWAYS).at_work(), pytest.raises(TransferFailed):
            runner.extend(done, [1, 2, 3])
        with pytest.raises(InvalidArgument, match="released"):
            runner.extend(done, [1, 2, 3])
    assert nothing_is_held(runner)


def test_a_callers_prompt_that_cannot_be_brought_its_pages_is_released(llama: Any) -> None:
    """What it has of its newest token is spoiled, and would be of every later one."""
    runner = host_runner(llama, KINDS)
    with runner.prefill(random_tokens(100, 1), "full", remember=False) as done:
        with Faults("at a ranking", ALWAYS).at_work(), pytest.raises(TransferFailed):
            runner.decode(done, max_new_tokens=20, stop=())
        assert done.request.released
        for call in (lambda: runner.extend(done, [1]), lambda: runner.decode(done), done.fork):
            with pytest.raises(InvalidArgument, match="released"):
                call()
    assert nothing_is_held(runner)


@pytest.mark.parametrize("as_stream", [False, True])
def test_calls_raise_it_and_a_conversation_is_as_before(llama: Any, as_stream: bool) -> None:
    runner, prompt = host_runner(llama, KINDS), random_tokens(100, 1)

    def ask() -> Any:
        if as_stream:
            return [token.token for token in runner.stream(prompt, "full", **ASK)]
        return runner.generate(prompt, "full", **ASK).tokens

    wanted = ask()
    with Faults("at a ranking", ALWAYS).at_work(), pytest.raises(TransferFailed):
        ask()
    assert nothing_is_held(runner)
    assert ask() == wanted
    said = []
    for faults in (Faults("at a ranking", 0), Faults("at a ranking", ALWAYS)):
        with runner.conversation("full", remember=False) as talk:
            talk.ask(prompt, max_new_tokens=3, stop=())
            before = talk.tokens
            with faults.at_work():
                if faults.left:
                    with pytest.raises(TransferFailed):
                        talk.ask(random_tokens(30, 2), max_new_tokens=20, stop=())
                    assert talk.tokens == before
            said.append(talk.ask(random_tokens(30, 2), max_new_tokens=20, stop=()).tokens)
        assert nothing_is_held(runner)
    assert said[0] == said[1]


def steps_with_who_comes_back(runner: Runner, faults: Faults) -> tuple[list[Any], dict[int, Any]]:
    """What a batch of three says, of which the second sits some steps out; and who failed.

    That is under faults of its own when it comes back.
    """
    done = [
        runner.prefill(random_tokens(90 + n, n), "full", remember=False, reserve_tokens=40)
        for n in range(3)
    ]
    batch = [decoding(runner, one, 40) for one in done]
    faults.of = lambda: list(batch[1].host.values())
    said, failed = [], dict[int, Any]()
    with torch.inference_mode():
        for turn in range(14):
            some = [batch[0], batch[2]] if 8 <= turn < 11 else [s for s in batch if s]
            if turn != 11:
                said.append(runner._decoder.step(some).tolist())
                continue
            with faults.at_work():
                said.append(runner._decoder.step(some, failed=failed).tolist())
            if failed:
                batch.pop(1)
    runner._decoder.forget()
    for one in done:
        one.release()
    return said, failed


@pytest.mark.parametrize("times", [1, 2, ALWAYS])
def test_who_comes_back_without_bounds_fails_alone(llama: Any, times: int) -> None:
    """The bounds of its pages were let go of, and are made of what lies at home."""
    resident, host = both(llama, KINDS)
    wanted, none = steps_with_who_comes_back(resident, Faults("bounds", 0))
    faults = Faults("bounds", times)
    said, failed = steps_with_who_comes_back(host, faults)
    assert faults.hit >= min(times, TRIES)
    assert not none
    assert nothing_is_held(host)
    if times < TRIES:
        assert (said, failed) == (wanted, {})
        return
    assert list(failed) == [1]
    assert isinstance(failed[1], TransferFailed)
    assert said[:11] == wanted[:11]
    assert said[11][1] == -1
    for one, other in zip(said[11:], wanted[11:], strict=True):
        assert (one[0], one[-1]) == (other[0], other[-1])


def test_a_step_that_nobody_hears_failures_of_raises_the_first(llama: Any) -> None:
    runner = host_runner(llama, KINDS)
    with runner.prefill(random_tokens(90, 1), "full", remember=False, reserve_tokens=9) as done:
        sequence = decoding(runner, done, 9)
        with torch.inference_mode():
            for _ in range(4):
                runner._decoder.step([sequence])
            with Faults("at a ranking", ALWAYS).at_work(), pytest.raises(TransferFailed):
                runner._decoder.step([sequence])
        runner._decoder.forget()
    assert nothing_is_held(runner)


# ---- who leaves in the middle of a transfer ---------------------------------------------------


@pytest.mark.parametrize("copies", ["spill", "mirror"])
def test_who_is_cancelled_while_its_pages_are_copied_spoils_nobodys(
    llama: Any, copies: str
) -> None:
    """Its blocks in host memory become others' while they are still being written."""
    kinds = [top_k(4, 4)]
    resident = host_runner(llama, kinds, None)
    size = next(iter(host_runner(llama, kinds).host.values())).block_bytes
    runner, late = host_runner(llama, kinds, 40 * size, host_copies=copies), LateCopies()
    wanted = resident.generate(random_tokens(110, 2), "full", **ASK).tokens
    engine = runner.engine()
    with late.at_work():
        first = engine.submit(random_tokens(120, 1), "full", **ASK)
        while not late.waiting:
            engine.must_step()
        engine.cancel(first)
        engine.step()
        (pool,) = runner.host.values()
        assert pool.stats()["held"] == 0
    # Its pages are still on their way. The second one is given the same blocks, and spills at once.
    second = engine.submit(random_tokens(110, 2), "full", **ASK)
    engine.run()
    assert first.outcome == "cancelled"
    assert late.made == 1
    assert second.result().tokens == wanted
    assert spills(runner) == 2
    assert nothing_is_held(runner)

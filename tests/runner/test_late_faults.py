"""Pages that are brought late: transfers that fail, and requests that end before they have come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from host_faults import ALWAYS, ASK, Faults, answered
from host_memory import host_runner, nothing_is_held, spills
from kvweave import TransferFailed
from kvweave.runner import Runner
from late_pages import LateArrivals
from ranked_pages import FULL, stepping_as_on_a_gpu, top_k

KINDS = [top_k(4, 4), FULL, top_k(5, 3)]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def late_runner(model: Any, *given: Any, **settings: Any) -> Runner:
    return host_runner(model, *given, host_arrivals="late", **settings)


@pytest.fixture(scope="module")
def wanted(llama: Any) -> list[list[int]]:
    runner = late_runner(llama, KINDS)
    return [runner.generate(random_tokens(100 + n, n), "full", **ASK).tokens for n in range(3)]


# ---- transfers that fail ----------------------------------------------------------------------


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("whose", [None, 1])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("place", ["late", "at a ranking"])
def test_what_fails_and_then_passes_changes_no_token(
    llama: Any, wanted: Any, place: str, times: int, whose: int | None, as_on_a_gpu: bool
) -> None:
    runner, faults = late_runner(llama, KINDS), Faults(place, times)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    asked = answered(runner, faults, whose)
    assert [request.result().tokens for request in asked] == wanted
    assert faults.hit == times
    assert nothing_is_held(runner)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("whose", [None, 1])
@pytest.mark.parametrize("place", ["late", "at a ranking"])
def test_who_cannot_be_brought_what_it_chose_fails_alone(
    llama: Any, wanted: Any, place: str, whose: int | None, as_on_a_gpu: bool
) -> None:
    runner = late_runner(llama, KINDS)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    asked = answered(runner, Faults(place, ALWAYS), whose)
    for number, request in enumerate(asked):
        if whose in (None, number):
            with pytest.raises(TransferFailed, match="host memory: expected pages"):
                request.result()
        else:
            assert request.result().tokens == wanted[number]
    assert nothing_is_held(runner)
    again = answered(runner, Faults(place, 0), None)
    assert [request.result().tokens for request in again] == wanted


@pytest.mark.parametrize("place", ["aside", "before a ranking"])
def test_pages_that_cannot_be_spilled_stay_and_are_read_there(llama: Any, place: str) -> None:
    """Nothing of them is ever on its way; what is spilled before others fail is no worse for it."""
    runner = late_runner(llama, KINDS)
    asked = answered(runner, Faults(place, ALWAYS), None)
    assert [len(request.result().tokens) for request in asked] == [20] * 3
    assert nothing_is_held(runner)


# ---- requests that end meanwhile --------------------------------------------------------------


def test_who_is_cancelled_while_pages_are_on_their_way_spoils_nobodys(llama: Any) -> None:
    """Its slots become others' blocks: not before what is being written there has come over."""
    kinds = [top_k(6, 4)]
    runner, late = late_runner(llama, kinds, max_tokens=160), LateArrivals()
    prompt = random_tokens(110, 2)
    with LateArrivals().at_work():
        alone = late_runner(llama, kinds).generate(prompt, "full", **ASK).tokens
    engine = runner.engine()
    with late.at_work():
        first = engine.submit(random_tokens(120, 1), "full", **ASK)
        while not late.waiting:
            engine.must_step()
        engine.cancel(first)
        engine.step()
        assert not late.waiting
        second = engine.submit(prompt, "full", **ASK)
        engine.run()
    assert first.outcome == "cancelled"
    assert second.result().tokens == alone
    assert spills(runner) == 2
    assert nothing_is_held(runner)


def given_way(runner: Runner) -> list[list[int]]:
    """Answers in little room, in which requests give way to others."""
    engine = runner.engine(token_budget=64, chunk_tokens=32, max_running=6)
    ask = {**ASK, "max_new_tokens": 60}
    asked = [engine.submit(random_tokens(40, seed), "full", **ask) for seed in range(6)]
    engine.run()
    assert engine.metrics()["preempted"] > 0
    return [request.result().tokens for request in asked]


def read_whole(runner: Runner) -> list[Any]:
    """A prompt that is decoded from, then extended and forked, which reads all of its pages."""
    said: list[Any] = []
    with runner.prefill(random_tokens(150, 2), "full", remember=False) as done:
        for length in (22, 23, 24, 25):
            ask = {"max_new_tokens": length, "stop": ()}
            said.append(runner.decode(done, **ask).tokens)
            assert done.kv.is_spilled
            said.append(runner.extend(done, random_tokens(7, 3).tolist()).tolist())
            with done.fork() as fork:
                said += [runner.decode(one, **ask).tokens for one in (fork, done)]
    return said


def turns(runner: Runner) -> list[Any]:
    """Turns of a conversation, each of which brings what was decoded back."""
    with runner.conversation("full") as talk:
        return [
            talk.ask(random_tokens(50 + turn, turn), max_new_tokens=21 + turn, stop=()).tokens
            for turn in range(4)
        ]


def joined(runner: Runner) -> list[list[int]]:
    """Answers in an engine of requests that join and end in turns; one is cancelled."""
    engine = runner.engine(token_budget=60, chunk_tokens=24, max_running=4)
    asked = [
        engine.submit(random_tokens(n, n), "full", max_new_tokens=9 + n // 4, stop=())
        for n in (20, 175, 5, 48, 130, 90)
    ]
    for turn in range(4000):
        if turn == 14:
            engine.cancel(asked[1])
        if not engine.step() and not engine.live:
            break
    return [request.result().tokens for request in asked if request.outcome == "finished"]


def sharing(runner: Runner) -> list[list[int]]:
    """Answers of requests that share a prefix, whose blocks each of them spills."""
    prompt = random_tokens(160, 9)
    runner.prefill(prompt, "full").release()
    prompts = [np.concatenate((prompt, random_tokens(3 + n, n))) for n in range(4)]
    ask = {"max_new_tokens": 25, "stop": (), "remember": False}
    return [made.tokens for made in runner.generate_batch(prompts, "prefix", **ask)]


@pytest.mark.parametrize(
    ("calls", "max_tokens"),
    [(given_way, 200), (read_whole, 4096), (turns, 4096), (joined, 4096), (sharing, 4096)],
)
def test_whatever_ends_meanwhile_pages_may_come_as_late_as_may_be(
    llama: Any, calls: Callable[[Runner], Any], max_tokens: int
) -> None:
    said = []
    for late in (LateArrivals(at_once=True), LateArrivals()):
        runner = late_runner(llama, KINDS, max_tokens=max_tokens)
        with torch.inference_mode(), late.at_work():
            said.append(calls(runner))
        assert late.made > 0
        assert not late.waiting
        assert spills(runner) > 0
        assert nothing_is_held(runner)
    assert said[0] == said[1]

"""Pages stay on the device while it has room, and are spilled when it has little left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from families import random_tokens, tiny
from host_faults import LateCopies
from host_memory import host_runner, nothing_is_held, spills
from kvweave import InvalidArgument
from kvweave.runner import Runner
from ranked_pages import FULL, top_k

EVERY = 4
KINDS = [top_k(8, EVERY), FULL]
TOKENS = 400


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def held(runner: Runner) -> float:
    """The share of the device's pages that somebody holds."""
    stats = runner.cache.stats()
    pages = sum(group["held"] * group["block_pages"] for group in stats["groups"])
    return float(pages / stats["arena_pages"])


class Steps:
    """A request that decodes, step by step."""

    def __init__(self, runner: Runner, tokens: Any, most: int = 80) -> None:
        self.runner = runner
        self.done = runner.prefill(tokens, "full", remember=False)
        self.sequence = decoding(runner, self.done, most)

    def go(self, steps: int) -> list[int]:
        """So many steps; the tokens that were said in all."""
        with torch.inference_mode():
            for _ in range(steps):
                self.runner._decoder.step([self.sequence])
        return list(self.sequence.tokens)

    def end(self) -> None:
        self.done.release()
        self.runner._decoder.forget()


def fill(runner: Runner, share: float) -> Any:
    """A request of nobody, with which so much of the device is held."""
    of = runner.cache
    pages = sum(group.pages for group in of.groups)
    wanted = (share - held(runner)) * int(of.stats()["arena_pages"])
    tokens = int(wanted / pages) * of.shape.page_tokens
    return of.admit(np.full(tokens, 7, np.int32), reuse="none")


@pytest.mark.parametrize("arrivals", ["exact", "whole", "late"])
@pytest.mark.parametrize("copies", ["spill", "mirror"])
def test_nothing_is_spilled_while_there_is_room(llama: Any, copies: str, arrivals: str) -> None:
    tokens = random_tokens(TOKENS, 1)
    near = Steps(host_runner(llama, KINDS, None), tokens)
    wanted = near.go(60)
    near.end()
    over: dict[str, Any] = {"host_copies": copies, "host_arrivals": arrivals}
    runner = host_runner(llama, KINDS, host_free_share=0.5, **over)
    assert held(runner) < 0.5
    far = Steps(runner, tokens)
    (host,) = far.sequence.host.values()
    said = far.go(60)
    assert host.count == 0
    # What is mirrored is copied in any case.
    assert (spills(runner) > 0) == (copies == "mirror")
    assert said == wanted
    far.end()
    assert nothing_is_held(runner)


@pytest.mark.parametrize("copies", ["spill", "mirror"])
def test_it_is_spilled_when_others_have_taken_the_room(llama: Any, copies: str) -> None:
    """Begun at the first ranking under pressure, done at the next; what is mirrored at once."""
    tokens = random_tokens(TOKENS, 1)
    near = Steps(host_runner(llama, KINDS, None), tokens)
    wanted = near.go(60)
    near.end()
    runner = host_runner(llama, KINDS, host_free_share=0.5, host_copies=copies)
    far = Steps(runner, tokens)
    (host,), (pool,) = far.sequence.host.values(), runner.host.values()
    far.go(3 * EVERY + 1)
    assert not pool.is_pressed
    other = fill(runner, 0.55)
    assert pool.is_pressed
    before = held(runner)
    far.go(2 * EVERY)
    assert host.count > TOKENS // runner.cache.shape.page_tokens
    assert held(runner) < before
    other.release()
    # What lies at home stays there, and goes on as it was.
    said = far.go(60 - 5 * EVERY - 1)
    assert said == wanted
    assert host.count
    far.end()
    assert nothing_is_held(runner)


def test_pressure_that_ends_before_pages_are_let_go_leaves_them(llama: Any) -> None:
    """They were copied: under the next pressure they leave without being copied again."""
    runner = host_runner(llama, KINDS, host_free_share=0.5)
    far = Steps(runner, random_tokens(TOKENS, 1))
    (host,), (pool,) = far.sequence.host.values(), runner.host.values()
    # It is ranked by its first step, and then by each fourth one.
    far.go(1)
    other, late = fill(runner, 0.55), LateCopies()
    with late.at_work():
        far.go(EVERY)
        copied = pool.transfers.copied
        assert copied
        other.release()
        late.comes = 1
        far.go(2 * EVERY)
        assert not host.count
        other = fill(runner, 0.55)
        far.go(EVERY)
        other.release()
        assert host.count
    # Of what was there by then each page has been copied once.
    assert pool.transfers.copied - copied <= -(-3 * EVERY // runner.cache.shape.page_tokens)
    far.end()
    assert nothing_is_held(runner)


@pytest.mark.parametrize(
    ("share", "spilled"), [(0.0, False), (1.0, True), (1, True), (None, False)]
)
def test_the_share_is_the_users_to_say(llama: Any, share: Any, spilled: bool) -> None:
    runner = host_runner(llama, KINDS, host_free_share=share)
    far = Steps(runner, random_tokens(TOKENS, 1))
    far.go(3 * EVERY)
    assert (spills(runner) > 0) == spilled
    far.end()
    assert nothing_is_held(runner)


def test_room_that_only_the_cached_have_is_free(llama: Any) -> None:
    """Prompts that are remembered go when their room is wanted: they press nobody."""
    runner = host_runner(llama, KINDS, host_free_share=0.5, max_tokens=1000)
    (pool,) = runner.host.values()
    runner.prefill(random_tokens(480, 5), "full").release()
    stats = runner.cache.stats()
    assert stats["cached"] > 0
    assert not pool.is_pressed


@pytest.mark.parametrize("arrivals", ["exact", "whole", "late"])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_who_finds_no_room_before_its_next_ranking_is_spilled(
    llama: Any, share: float, arrivals: str
) -> None:
    """Alone on a device that is too small for all that it says, and ranked too seldom to notice."""
    kinds, ask = [top_k(5, 200), FULL, FULL], {"stop": (), "remember": False}
    tokens, how = random_tokens(60, 1), {"host_arrivals": arrivals, "host_free_share": share}
    runner = host_runner(llama, kinds, max_tokens=220, **how)
    engine = runner.engine(token_budget=40, chunk_tokens=24, max_running=2)
    request = engine.submit(tokens, "full", max_new_tokens=190, **ask)
    engine.run()
    assert len(request.result().tokens) == 190
    assert engine.metrics()["preempted"] == 0
    assert spills(runner) > 0
    assert nothing_is_held(runner)


@pytest.mark.parametrize("dtype", [None, "fp8"])
@pytest.mark.parametrize("copies", ["spill", "mirror"])
def test_who_is_spilled_before_its_ranking_is_ranked_anew(
    llama: Any, copies: str, dtype: Any
) -> None:
    """So it says what a request does that lies on the device and sits a step out."""
    tokens, how = random_tokens(TOKENS, 1), {"host_copies": copies, "host_dtype": dtype}
    near = Steps(host_runner(llama, KINDS, None), tokens)
    runner = host_runner(llama, KINDS, host_arrivals="exact", host_free_share=0.0, **how)
    far, apart = Steps(runner, tokens), False
    for steps in (EVERY + 1, 2 * EVERY + 2, 29):
        apart |= near.go(steps) != far.go(steps)
        # Later on there may be nothing that has filled since its last ranking.
        if runner._decoder.spill([far.sequence]):
            near.runner._decoder.forget(near.done.request)
        assert not runner._decoder.spill([far.sequence])
        assert spills(runner) == 1
    apart |= near.go(20) != far.go(20)
    # Pages that were rounded are others.
    assert not apart or dtype == "fp8"
    near.end()
    far.end()
    assert nothing_is_held(runner)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), float("inf"), True, "half", [0.5]])
def test_shares_that_are_none_are_refused(llama: Any, share: Any) -> None:
    with pytest.raises(InvalidArgument, match="^host_free_share: expected "):
        host_runner(llama, KINDS, host_free_share=share)


def test_a_share_without_host_memory_is_refused(llama: Any) -> None:
    with pytest.raises(InvalidArgument, match="^host_free_share: expected host_bytes beside 0.5"):
        Runner(llama, host_free_share=0.5, check=False, progress=False)

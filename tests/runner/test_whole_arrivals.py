"""Rankings over host memory that are read as a whole: who waits for pages sits steps out."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_batches import decoding
from families import random_tokens, tiny
from host_memory import both, host_runner, nothing_is_held, spills
from kvweave.runner import Runner
from kvweave.runner.decode.decoder import Decoder
from late_pages import KINDS, MIXED, LateArrivals, happening, same, steps_of
from ranked_pages import stepping_as_on_a_gpu, top_k

STEPS = 48


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


# ---- what is read ---------------------------------------------------------------------------


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("length", [3, 130])
def test_it_is_the_definition(llama: Any, kinds: Any, length: int, as_on_a_gpu: bool) -> None:
    """However late pages come over: a step that is taken all the same waits for them."""
    resident, host = both(llama, kinds, host_arrivals="whole")
    tokens, late = random_tokens(length, 3), LateArrivals()
    wanted, missed = steps_of(resident, tokens, STEPS, defined=True, whole=True)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(host)
    with late.at_work():
        said, _ = steps_of(host, tokens, STEPS)
    assert same(said, wanted)
    assert (missed > 0) == (late.made > 0)
    assert missed > 0 or length == 3
    assert spills(host) == len(host.host)
    assert nothing_is_held(host)


@settings(max_examples=8)
@given(
    length=st.integers(1, 160),
    pages=st.integers(4, 12),
    every=st.integers(2, 17),
    page=st.integers(2, 6),
    copies=st.sampled_from(["spill", "mirror"]),
)
def test_it_is_the_definition_of_any_budget(
    length: int, pages: int, every: int, page: int, copies: str
) -> None:
    model, kinds = tiny("llama", num_hidden_layers=2), [top_k(pages, every)]
    how = {"page_tokens": page, "host_copies": copies}
    resident, host = both(model, kinds, host_arrivals="whole", **how)
    tokens, late = random_tokens(length, 3), LateArrivals()
    moves = happening(length, 45, page, set())
    wanted, _ = steps_of(resident, tokens, 45, moves, defined=True, whole=True)
    with late.at_work():
        said, _ = steps_of(host, tokens, 45)
    assert same(said, wanted)
    assert nothing_is_held(host)


# ---- who sits out ---------------------------------------------------------------------------


class Taken:
    """How many requests took part in each step, and how many sat it out."""

    def __init__(self, late: LateArrivals, comes_behind: int) -> None:
        self.late, self.comes_behind = late, comes_behind
        self.steps: list[tuple[int, int]] = []
        self.waited = 0

    def at_work(self, monkeypatch: Any) -> None:
        step = Decoder.step

        def counted(decoder: Decoder, batch: Any, **how: Any) -> Any:
            out = how.get("sitting_out", ())
            self.steps.append((len(batch), len(out)))
            chosen = step(decoder, batch, **how)
            self.waited = self.waited + 1 if self.late.waiting else 0
            if self.waited >= self.comes_behind:
                self.late.bring_all()
            return chosen

        monkeypatch.setattr(Decoder, "step", counted)


def answers(runner: Runner, prompts: list[Any], tokens: int) -> list[list[int]]:
    with closing(runner.engine(max_running=4)) as engine:
        how = {"max_new_tokens": tokens, "stop": (), "remember": False}
        asked = [engine.submit(prompt, "full", **how) for prompt in prompts]
        engine.run()
        return [one.result().tokens for one in asked]


@pytest.mark.parametrize("comes_behind", [2, 3, 8])
@pytest.mark.parametrize("kinds", [[top_k(4, 6), top_k(5, 7)], MIXED])
def test_others_go_on_meanwhile(
    llama: Any, kinds: Any, comes_behind: int, monkeypatch: Any
) -> None:
    """Each says what it says alone, whose pages are there at once."""
    prompts = [random_tokens(length, length) for length in (130, 90, 40, 3, 120, 77)]
    alone = host_runner(llama, kinds, host_arrivals="whole")
    wanted = [answers(alone, [prompt], 40)[0] for prompt in prompts]
    runner, late = host_runner(llama, kinds, host_arrivals="whole"), LateArrivals(apart=True)
    taken = Taken(late, comes_behind)
    with late.at_work(), monkeypatch.context() as patch:
        taken.at_work(patch)
        said = answers(runner, prompts, 40)
    assert said == wanted
    sat_out = [out for batch, out in taken.steps if out]
    assert len(sat_out) > 5
    assert all(batch for batch, _ in taken.steps)
    assert late.made > 10
    assert nothing_is_held(runner)


def test_who_is_not_sorted_out_waits(llama: Any) -> None:
    """A batch of the decoder's own caller says what an engine's does."""
    kinds, prompts = [top_k(4, 6)], [random_tokens(length, 3) for length in (130, 90)]
    runner, late = host_runner(llama, kinds, host_arrivals="whole"), LateArrivals(apart=True)
    wanted = answers(runner, prompts, 30)
    done = [runner.prefill(one, "full", remember=False, reserve_tokens=30) for one in prompts]
    sequences = [decoding(runner, one, 30) for one in done]
    with late.at_work(), torch.inference_mode():
        while not sequences[0].done:
            runner._decoder.step(sequences)
    assert late.made > 2
    assert [one.tokens for one in sequences] == wanted
    runner._decoder.forget()
    for one in done:
        one.release()
    assert nothing_is_held(runner)


def test_who_sat_out_goes_on_where_it_is(llama: Any) -> None:
    """Whatever the others did: who comes back is fed its own newest token, and not ranked anew."""
    kinds, late = [top_k(4, 6)], LateArrivals(apart=True)
    prompts = [random_tokens(length, 3) for length in (130, 90, 60)]
    alone = host_runner(llama, kinds, host_arrivals="whole")
    wanted = [answers(alone, [prompt], 30)[0] for prompt in prompts]
    runner = host_runner(llama, kinds, host_arrivals="whole")
    done = [runner.prefill(one, "full", remember=False, reserve_tokens=30) for one in prompts]
    sequences = [decoding(runner, one, 30) for one in done]
    decoder, draws = runner._decoder, np.random.default_rng(5)
    with late.at_work(), torch.inference_mode():
        for _ in range(400):
            left = [one for one in sequences if not one.done]
            if not left:
                break
            out = decoder.sits_out(left) or [False] * len(left)
            if all(out) or draws.random() < 0.3:
                late.bring_all()
                out = decoder.sits_out(left)
                assert not out
                out = [False] * len(left)
            # Somebody who could go on may sit out, too.
            out = [one or (sum(out) < len(left) - 1 and draws.random() < 0.2) for one in out]
            batch = [s for s, o in zip(left, out, strict=True) if not o]
            rest = [s for s, o in zip(left, out, strict=True) if o]
            if not batch:
                continue
            decoder.step(batch, sitting_out=rest)
    assert [one.tokens for one in sequences] == wanted
    decoder.forget()
    for one in done:
        one.release()
    assert nothing_is_held(runner)


def test_who_is_cancelled_while_it_sits_out_leaves_nothing(llama: Any) -> None:
    kinds, late = [top_k(4, 6)], LateArrivals(apart=True)
    runner = host_runner(llama, kinds, host_arrivals="whole")
    prompts = [random_tokens(length, length) for length in (130, 50)]
    with late.at_work(), closing(runner.engine()) as engine:
        how = {"max_new_tokens": 60, "stop": (), "remember": False}
        first, second = (engine.submit(one, "full", **how) for one in prompts)
        while not late.waiting:
            engine.must_step()
        assert engine.cancel(first)
        engine.run()
        assert len(second.result().tokens) == 60
        late.bring_all()
    assert nothing_is_held(runner)

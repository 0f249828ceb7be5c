"""Rankings over host memory that take effect late: what is read is what their definition says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_batches import decoding
from families import random_tokens, tiny
from host_memory import both, host_runner, nothing_is_held, spills
from kvweave import InvalidArgument
from kvweave.runner import Runner
from late_pages import KINDS, MIXED, LateArrivals, happening, same, steps_of
from ranked_pages import FULL, logits_of_steps, stepping_as_on_a_gpu, top_k

STEPS = 48


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


# ---- what is read ---------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("length", [3, 130])
def test_it_is_the_definition(name: str, kinds: Any, length: int) -> None:
    resident, host = both(tiny(name), kinds, host_arrivals="late")
    tokens = random_tokens(length, 3)
    wanted, missed = steps_of(resident, tokens, STEPS, defined=True)
    said, _ = steps_of(host, tokens, STEPS)
    assert same(said, wanted)
    assert missed > 0 or length == 3
    assert spills(host) == len(host.host)
    assert nothing_is_held(host)


@settings(max_examples=15)
@given(
    length=st.integers(1, 160),
    pages=st.integers(4, 12),
    every=st.integers(2, 17),
    page=st.integers(2, 6),
    leaves=st.sets(st.integers(1, 44), max_size=3),
)
def test_it_is_the_definition_of_any_budget(
    length: int, pages: int, every: int, page: int, leaves: set[int]
) -> None:
    model, kinds = tiny("llama", num_hidden_layers=2), [top_k(pages, every)]
    resident, host = both(model, kinds, host_arrivals="late", page_tokens=page)
    tokens, late = random_tokens(length, 3), LateArrivals()
    happens = happening(length, 45, page, leaves)
    wanted, _ = steps_of(resident, tokens, 45, happens, defined=True, waits=True)
    with late.at_work():
        said, _ = steps_of(host, tokens, 45, happens)
    assert same(said, wanted)
    assert nothing_is_held(host)


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("kinds", [KINDS[0], MIXED])
def test_no_step_waits_for_pages_that_come_over_as_late_as_may_be(
    llama: Any, kinds: Any, as_on_a_gpu: bool, copies: str
) -> None:
    """Nor does one read a slot before what is brought there has come over."""
    resident, host = both(llama, kinds, host_arrivals="late", host_copies=copies)
    tokens, late = random_tokens(130, 3), LateArrivals()
    wanted, _ = steps_of(resident, tokens, STEPS, defined=True, waits=True)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(host)
    with late.at_work():
        said, _ = steps_of(host, tokens, STEPS)
    assert same(said, wanted)
    assert late.made > 5
    assert nothing_is_held(host)


@pytest.mark.parametrize("comes", [(12,), (13, 17, 18), (11, 16, 21, 24, 29), (20,)])
@pytest.mark.parametrize("kinds", [KINDS[0], MIXED, [top_k(5, 4, estimate=True), FULL]])
def test_a_step_that_begins_when_pages_have_come_reads_all(
    llama: Any, kinds: Any, comes: tuple[int, ...]
) -> None:
    resident, host = both(llama, kinds, host_arrivals="late")
    tokens, late, happens = random_tokens(130, 3), LateArrivals(), dict.fromkeys(comes, "come")
    wanted, _ = steps_of(resident, tokens, STEPS, happens, defined=True, waits=True)
    with late.at_work():
        said, _ = steps_of(host, tokens, STEPS, happens, arrivals=late)
    assert same(said, wanted)
    assert nothing_is_held(host)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("kinds", [KINDS[0], MIXED])
def test_what_comes_within_a_step_joins_the_layers_that_are_left(
    llama: Any, kinds: Any, as_on_a_gpu: bool, layer: int
) -> None:
    """By `merge_states`, so that bits may differ; steps behind that go on from there."""
    resident, host = both(llama, kinds, host_arrivals="late")
    if as_on_a_gpu:
        stepping_as_on_a_gpu(host)
    tokens, late = random_tokens(130, 3), LateArrivals()
    within = {11: layer, 12: layer, 18: layer, 22: layer, 26: layer}
    wanted, _ = steps_of(resident, tokens, STEPS, defined=True, waits=True, within=within)
    with late.at_work():
        said, _ = steps_of(host, tokens, STEPS, arrivals=late, within=within)
    for one, other in zip(said, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    without, _ = steps_of(resident, tokens, STEPS, defined=True, waits=True)
    assert max(float((a - b).abs().max()) for a, b in zip(said, without, strict=True)) > 1e-3
    assert nothing_is_held(host)


def test_behind_the_last_arrival_a_step_reads_what_an_exact_one_reads(llama: Any) -> None:
    """The same pages, by the same queries: nothing is left of the wait then."""
    tokens, late = random_tokens(130, 3), LateArrivals()
    runners = [host_runner(llama, KINDS[0], host_arrivals=how) for how in ("exact", "late")]
    # Who is ranked late is ranked by its second step too, before its pages leave.
    exact, _ = steps_of(runners[0], tokens, 7, {1: "leaves"})
    with late.at_work():
        said, _ = steps_of(runners[1], tokens, 8, {7: "come"}, arrivals=late)
    # Up to the ranking both read the same; that step reads what was chosen before.
    assert same(said[:6], exact[:6])
    defined, _ = steps_of(host_runner(llama, KINDS[0], None), tokens, 8, defined=True)
    assert same(said, defined)


@pytest.mark.parametrize("rests", [(13,), (21, 22), tuple(range(0, 48, 7)), (26, 27, 28, 29)])
@pytest.mark.parametrize("kinds", [KINDS[0], MIXED])
def test_who_sits_a_step_out_is_ranked_anew(llama: Any, kinds: Any, rests: tuple[int, ...]) -> None:
    """Whatever its last ranking is waiting for then: that goes on being brought meanwhile."""
    resident, host = both(llama, kinds, host_arrivals="late")
    tokens, late = random_tokens(130, 3), LateArrivals()
    leaves = dict.fromkeys(rests, "leaves")
    wanted, _ = steps_of(resident, tokens, STEPS, leaves, defined=True, waits=True)
    with late.at_work():
        said, _ = steps_of(host, tokens, STEPS, leaves)
    assert same(said, wanted)
    assert nothing_is_held(host)


@pytest.mark.parametrize(
    "backs", [(7,), (11,), (12,), (13,), (3, 11, 12), (16, 27), tuple(range(9, 48, 10))]
)
def test_who_is_brought_back_is_ranked_anew(llama: Any, backs: tuple[int, ...]) -> None:
    """Its ranking, whose pages were on their way, is nobody's then."""
    resident, host = both(llama, KINDS[0], host_arrivals="late")
    tokens, late = random_tokens(130, 3), LateArrivals()
    back = dict.fromkeys(backs, "back")
    wanted, _ = steps_of(resident, tokens, STEPS, back, defined=True, waits=True)
    with late.at_work():
        said, _ = steps_of(host, tokens, STEPS, back)
    assert same(said, wanted)
    assert spills(host) > 1
    assert nothing_is_held(host)


@pytest.mark.parametrize("length", range(16, 21))
def test_who_is_listed_elsewhere_is_ranked_anew(llama: Any, length: int) -> None:
    """A table of more than 16 entries outgrows its room: in any step of a ranking."""
    resident, host = both(llama, KINDS[0], host_arrivals="late")
    tokens, late, moved = random_tokens(length, 4), LateArrivals(), 64 - length
    moves = {moved: "moved"}
    wanted, _ = steps_of(resident, tokens, moved + 12, moves, defined=True, waits=True)
    with late.at_work():
        said, _ = steps_of(host, tokens, moved + 12)
    assert same(said, wanted)
    assert nothing_is_held(host)


@pytest.mark.parametrize("steps", [12, 13])
def test_who_takes_the_place_of_one_that_ended_has_no_ranking_of_its(
    llama: Any, steps: int
) -> None:
    """The one before it ended with a step that ranked, or just behind it."""
    resident, host = both(llama, KINDS[0], host_arrivals="late")
    steps_of(host, random_tokens(130, 3), steps)
    tokens = random_tokens(9, 4)
    assert same(
        steps_of(host, tokens, STEPS)[0], steps_of(resident, tokens, STEPS, defined=True)[0]
    )
    assert nothing_is_held(host)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_pages_on_their_way_are_estimated_where_that_is_asked_for(name: str) -> None:
    kinds = [top_k(5, 4, estimate=True), FULL]
    resident, host = both(tiny(name), kinds, host_arrivals="late")
    tokens = random_tokens(130, 3)
    wanted, missed = steps_of(resident, tokens, STEPS, defined=True)
    said, _ = steps_of(host, tokens, STEPS)
    assert missed > 0
    assert same(said, wanted)
    without = host_runner(tiny(name), [top_k(5, 4), FULL], host_arrivals="late")
    assert not same(steps_of(without, tokens, STEPS)[0], wanted)


def test_it_is_another_answer_than_an_exact_one(llama: Any) -> None:
    """What the tests above compare with is not what a ranking that waits would read."""
    exact = host_runner(llama, KINDS[0])
    late = host_runner(llama, KINDS[0], host_arrivals="late")
    tokens = random_tokens(130, 3)
    said = steps_of(late, tokens, STEPS)[0]
    waited = steps_of(exact, tokens, STEPS, {1: "leaves"})[0]
    # The first two rankings are exact: only behind the first one do pages lie at home.
    assert same(said[:6], waited[:6])
    assert float((said[6] - waited[6]).abs().max()) > 1e-4


def test_as_many_pages_as_there_are_are_dense(llama: Any) -> None:
    tokens = random_tokens(70, 4)
    late = host_runner(llama, [top_k(500, 16), FULL], host_arrivals="late")
    dense = host_runner(llama, [FULL], None)
    assert same(steps_of(late, tokens, STEPS)[0], steps_of(dense, tokens, STEPS)[0])
    assert spills(late) == 0


def test_fp8_copies_are_the_same_however_late_they_come(llama: Any) -> None:
    tokens, late = random_tokens(130, 3), LateArrivals()
    how = {"host_arrivals": "late", "host_dtype": "fp8"}
    runner = stepping_as_on_a_gpu(host_runner(llama, MIXED, **how))
    with late.at_work():
        wanted = logits_of_steps(host_runner(llama, MIXED, **how), tokens, STEPS)
        said = logits_of_steps(runner, tokens, STEPS)
    assert said[0] == wanted[0]
    assert same(said[1], wanted[1])
    exact = host_runner(llama, MIXED, host_arrivals="late")
    with late.at_work():
        assert not same(logits_of_steps(exact, tokens, STEPS)[1], wanted[1])


def test_keys_that_are_nan_are_read_however_late_they_come() -> None:
    broken, tokens = tiny("llama"), random_tokens(120, 4)
    broken.get_input_embeddings().weight.data[7] = torch.nan
    tokens[tokens == 7] = 8
    tokens[33] = 7
    for arrivals in (LateArrivals, nullcontext):
        found = []
        for as_on_a_gpu in (False, True):
            runner, late = host_runner(broken, KINDS[0], host_arrivals="late"), arrivals()
            if as_on_a_gpu:
                stepping_as_on_a_gpu(runner)
            with late.at_work() if isinstance(late, LateArrivals) else late:
                found.append(steps_of(runner, tokens, STEPS)[0])
            assert nothing_is_held(runner)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


# ---- batches --------------------------------------------------------------------------------


def in_turns(runner: Runner, seed: int, alone: bool) -> list[list[int]]:
    """Tokens of requests that join a batch in turns, or of each alone; nobody sits out."""
    draws = np.random.default_rng(seed)
    prompts = [random_tokens(int(draws.integers(10, 150)), n) for n in range(11)]
    done = [runner.prefill(p, "full", remember=False, reserve_tokens=40) for p in prompts]
    sequences = [decoding(runner, one, 40) for one in done]
    with torch.inference_mode():
        for one in sequences if alone else []:
            while not one.done:
                one.tokens.append(int(runner._decoder.step([one])[0]))
        for turn in range(0 if alone else 60):
            batch = [s for s in sequences[: 1 + turn // 2] if not s.done]
            order = draws.permutation(len(batch))
            batch = [batch[i] for i in order]
            if not batch:
                break
            for one, token in zip(batch, runner._decoder.step(batch), strict=True):
                one.tokens.append(int(token))
    runner._decoder.forget()
    for one in done:
        one.release()
    return [one.tokens for one in sequences]


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_who_else_is_in_the_batch_changes_nothing(llama: Any, as_on_a_gpu: bool) -> None:
    kinds, late = [top_k(4, 6), top_k(5, 7)], LateArrivals(apart=True)
    runner = host_runner(llama, kinds, host_arrivals="late")
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    with late.at_work():
        wanted = in_turns(host_runner(llama, kinds, host_arrivals="late"), 1, alone=True)
        said = in_turns(runner, 1, alone=False)
    assert said == wanted
    assert late.made > 10
    assert spills(runner) > 10
    assert nothing_is_held(runner)


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", ["", "Late", 1, True])
def test_arrivals_of_no_kind_are_refused(llama: Any, arrivals: Any) -> None:
    with pytest.raises(InvalidArgument, match="host_arrivals: expected exact, whole or late, got"):
        host_runner(llama, [top_k(4, 4)], host_arrivals=arrivals)

"""Heads that choose pages by bounds in e4m3: against the definition in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from fp8_bounds import fp8_bounds
from head_maps import near
from host_memory import both, spills
from host_memory import nothing_is_held as nothing_is_held_anywhere
from kvweave import InvalidArgument
from kvweave.runner.decode.kept_bounds import KeptBounds
from ranked_pages import (
    FULL,
    WINDOW,
    PlainDecoding,
    checked_choices,
    every_place_came_back,
    logits_of_steps,
    ranked_runner,
    stepping_as_on_a_gpu,
    top_k,
)

PAGE, STEPS = 4, 18
MIXED = [top_k(4), FULL, top_k(6, 3, score="mean"), WINDOW]


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.mark.parametrize(
    "kinds",
    [[top_k(4)], [top_k(4, 5, score="mean")], MIXED, [top_k(4, estimate=True), FULL]],
)
def test_decoding_is_the_definition(llama, kinds) -> None:
    tokens = random_tokens(90, 3)
    runner = ranked_runner(llama, kinds, bounds_dtype="fp8")
    said, logits = logits_of_steps(runner, tokens, STEPS)
    plain = PlainDecoding(llama, kinds, PAGE, fp8=True)
    near(logits[0], plain.feed(tokens.tolist()))
    for token, got in zip(said, logits[1:], strict=False):
        near(got, plain.feed([token]))
    assert every_place_came_back(runner)


def test_other_pages_are_chosen_than_by_exact_bounds(llama) -> None:
    """What the test above compares with is no choice by exact bounds."""
    tokens = random_tokens(400, 3)
    exact, rounded = (
        logits_of_steps(ranked_runner(llama, [top_k(8)], bounds_dtype=dtype), tokens, 4)[1]
        for dtype in (None, "fp8")
    )
    assert torch.equal(exact[0], rounded[0])
    assert any(not torch.equal(one, other) for one, other in zip(exact, rounded, strict=True))


def test_as_many_pages_as_there_are_change_no_bit(llama) -> None:
    tokens = random_tokens(70, 4)
    runners = (
        ranked_runner(llama, [top_k(500)], bounds_dtype="fp8"),
        ranked_runner(llama, [FULL]),
    )
    (said, logits), (also, others) = (logits_of_steps(r, tokens, STEPS) for r in runners)
    assert said == also
    for one, other in zip(logits, others, strict=True):
        assert torch.equal(one, other)


def test_what_a_gpu_captures_is_what_is_decoded_elsewhere(llama) -> None:
    plain, captured = (ranked_runner(llama, MIXED, bounds_dtype="fp8") for _ in range(2))
    tokens = random_tokens(90, 3)
    said, logits = logits_of_steps(plain, tokens, STEPS)
    also, others = logits_of_steps(stepping_as_on_a_gpu(captured), tokens, STEPS)
    assert said == also
    for one, other in zip(logits, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_bounds_are_of_what_lies_in_reused_pages(llama, mode) -> None:
    """Of requests that hold the same blocks, each listing its own part of them."""
    kinds = [top_k(4), top_k(5, score="mean")]
    runner = ranked_runner(llama, kinds, mode=mode, bounds_dtype="fp8")
    shared = random_tokens(61, 9).tolist()
    prompts = [shared + random_tokens(n, n).tolist() for n in (20, 33, 47)]
    with checked_choices(runner) as counted:
        engine = runner.engine()
        asked = [engine.submit(p, max_new_tokens=9, stop=[]) for p in prompts]
        engine.run()
    assert sum(counted) > 100
    assert all(len(request.result().tokens) == 9 for request in asked)


def test_over_host_memory_the_same_is_chosen(llama) -> None:
    """Bounds of pages that have left are of what lies in host memory, and of no first block."""
    kinds = [top_k(4, 4), FULL, top_k(5, 4, score="mean", estimate=True)]
    resident, over = both(llama, kinds, bounds_dtype="fp8")
    tokens = random_tokens(150, 5)
    answers = [r.generate(tokens, max_new_tokens=40, stop=[]).tokens for r in (resident, over)]
    assert answers[0] == answers[1]
    assert spills(over) > 0
    assert all(nothing_is_held_anywhere(runner) for runner in (resident, over))


def test_bounds_of_pages_that_have_left_are_those_of_what_lies_at_home(llama) -> None:
    """A table that is listed anew after its pages have left has all of its bounds made anew."""
    _, over = both(llama, [top_k(4, 4)], bounds_dtype="fp8")
    (pool,) = over.host.values()
    bounds = KeptBounds(over._decoder.heads.budgets[0], over._decoder.pages, pool)
    generator = torch.Generator().manual_seed(5)
    pages = over._decoder.pages
    pages.copy_(torch.randn(pages.shape, generator=generator))
    heads = bounds.heads
    here = np.array([heads, 2 * heads, 3 * heads], np.int32)
    home = here[::-1].copy()
    pool.carry_blocks(here, home, "spill")
    rows = np.array([[block, 0, PAGE, 0, 0] for block in here], np.int32)
    away = rows.copy()
    away[:, 0] = -1 - home
    rows[1, 1:3] = away[1, 1:3] = (1, 3)
    places = bounds.take(6, 6)
    bounds.compute(np.concatenate((rows, away)), places)
    assert bounds.scales is not None
    for part in (bounds.values.view(torch.uint8), bounds.scales):
        assert torch.equal(part[places[:3]], part[places[3:]])
    keys = pages[2 * heads, 0, 1:3]
    wanted, scale = fp8_bounds(keys, "min-max")
    assert int(bounds.scales[places[4], 0]) == scale
    kept = bounds.values[places[4], 0].double() * 2.0 ** (scale - 127)
    torch.testing.assert_close(kept, wanted, rtol=0, atol=0)


def test_bounds_take_a_byte_a_number_and_one_a_page(llama) -> None:
    taken = {}
    for dtype in (None, "fp8"):
        runner = ranked_runner(llama, [top_k(4), top_k(4, score="mean")], bounds_dtype=dtype)
        logits_of_steps(runner, random_tokens(90, 3), 2)
        ((slots),) = runner._decoder._slots
        assert slots.chosen is not None
        taken[dtype] = [
            group.bounds.nbytes / group.bounds.values.shape[0] / group.budget.heads
            for group in slots.chosen.groups
        ]
    dim = runner.spec.head_dim
    assert taken == {None: [12 * dim, 12 * dim], "fp8": [2 * dim + 1, dim + 1]}


def test_what_is_no_dtype_of_bounds_is_refused(llama) -> None:
    for wrong in ("int8", "", 8, True):
        with pytest.raises(InvalidArgument, match="bounds_dtype: expected fp8 or None, got"):
            ranked_runner(llama, [top_k(4)], bounds_dtype=wrong)
    with pytest.raises(InvalidArgument, match="bounds_dtype: expected top_k heads beside fp8"):
        ranked_runner(llama, [FULL], bounds_dtype="fp8")

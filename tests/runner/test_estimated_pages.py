"""Heads that estimate the pages which they do not read: against the definition in plain torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import kvweave
from cached_prompts import knowledge
from decode_batches import decoding
from families import random_tokens, tiny
from head_maps import near
from host_memory import both, nothing_is_held, spills
from kvweave.cache import HeadClassMap
from kvweave.lab.profile import with_ranked_pages
from kvweave.runner.decode.kept_bounds import KeptBounds
from kvweave.runner.kv.page_budget import PageBudget
from ranked_pages import (
    FULL,
    WINDOW,
    PlainDecoding,
    checked_choices,
    every_place_came_back,
    kinds_map,
    logits_of_steps,
    ranked_runner,
    stepping_as_on_a_gpu,
    top_k,
)

PAGE, STEPS = 4, 22


def estimating(pages: int, every: int = 1, **more: Any) -> dict[str, Any]:
    return top_k(pages, every, estimate=True, **more)


MIXED = [estimating(4), FULL, estimating(6, 3), WINDOW, top_k(4)]
KINDS = [[estimating(4)], [estimating(4, 5), FULL], MIXED]


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in pairs)


# ---- what is read and what is estimated -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", [estimating(4)]),
        ("llama", [estimating(3, 16)]),
        ("llama", MIXED),
        ("llama", [estimating(4, score="mean"), top_k(4, 3, score="mean")]),
        ("qwen3", [WINDOW, estimating(4)]),
        ("gemma", [estimating(5, 2), FULL]),
        ("smollm3", MIXED),
    ],
)
@pytest.mark.parametrize("length", [3, 90])
def test_decoding_is_the_definition(name, kinds, length) -> None:
    model, tokens = tiny(name), random_tokens(length, 3)
    runner = ranked_runner(model, kinds, page_tokens=PAGE)
    said, logits = logits_of_steps(runner, tokens, STEPS)
    plain = PlainDecoding(model, kinds, PAGE)
    near(logits[0], plain.feed(tokens.tolist()))
    for token, got in zip(said, logits[1:], strict=False):
        near(got, plain.feed([token]))
    assert every_place_came_back(runner)


def test_an_estimate_is_another_answer_and_nearer_to_all_pages(llama) -> None:
    tokens = random_tokens(90, 3)
    kinds = [top_k(3)], [estimating(3)], [FULL]
    few, estimated, dense = (
        logits_of_steps(ranked_runner(llama, some), tokens, 1)[1][1] for some in kinds
    )
    assert float((few - dense).abs().max()) > 0.01
    assert float((estimated - dense).abs().max()) < 0.5 * float((few - dense).abs().max())


@pytest.mark.parametrize("kinds", KINDS)
def test_what_a_gpu_captures_is_what_is_decoded_elsewhere(llama, kinds) -> None:
    runners = [ranked_runner(llama, kinds), stepping_as_on_a_gpu(ranked_runner(llama, kinds))]
    found = [logits_of_steps(runner, random_tokens(90, 3), STEPS) for runner in runners]
    assert same_bits(*found)
    assert every_place_came_back(runners[1])


@pytest.mark.parametrize("kinds", [[estimating(500)], [estimating(500, 16), WINDOW]])
def test_as_many_pages_as_there_are_change_no_bit(llama, kinds) -> None:
    full = [FULL if kind["kind"] == "top_k" else kind for kind in kinds]
    found = [
        logits_of_steps(ranked_runner(llama, k), random_tokens(70, 4), 9) for k in (kinds, full)
    ]
    assert same_bits(*found)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_who_else_is_in_the_batch_changes_no_bit(llama, as_on_a_gpu) -> None:
    """Requests that choose and estimate beside ones that read all, and ones that leave."""
    runner = ranked_runner(llama, MIXED)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    prompts = [random_tokens(n, n) for n in (1, 30, 61, 130)]
    ask = {"max_new_tokens": STEPS, "stop": (), "remember": False}
    alone = [runner.generate(p, "full", **ask).tokens for p in prompts]
    made = runner.generate_batch(prompts, "full", **ask)
    assert [one.tokens for one in made] == alone
    engine = runner.engine(token_budget=40, chunk_tokens=16, max_running=3)
    asked = [engine.submit(p, "full", **ask) for p in prompts]
    engine.run()
    assert [request.result().tokens for request in asked] == alone
    assert every_place_came_back(runner)


# ---- whose means they are -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("policy", ["naive", "epic"])
def test_means_are_of_what_lies_in_reused_pages(llama, mode, policy) -> None:
    """Segments that begin inside a page, are turned, or are rewritten in part."""
    kinds = [estimating(5), FULL, estimating(9, score="mean")]
    runner = ranked_runner(llama, kinds, page_tokens=8, mode=mode)
    parts = knowledge(runner, 3)
    with checked_choices(runner) as counted:
        for _ in range(2):
            runner.generate(parts, policy, max_new_tokens=6, stop=())
    assert min(counted) >= 5
    assert every_place_came_back(runner)


def test_turned_segments_are_estimated_as_if_their_keys_lay_turned(llama) -> None:
    """What `share` reads in place by delta `materialise` turns: both say the same."""
    kinds, found = [estimating(4), FULL], []
    for mode in ("materialise", "share"):
        runner = ranked_runner(llama, kinds, page_tokens=8, mode=mode)
        parts = knowledge(runner, 3)
        with runner.prefill(parts, "naive", remember=False, reserve_tokens=9) as done:
            deltas = done.request.entries(0)[:, 4]
            assert bool(deltas.any()) == (mode == "share")
            sequence, logits = decoding(runner, done, 9), []

            def choose(batch: Any, of_step: torch.Tensor, _greedy: bool, seen: Any = logits) -> Any:
                seen.append(of_step.clone())
                return of_step.argmax(-1).numpy()

            with torch.inference_mode():
                for _ in range(6):
                    runner._decoder.step([sequence], choose=choose)
            runner._decoder.forget()
            found.append(torch.cat(logits))
    # Pages begin elsewhere where segments are copied together, and means with them. Without the
    # turn it is twice as far.
    assert float((found[0] - found[1]).abs().max()) < 8e-4


def test_forks_have_means_of_their_own(llama) -> None:
    runner = ranked_runner(llama, [estimating(3)])
    with (
        runner.prefill(random_tokens(50, 6), "full", remember=False, reserve_tokens=9) as done,
        torch.inference_mode(),
        checked_choices(runner) as counted,
    ):
        one = decoding(runner, done, 9)
        runner._decoder.step([one])
        fork = decoding(runner, done, 9)
        fork.request, fork.tokens = done.request.fork(), [7]
        for _ in range(6):
            runner._decoder.step([one, fork])
        runner._decoder.forget()
        fork.request.release()
    assert min(counted) == 8
    assert every_place_came_back(runner)


def test_a_prefix_that_others_hold_is_estimated_for_each_alone(llama) -> None:
    """The second prompt lists the first five tokens of a page that the first one filled."""
    kinds = [estimating(3)]
    runner = ranked_runner(llama, kinds, page_tokens=8)
    prompt = random_tokens(80, 2)
    other = prompt[:45].tolist() + random_tokens(20, 3).tolist()
    ask = {"max_new_tokens": STEPS, "stop": (), "remember": False}
    alone = ranked_runner(llama, kinds, page_tokens=8).generate(other, "full", **ask).tokens
    with checked_choices(runner):
        runner.generate(prompt, "prefix", max_new_tokens=3, stop=())
        made = runner.generate_batch([prompt, other], "prefix", **ask)
    assert made[1].report.reused_prefix >= 40
    assert made[1].tokens == alone


# ---- beside what else a runner does ---------------------------------------------------------


@pytest.mark.parametrize("kinds", [[estimating(4, 5)], MIXED])
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_over_host_memory_it_says_what_all_pages_on_the_device_say(
    llama, kinds, as_on_a_gpu
) -> None:
    resident, host = both(llama, kinds)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(host)
    tokens = random_tokens(90, 3)
    wanted = logits_of_steps(resident, tokens, 40)
    assert same_bits(logits_of_steps(host, tokens, 40), wanted)
    assert spills(host) > 0
    assert nothing_is_held(host)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_drafts_by_estimates_are_verified_by_all_pages(llama, as_on_a_gpu) -> None:
    tokens, ask = random_tokens(90, 3), {"max_new_tokens": 24, "stop": (), "remember": False}
    wanted = ranked_runner(llama, [FULL]).generate(tokens, "full", **ask).tokens
    runner = ranked_runner(llama, [estimating(4, 3)], speculate=3)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    made = runner.generate(tokens, "full", **ask)
    assert made.tokens == wanted
    assert made.report.speculation.drafted > 0
    assert every_place_came_back(runner)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_spoils_no_estimate(llama, bad) -> None:
    """Of a page that is not read: nothing is estimated of it, as if it were left out alone."""
    runner = ranked_runner(llama, [estimating(3)])
    pages = runner._decoder.pages
    with runner.prefill(random_tokens(90, 3), "full", remember=False, reserve_tokens=9) as done:
        table = done.request.entries(0)
        heads = runner.spec.kv_heads * len(runner.spec.layers)
        sequence = decoding(runner, done, 9)
        # Keys of the page are such that it is not chosen, and say so of all its tokens.
        block = int(table[5, 0])
        pages[block : block + heads, 1, 2, 3] = bad
        with torch.inference_mode():
            runner._decoder.step([sequence], watched=True)
            (slots,) = (s for s in runner._decoder._slots if sequence in s.members)
            group = slots.chosen.groups[0]
            chosen = group.room.chosen[slots.members[sequence], :, :3]
            at = int(group.room.ranked[group.lies[slots.members[sequence], 0] + 5][0])
            assert bool(group.room.means[at : at + heads, 0].isnan().all())
            left = ~(chosen[..., 0] == block).any(1)
            assert bool(left[: runner.spec.kv_heads].any())
        runner._decoder.forget()
    means = KeptBounds(PageBudget(0, 3, 1, heads, estimate=True), pages)
    means.compute(table[:6], means.take(6, 6))
    assert means.means is not None
    assert bool(means.means[:, :, 0].isnan().any(-1).any(-1).sum() == 1)


# ---- the map --------------------------------------------------------------------------------


def test_maps_say_what_is_ranked_by_and_estimated(llama) -> None:
    kinds = [estimating(4, 2, score="mean"), top_k(4, 2), estimating(4, 2)]
    runner = ranked_runner(llama, kinds)
    groups = {(g.kind, g.read, g.rerank_every, g.score, g.estimate) for g in runner.cache.groups}
    assert groups == {
        ("top_k", 4, 2, "mean", True),
        ("top_k", 4, 2, "min-max", False),
        ("top_k", 4, 2, "min-max", True),
    }
    assert HeadClassMap.from_json(runner.heads.to_json()) == runner.heads
    text = kinds_map(runner.spec, [top_k(4, 2)]).to_json()
    assert "score" not in text
    assert "estimate" not in text
    said = kinds_map(runner.spec, [top_k(4, 2, score="min-max", estimate=False)])
    assert said.to_json() == text


@pytest.mark.parametrize(
    "more", [{"score": "median"}, {"estimate": "yes"}, {"estimates": True}, {"score": 1}]
)
def test_what_no_map_says_is_refused(llama, more) -> None:
    with pytest.raises(kvweave.CorruptHeadMap, match="head map"):
        ranked_runner(llama, [top_k(4, 2, **more)])


def test_measured_maps_estimate_when_asked(llama) -> None:
    plain = kinds_map(ranked_runner(llama, [FULL]).spec, [FULL, WINDOW])
    made = with_ranked_pages(plain, 8, unstable_too=True, score="mean", estimate=True)
    classes = [entry["class"] for entry in json.loads(made.to_json())["heads"]]
    assert estimating(8, 16, score="mean") in classes
    with pytest.raises(kvweave.InvalidArgument, match="score"):
        with_ranked_pages(plain, 8, score="median")

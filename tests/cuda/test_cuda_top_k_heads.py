"""Heads that read few pages on a GPU: chosen within captured steps, as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from cached_prompts import knowledge
from decode_batches import decoding
from families import random_tokens, tiny
from kvweave.runner import Healing, Runner
from ranked_pages import (
    FULL,
    WINDOW,
    checked_choices,
    every_place_came_back,
    logits_of_steps,
    ranked_runner,
    top_k,
)
from versions import needs_cuda

pytestmark = needs_cuda

STEPS = 40
MIXED = [top_k(4), FULL, top_k(6, 3), WINDOW, top_k(4)]
KINDS = [[top_k(4)], [top_k(3, 5)], MIXED, [FULL, top_k(5, 16)], [WINDOW, top_k(4, 2)]]


def there(kinds: Any, name: str = "llama", dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A runner on the GPU; of half precision by the kernels of tensor cores."""
    if dtype == torch.float32:
        return ranked_runner(tiny(name).cuda(), kinds, **sizes)
    model = tiny(name, head_dim=64).to("cuda", dtype)
    return ranked_runner(model, kinds, **{"page_tokens": 16, **sizes})


def captured(runner: Runner) -> dict[tuple[int, ...], bool]:
    """Whether there is a graph of steps in which so much is ranked."""
    graphs = runner._decoder.graphs
    assert graphs is not None
    assert graphs.capturable
    return {key[-1][0]: size.graph is not None for key, size in graphs._sizes.items()}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_it_says_what_the_cpu_says(name, kinds) -> None:
    tokens = random_tokens(90, 3)
    host = ranked_runner(tiny(name), kinds)
    device = there(kinds, name)
    wanted, logits = logits_of_steps(host, tokens, STEPS)
    said, others = logits_of_steps(device, tokens, STEPS)
    assert said == wanted
    for one, other in zip(others, logits, strict=True):
        assert one.is_cuda
        torch.testing.assert_close(one.cpu(), other, atol=2e-4, rtol=0)
    assert every_place_came_back(device)


def test_steps_are_captured_with_a_ranking_and_without() -> None:
    runner = there([top_k(4, 4)])
    logits_of_steps(runner, random_tokens(60, 1), STEPS)
    assert captured(runner) == {(0,): True, (64,): True}


def test_two_budgets_are_ranked_apart() -> None:
    runner = there([top_k(4), top_k(3, 4)])
    logits_of_steps(runner, random_tokens(60, 1), STEPS)
    graphs = captured(runner)
    assert len(graphs) == 2
    assert all(graphs.values())
    assert sum(0 in widths for widths in graphs) == 1


def test_few_pages_are_another_answer_than_all() -> None:
    """What is compared above is no dense decoding."""
    tokens = random_tokens(90, 3)
    (_, few), (_, dense) = (logits_of_steps(there([k]), tokens, 1) for k in (top_k(3), FULL))
    assert float((few[1] - dense[1]).abs().max()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", [[top_k(500)], [top_k(500), FULL], [top_k(500, 16), WINDOW]])
def test_as_many_pages_as_there_are_change_no_bit(kinds, dtype) -> None:
    full = [FULL if kind["kind"] == "top_k" else kind for kind in kinds]
    tokens = random_tokens(150, 4)
    answers = [logits_of_steps(there(some, dtype=dtype), tokens, STEPS) for some in (kinds, full)]
    assert answers[0][0] == answers[1][0]
    for one, other in zip(answers[0][1], answers[1][1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [[top_k(4)], [top_k(6), FULL, top_k(3)]])
def test_choices_are_those_of_the_definition(kinds, dtype) -> None:
    """Whoever is in the batch, by what lies in the pages of each and by its queries."""
    runner = there(kinds, dtype=dtype, max_tokens=8192)
    prompts = [random_tokens(n, n) for n in (7, 130, 65, 300)]
    with checked_choices(runner) as counted:
        made = runner.generate_batch(prompts, "full", max_new_tokens=24, stop=(), remember=False)
    assert [len(one.tokens) for one in made] == [24] * 4
    assert max(counted) >= 4
    assert all(captured(runner).values())
    assert every_place_came_back(runner)


@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_bounds_are_of_what_lies_in_reused_pages_and_was_healed(mode) -> None:
    runner = there([top_k(5), FULL], page_tokens=8, mode=mode)
    parts = knowledge(runner, 3)
    healing = Healing(every=3, bound=0.0, share=0.2, most=1.0)
    with checked_choices(runner) as counted:
        made = runner.generate(
            parts, "naive", max_new_tokens=14, stop=(), remember=False, healing=healing
        )
        runner.generate_batch([parts] * 2, "naive", max_new_tokens=6, stop=(), remember=False)
    assert made.report.healing.healed >= 3
    assert min(counted) == 4


@pytest.mark.parametrize("kinds", [[top_k(4, 7)], MIXED])
def test_who_joins_and_leaves_says_what_it_says_alone(kinds) -> None:
    """Batches that grow, shrink and change order; bounds and choices outgrow their room."""
    draws = np.random.default_rng(0)
    prompts = [random_tokens(int(draws.integers(5, 200)), seed) for seed in range(12)]
    limits = draws.integers(5, STEPS, len(prompts)).tolist()
    alone = there(kinds, max_tokens=8192)
    wanted = [logits_of_steps(alone, p, n)[0] for p, n in zip(prompts, limits, strict=True)]
    runner = there(kinds, max_tokens=16384)
    done = [runner.prefill(p, "full", remember=False, reserve_tokens=STEPS) for p in prompts]
    sequences = [decoding(runner, one, n + 1) for one, n in zip(done, limits, strict=True)]
    joined = 0
    with torch.inference_mode():
        while not all(s.done for s in sequences):
            joined += 2
            left = [s for s in sequences[:joined] if not s.done]
            if left:
                runner._decoder.step([left[i] for i in draws.permutation(len(left))])
    assert [s.tokens for s in sequences] == wanted
    graphs = runner._decoder.graphs
    assert graphs is not None
    assert any(size.graph is not None for size in graphs._sizes.values())
    runner._decoder.forget()
    for one in done:
        one.release()
    runner.cache.check()
    assert every_place_came_back(runner)


def test_requests_that_give_way_end_and_leave_nothing() -> None:
    runner = there([top_k(3), FULL], max_tokens=26 * 4)
    engine = runner.engine(token_budget=64, chunk_tokens=32, max_running=4)
    asked = [
        engine.submit(random_tokens(30, seed), "full", max_new_tokens=24, stop=(), remember=False)
        for seed in range(4)
    ]
    engine.run()
    assert [len(request.result().tokens) for request in asked] == [24] * 4
    assert engine.metrics()["preempted"] > 0
    assert runner.cache.stats()["held"] == 0
    assert every_place_came_back(runner)


def test_frequencies_that_change_with_the_length_are_not_captured() -> None:
    """Such steps run launch by launch, and choose by the same tables."""
    kinds, tokens = [top_k(4, 3), FULL], random_tokens(90, 3)
    device = there(kinds, "llama-dynamic")
    assert device._decoder.graphs is None
    wanted, logits = logits_of_steps(ranked_runner(tiny("llama-dynamic"), kinds), tokens, STEPS)
    said, others = logits_of_steps(device, tokens, STEPS)
    assert said == wanted
    for one, other in zip(others, logits, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=2e-4, rtol=0)


def test_a_head_dim_that_is_not_scored_is_refused() -> None:
    with pytest.raises(kvweave.Unsupported, match="head dim that is a multiple of 8 up to 256"):
        ranked_runner(tiny("llama", head_dim=12).cuda(), [top_k(4)])


# ---- scores that tell nothing ---------------------------------------------------------------


def test_pages_that_score_the_same_are_chosen_from_the_first_on() -> None:
    """Keys are zeros, and so are all scores: the order of pages alone tells them apart."""
    blind = [tiny("llama") for _ in range(2)]
    for model in blind:
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.data.zero_()
    kinds, tokens = [top_k(5), FULL], random_tokens(90, 3)
    host, device = ranked_runner(blind[0], kinds), ranked_runner(blind[1].cuda(), kinds)
    wanted, logits = logits_of_steps(host, tokens, STEPS)
    with checked_choices(device) as counted:
        said, others = logits_of_steps(device, tokens, STEPS)
    assert min(counted) > 0
    assert said == wanted
    for one, other in zip(others, logits, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_that_is_nan_is_chosen_and_spoils_nobody_elses_answer(dtype) -> None:
    model = tiny("llama", head_dim=64).to("cuda", dtype)
    model.get_input_embeddings().weight.data[7] = torch.nan
    runner = ranked_runner(model, [top_k(5)], page_tokens=16, max_tokens=4096)
    prompts = [random_tokens(400, 3), random_tokens(380, 4)]
    for tokens in prompts:
        tokens[tokens == 7] = 8
    alone = logits_of_steps(runner, prompts[1], STEPS)[0]
    prompts[0][133] = 7
    with torch.inference_mode():
        done = [runner.prefill(p, "full", remember=False, reserve_tokens=STEPS) for p in prompts]
        batch = [decoding(runner, one, STEPS + 1) for one in done]
        for _ in range(STEPS):
            runner._decoder.step(batch)
    assert batch[1].tokens == alone
    slots = next(s for s in runner._decoder._slots if batch[0] in s.members)
    (group,) = slots.chosen.groups
    blocks = batch[0].request.entries(0)[:, 0].tolist()
    chosen = group.room.chosen[slots.members[batch[0]]][..., 0].tolist()
    heads = runner.spec.kv_heads
    assert all(blocks[133 // 16] in some for some in chosen[:heads])
    # What reads it is NaN, and so are the queries of later layers: no page is better than another.
    assert all(some == [*blocks[:3], *blocks[-2:]] for some in chosen[heads:])
    assert all(captured(runner).values())

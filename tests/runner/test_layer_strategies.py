"""Prompts of runners with a strategy are packed layer by layer too, where blocks lie by then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens
from head_maps import runner_of as plain_runner
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.kv.packed_pool import PackedPool
from packed_decoding import packed_runner
from ranked_pages import FULL, kinds_map, logits_of_steps, top_k
from strategy_runners import LONG, all_is_back, all_is_gone, uneven_model

SEGMENT = 640


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


def runner_that(model: Any, beside: bool, of: str = "int4", **settings: Any) -> Runner:
    """One that packs beside what it computes, or behind it."""
    packing = Packing(of, strategy=Strategy(0.3), beside=beside)
    given = {"kv_dtype": packing, "max_tokens": 16384, "chunk_tokens": 400, **settings}
    return packed_runner(model, **given)


def text_of(runner: Runner, done: Any) -> list[torch.Tensor]:
    """What lies packed of a prompt: bytes where they lie, and bounds by numbers."""
    pool = runner.packed
    assert pool is not None
    blocks = done.kv.packed.request.entries()[:, 0]
    sides = [(pool.pages.data, pool.rows(blocks)), (pool.bounds, blocks)]
    return [
        side[at : at + pool.block_pages].clone()
        for side, rows in sides
        if side is not None
        for at in rows.tolist()
    ]


def expect_same_prompts(one: Runner, behind: Runner, tokens: Any) -> None:
    """That a prompt is the same bits in both, and packed layer by layer in the first alone."""
    found = []
    for runner in (one, behind):
        with runner.prefill(tokens, "prefix") as done:
            found.append((done.logits.clone(), text_of(runner, done), done.report.packed))
    (logits, text, report), (others, wanted, late) = found
    assert torch.equal(logits, others)
    assert len(text) == len(wanted) > 0
    assert all(torch.equal(*each) for each in zip(text, wanted, strict=True))
    full = len(tokens) // 64
    assert (report.beside, report.behind) == (full, 0)
    assert (late.beside, late.behind) == (0, full)


@pytest.mark.parametrize("of", ["int4", "int8"])
@pytest.mark.parametrize("chooses", [False, True])
def test_bytes_are_those_of_packing_behind(model: Any, of: str, chooses: bool) -> None:
    """Also once a document has given its memory to others, so that blocks lie elsewhere."""
    given: dict[str, Any] = {}
    if chooses:
        given["heads"] = kinds_map(plain_runner(model).spec, [top_k(4), FULL])
    runners = [runner_that(model, beside, of, **given) for beside in (True, False)]
    expect_same_prompts(*runners, random_tokens(500, 1))
    for runner in runners:
        runner.encode(random_tokens(LONG, 2), "manual")
        runner.flush()
    prompt = random_tokens(900, 3)
    expect_same_prompts(*runners, prompt)
    steps = [logits_of_steps(runner, prompt, 9) for runner in runners]
    assert steps[0][0] == steps[1][0]
    assert all(torch.equal(*each) for each in zip(steps[0][1], steps[1][1], strict=True))
    for runner in runners:
        runner.delete("manual")
        assert all_is_back(runner)


def test_blocks_do_lie_elsewhere(model: Any) -> None:
    """What the test above is about happens."""
    runner = runner_that(model, True)
    runner.encode(random_tokens(LONG, 2), "manual")
    runner.flush()
    with runner.prefill(random_tokens(900, 3), "prefix") as done:
        blocks = done.kv.packed.request.entries()[:, 0]
        assert not np.array_equal(runner.packed.rows(blocks), blocks)


def test_segments_become_final_while_their_prompt_goes_on(model: Any) -> None:
    packing = Packing("int4", strategy=Strategy(0.3), segment_tokens=SEGMENT)
    said = []
    for beside in (True, False):
        runner = packed_runner(
            model,
            kv_dtype=replace(packing, beside=beside),
            max_tokens=16384,
            chunk_tokens=SEGMENT,
        )
        tokens = random_tokens(4 * SEGMENT + 100, 5)
        with runner.prefill(tokens, "full", reserve_tokens=20, remember=False) as done:
            runner.flush()
            report = done.report.packed
            assert (report.beside > 0) == beside
            said.append([each.basis for each in report.segments])
        assert all_is_gone(runner)
    assert said[0] == said[1]


def test_what_moved_meanwhile_is_packed_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody moves blocks within a chunk; if anybody did, its pages were right all the same."""
    behind, runner = runner_that(model, False), runner_that(model, True)
    tokens, placed, calls = random_tokens(350, 7), PackedPool.placed, []

    def moved(pool: PackedPool, table: Any) -> Any:
        calls.append(len(table))
        found = placed(pool, table).copy()
        if len(calls) == 1:
            # As layers begin to be packed, they lie where nobody has anything.
            found[:, 0] += 64 * pool.block_pages
        return found

    with behind.prefill(tokens, "prefix") as done:
        wanted = text_of(behind, done)
    monkeypatch.setattr(PackedPool, "placed", moved)
    with runner.prefill(tokens, "prefix") as done:
        got, report = text_of(runner, done), done.report.packed
    assert all(torch.equal(*each) for each in zip(got, wanted, strict=True))
    assert (report.beside, report.behind) == (0, 5)

"""A prefill that stops between chunks is the one that does not; released, it holds nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import random_tokens, tiny
from head_maps import classes_of, near, runner_of
from kvweave import InvalidArgument, PoolFull
from kvweave.policies import policy_of
from kvweave.runner import Runner
from kvweave.runner.prefill.prefill import Lookup
from kvweave.runner.prefill.prefill_job import PrefillJob


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def job_of(runner: Runner, tokens: Any, chunk: int, policy: str = "full") -> PrefillJob:
    lookup = Lookup(remember=False)
    prompt = runner.tokenize(tokens)
    return PrefillJob(runner._prefiller, prompt, policy_of(policy), lookup, chunk)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("chunk", [16, 40, 64, 500])
def test_stopping_between_chunks_changes_no_bit(model: Any, heads: bool, chunk: int) -> None:
    classes = classes_of(model) if heads else None
    runner = runner_of(model, classes, chunk_tokens=chunk)
    tokens = random_tokens(150, 3)
    with runner.prefill(tokens, "full", remember=False) as whole:
        wanted, report = whole.logits.clone(), whole.report
    job = job_of(runner, tokens, chunk)
    for end in [*range(chunk, 150, chunk), 150]:
        assert job.computed < end
        job.advance(end)
        assert job.computed == end
    with job.finish() as done:
        assert torch.equal(done.logits, wanted)
        assert done.exact
        assert done.report.rows_per_layer == report.rows_per_layer
        assert done.report.flops == report.flops
    assert runner.cache.stats()["held"] == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 149), max_size=6), st.booleans(), st.integers(1, 60))
def test_it_may_stop_anywhere(model: Any, stops: list[int], heads: bool, chunk: int) -> None:
    runner = runner_of(model, classes_of(model) if heads else None)
    tokens = random_tokens(150, 4)
    with runner.prefill(tokens, "full", remember=False) as whole:
        wanted = whole.logits.clone()
    job = job_of(runner, tokens, chunk)
    for stop in [*stops, 150]:
        before = job.computed
        job.advance(stop)
        assert job.computed == max(before, stop)
    with job.finish() as done:
        near(done.logits, wanted)
    assert runner.cache.stats()["held"] == 0


def test_what_goes_wrong_holds_nothing(model: Any) -> None:
    runner = runner_of(model, max_tokens=160)
    tokens = random_tokens(150, 5)
    job = job_of(runner, tokens, 32)
    job.advance(40)
    with pytest.raises(InvalidArgument, match="expected all 150 tokens computed, got 40"):
        job.finish()
    with pytest.raises(InvalidArgument, match="up to 150, got 151"):
        job.advance(151)
    with pytest.raises(PoolFull):
        job_of(runner, tokens, 32)
    job.release()
    job.release()
    assert runner.cache.stats()["held"] == 0
    runner.cache.check()


def test_policies_that_measure_are_computed_at_once(model: Any) -> None:
    runner = runner_of(model)
    tokens = random_tokens(150, 6)
    with runner.prefill(tokens, "cacheblend", remember=False) as whole:
        wanted = whole.logits.clone()
    job = job_of(runner, tokens, 32, "cacheblend")
    job.advance(10)
    assert job.computed == 150
    with job.finish() as done:
        assert torch.equal(done.logits, wanted)

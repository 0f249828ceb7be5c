"""Recovery policies: their plans as data, and what they do to a real model's logits."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvweave
from families import tiny
from kvweave import demo
from kvweave.cli.evaluate import evaluate as cli_evaluate
from kvweave.cli.generate import generate as cli_generate
from kvweave.lab.eval.evaluate import POLICIES as EVALUATED
from kvweave.lab.eval.text import speech, speech_names
from kvweave.policies import (
    DEFAULT_POLICY,
    CacheBlend,
    Epic,
    Full,
    Naive,
    Prefix,
    SparseX,
    policy_of,
)
from kvweave.policies.row_sets import highest, intervals, overflow, union
from kvweave.runner import Runner, Segment
from prompt_views import drive, view_of, views

POLICIES = [Full(), Prefix(), Naive(), Epic(), CacheBlend(), SparseX(), SparseX(boundary=0)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@given(view=views())
def test_plans_are_lawful(policy, view):
    plans = drive(policy, view)
    assert plans[-1].layer == view.layers - 1
    for plan in plans:
        assert np.array_equal(plan.rows, np.unique(plan.rows))
        assert plan.rows[0] >= view.prefix
        assert plan.rows[-1] == view.tokens - 1
        assert set(plan.score_rows) <= set(plan.rows)
        if policy.reuse == "segments":
            assert set(view.fresh) <= set(plan.rows)
    for before, after in itertools.pairwise(plans):
        assert after.layer - before.layer in (0, 1)
        if after.layer != 0:
            assert set(after.rows) <= set(before.rows)


@given(view=views(), seed=st.integers(0, 5))
def test_same_input_same_plan(view, seed):
    once, again = (drive(SparseX(), view, seed) for _ in range(2))
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(once, again, strict=True))


@given(view=views())
def test_cacheblend_shrinks_to_its_ratio(view):
    plans = drive(CacheBlend(ratio=0.2), view)
    sizes = [len(p.rows) - len(view.fresh) for p in plans if p.probe is None and p.layer > 0]
    assert sizes == sorted(sizes, reverse=True)
    assert abs(np.mean(sizes) - 0.2 * len(view.reused)) <= 1.0


@given(view=views(), blocks=st.integers(0, 3))
def test_overflow_is_one_block_on_each_side(view, blocks):
    near = set(overflow(intervals(view.fresh), view.reused, 16 * blocks))
    for row in view.reused:
        close = any(a - 16 * blocks <= row < b + 16 * blocks for a, b in intervals(view.fresh))
        assert (int(row) in near) == close


def test_highest_takes_the_earlier_of_equals_and_no_nan():
    scores = torch.tensor([1.0, torch.nan, 1.0, 3.0])
    rows = np.asarray([4, 5, 6, 9], np.int32)
    assert highest(scores, rows, 2).tolist() == [4, 9]
    assert highest(scores, rows, 3).tolist() == [4, 6, 9]
    assert highest(scores, rows, 0).tolist() == []
    assert union(rows, rows).tolist() == rows.tolist()


def test_tail_fallback_when_the_prompt_ends_in_reused_text():
    fresh = np.asarray([0, 1, 299], np.int32)
    view = view_of(300, fresh, ((2, 299),))
    plan = drive(SparseX(top_k=0, overflow=0), view)[-1]
    assert plan.rows.tolist() == [0, 1, *range(235, 300)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SparseX(boundary=-1),
        lambda: SparseX(top_k=1.5),
        lambda: SparseX(tail=0),
        lambda: CacheBlend(ratio=2.0),
        lambda: Epic(first=-1),
    ],
)
def test_bad_settings(make):
    with pytest.raises(kvweave.InvalidArgument, match="expected .* got"):
        make()


def test_a_policys_class_is_not_a_policy():
    with pytest.raises(kvweave.InvalidArgument, match=r"expected a name or SparseX\(\), got the"):
        policy_of(SparseX)


def test_one_place_names_the_default():
    for method in (Runner.prefill, Runner.generate, Runner.generate_batch, Runner.stream):
        assert inspect.signature(method).parameters["policy"].default is None
    assert Runner(tiny("llama"), check=False).generate([1, 2, 3]).report.policy == DEFAULT_POLICY
    assert f"or {DEFAULT_POLICY}." in str(inspect.signature(cli_generate))
    assert DEFAULT_POLICY in demo.POLICIES
    assert DEFAULT_POLICY in EVALUATED
    told = inspect.signature(cli_evaluate).parameters["policies"].default
    assert told == ",".join(EVALUATED)


# ---- on a real model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def speeches():
    return [speech(name) for name in speech_names() if name.startswith("195")]


@pytest.fixture(scope="module", params=["materialise", "share"])
def knowledge(request, smollm2, speeches):
    model, tokenizer = smollm2
    runner = Runner(model, tokenizer, max_tokens=8192, mode=request.param, progress=False)
    texts = [speech[:1200] for speech in speeches[:3]]
    for index, text in enumerate(texts):
        runner.insert(text, f"speech-{index}", "kb")
    parts = ["You are given three passages.\n"]
    for index, text in enumerate(texts):
        parts += [f"\nPassage {index}:\n", Segment(text=text, namespace="kb")]
    return runner, [*parts, "\n\nIn one sentence, what do the passages have in common?"]


def kl(runner, parts, policy, full):
    start = runner.tokenize(parts).segments[-1][1]
    with runner.prefill(parts, policy, logits_from=start, remember=False) as done:
        p, q = torch.log_softmax(full[start:], -1), torch.log_softmax(done.logits, -1)
        return float((p.exp() * (p - q)).sum(-1).mean()), done.report


@pytest.fixture(scope="module")
def exact(knowledge):
    runner, parts = knowledge
    with runner.prefill(parts, "full", logits_from=0, remember=False) as done:
        return done.logits.clone()


@pytest.mark.parametrize(
    "policy",
    [
        SparseX(boundary=0, top_k=1.0),
        SparseX(boundary=10_000),
        CacheBlend(1.0, 1.0),
        Epic(first=100_000),
    ],
    ids=["sparsex-all-rows", "sparsex-all-layers", "cacheblend-all", "epic-all"],
)
def test_recomputing_every_row_is_full(knowledge, exact, policy):
    apart, report = kl(*knowledge, policy, exact)
    assert report.reused_segment > 0
    assert apart < 1e-6


def test_each_policy_reuses_what_it_says(knowledge, exact):
    runner, parts = knowledge
    for policy in ("naive", "epic", "cacheblend", "sparsex"):
        apart, report = kl(runner, parts, policy, exact)
        assert report.reused_prefix + report.reused_segment + report.recomputed == report.tokens
        assert report.reused_segment > 0.8 * report.tokens
        assert report.row_share < 0.5
        assert 0 < apart < 0.5


def test_delta_rope_matters(knowledge, exact):
    rotated, _ = kl(*knowledge, Naive(), exact)
    left, report = kl(*knowledge, Naive(delta_rope=False), exact)
    assert report.policy == "naive-no-rope"
    assert report.mode == "materialise"
    assert left > 2 * rotated


def test_approximate_kv_never_becomes_an_exact_prefix(knowledge):
    runner, parts = knowledge
    runner.prefill(parts, "naive", namespace="approximate").release()
    first = runner.tokenize(parts).segments[0][0]
    with runner.prefill(parts, "prefix", namespace="approximate") as done:
        assert done.report.reused_prefix <= first


def test_sharing_holds_fewer_bytes(smollm2, speeches):
    held = {}
    for mode in ("materialise", "share"):
        runner = Runner(*smollm2, max_tokens=4096, mode=mode, progress=False, check=False)
        runner.insert(speeches[0][:4000], "speech")
        parts = ["Read.\n", Segment(text=speeches[0][:4000]), "\nAnswer:"]
        with runner.prefill(parts, "naive") as done:
            held[mode] = done.report.kv_bytes
    assert held["share"] < 0.2 * held["materialise"]

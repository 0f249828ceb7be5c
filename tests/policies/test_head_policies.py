"""`redknot` and `weave`: their plans as data, and carried out on a tiny model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from families import random_tokens, tiny
from head_maps import CLASSES, classes_of, near, runner_of
from kvweave.plan import Draft, LayerPlan, Probe, Salience
from kvweave.policies import Foresight, RedKnot, SparseX, Weave
from kvweave.policies.row_sets import heaviest, question
from kvweave.runner import Segment
from plan_emulator import Emulator
from prompt_views import drive, view_of, views

EAGER = RedKnot(dense_until=0.0, recent_n=4, restore_edge=0.0)
POLICIES = [
    RedKnot(),
    EAGER,
    RedKnot(repair=0, mass_thresh=1.0, ffn_share=1.0),
    Weave(),
    Weave(Foresight(mass=0.7, draft=0), EAGER),
]
WINDOW = np.asarray([[[64, 16], [0, 0]]] * 4, np.int32)
"""Four layers whose first head is local and whose second is full."""


def layers_of(steps):
    """The plans of all passes, drafts left out, and those of the last pass."""
    plans = [step for step in steps if isinstance(step, LayerPlan)]
    last = max(i for i, p in enumerate(plans) if p.layer == 0 and (i == 0 or plans[i - 1].layer))
    return plans, plans[last:]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@settings(max_examples=30)
@given(view=views(local=True), seed=st.integers(0, 3))
def test_plans_are_lawful(policy, view, seed):
    steps = drive(policy, view, seed)
    plans, last = layers_of(steps)
    assert plans[-1].layer == view.layers - 1
    first = len(plans) - len(last)
    # A first pass computes all fresh rows; a second the question's, and others as they are chosen.
    asked = set(question(view))
    for index, plan in enumerate(plans):
        rows, local = set(plan.rows), view.heads[plan.layer, :, 0] > 0
        again = first and index >= first
        wanted = set(view.fresh) & rows if again else set(view.fresh)
        assert (asked if again else wanted) <= rows
        assert view.prefix <= plan.rows[0]
        assert plan.rows[-1] == view.tokens - 1
        for part in (plan.score_rows, plan.local_rows, plan.ffn_rows):
            if part is not None:
                assert np.array_equal(part, np.unique(part))
                assert part.dtype == np.int32
                assert set(part) <= rows
        assert all(local[head] for head in plan.restore)
        if plan.ffn_rows is not None:
            assert wanted <= set(plan.ffn_rows)
        if plan.probe is Probe.SALIENCE:
            assert len(plan.score_rows)
            assert plan.ffn_rows is None
        if index < first:
            spared = (plan.local_rows, plan.ffn_rows, plan.restore)
            assert spared == (None, None, ())
            continue
        assert (plan.local_rows is None) == (not local.any())
        if plan.local_rows is not None:
            assert wanted <= set(plan.local_rows)
    for before, after in itertools.pairwise(plans):
        if before.probe is Probe.SALIENCE:
            assert after.layer == before.layer
            assert after.probe is None
            assert after.rows is before.rows
            assert after.local_rows is before.local_rows
        elif after is not last[0]:
            assert after.layer == before.layer + 1
    drafts = [index for index, step in enumerate(steps) if isinstance(step, Draft)]
    assert drafts in ([], [first])


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@settings(max_examples=30)
@given(view=views(local=True), seed=st.integers(0, 3))
def test_same_input_same_plan(policy, view, seed):
    once, again = (drive(policy, view, seed) for _ in range(2))
    assert len(once) == len(again)
    for a, b in zip(once, again, strict=True):
        if isinstance(a, Draft):
            assert a == b
            continue
        assert np.array_equal(a.rows, b.rows)
        assert (a.restore, a.probe) == (b.restore, b.probe)
        for one, other in ((a.local_rows, b.local_rows), (a.ffn_rows, b.ffn_rows)):
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one, other)


@given(view=views())
def test_redknot_without_local_heads_and_dense_is_full(view):
    policy = RedKnot(dense_until=1.0)
    for layer, plan in enumerate(drive(policy, view)):
        assert plan.layer == layer
        assert plan.rows.tolist() == list(range(view.prefix, view.tokens))
        assert (plan.probe, plan.local_rows, plan.ffn_rows, plan.restore) == (None, None, None, ())


@given(view=views(local=True))
def test_what_measures_nothing_asks_nothing(view):
    policy = RedKnot(dense_until=1.0, restore_edge=1.0)
    assert not policy.measures
    assert RedKnot().measures
    assert all(plan.probe is None for plan in drive(policy, view))


@given(view=views(local=True), mass=st.sampled_from([None, 0.6]))
def test_weave_can_be_foresight(view, mass):
    rows = Foresight(mass=mass)
    spared = RedKnot(dense_until=1.0, restore_edge=1.0, repair=10_000)
    ours, theirs = drive(Weave(rows, spared), view), drive(rows, view)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, Draft):
            assert a == b
            continue
        assert np.array_equal(a.rows, b.rows)
        assert a.probe is b.probe
        assert a.ffn_rows is None
        assert a.local_rows is None or np.array_equal(a.local_rows, b.rows)


def test_local_heads_are_repaired_where_a_window_leaves_its_segment():
    # Segments [2, 300) and [300, 400), one row a window wide at each seam and at the end.
    view = view_of(401, [0, 1, 400], ((2, 300), (300, 400)), heads=WINDOW)
    plan = drive(RedKnot(), view)[0]
    assert plan.local_rows.tolist() == [*range(2 + 64), *range(300, 401)]
    few = drive(RedKnot(repair=8), view)[0]
    assert few.local_rows.tolist() == [*range(16), *range(300, 308), *range(393, 401)]
    none = drive(RedKnot(repair=0), view)[0]
    assert none.local_rows.tolist() == [0, 1, 400]


def test_the_feed_forward_goes_where_the_mass_is():
    view = view_of(401, [0, 400], ((1, 400),))
    mass = torch.zeros(401)
    mass[[0, 50, 60, 70]] = torch.tensor([1000.0, 6.0, 3.0, 1.0])

    def measured(share, most=1.0):
        policy = RedKnot(dense_until=0.25, mass_thresh=share, recent_n=4, ffn_share=most)
        plans = drive(policy, view, measure=lambda *_: Salience(mass, torch.zeros(2)))
        assert [p.layer for p in plans] == [0, 1, 1, 2, 2, 3, 3]
        return plans[-1].ffn_rows.tolist()

    kept = [0, 397, 398, 399, 400]
    # The fresh row 0 holds nearly all mass, and is not counted: it is kept anyway.
    assert measured(0.5) == sorted([*kept, 50])
    assert measured(0.7) == sorted([*kept, 50, 60])
    assert measured(0.95) == sorted([*kept, 50, 60, 70])
    assert measured(0.95, 7 / 401) == sorted([*kept, 50, 60])
    assert measured(0.0, 0.0) == kept
    assert measured(1.0) == list(range(401))


def test_heads_with_attention_outside_their_window_are_restored():
    view = view_of(401, [0, 400], ((1, 400),), heads=WINDOW)
    plans = drive(RedKnot(), view, measure=lambda *_: Salience(torch.ones(401), torch.ones(2)))
    # Head 1 is full: there is nothing to restore. Layer 0 has a dense feed-forward, yet asks.
    assert [p.restore for p in plans if p.probe is None] == [(0,)] * 4
    assert plans[1].ffn_rows is None
    never = drive(RedKnot(restore_edge=1.0), view)
    assert {p.restore for p in never} == {()}
    nothing = Salience(torch.full((401,), torch.nan), torch.full((2,), torch.nan))
    unknown = drive(RedKnot(dense_until=0.25, recent_n=4), view, measure=lambda *_: nothing)
    assert {p.restore for p in unknown} == {()}
    # No mass to go by: as many rows as there is room for.
    assert [len(p.ffn_rows) for p in unknown if p.ffn_rows is not None] == [100] * 3


def test_one_token_and_nothing_reused():
    for view in (view_of(1, [0], (), heads=WINDOW), view_of(90, range(90), (), heads=WINDOW)):
        for policy in (RedKnot(restore_edge=1.0), Weave(redknot=RedKnot(restore_edge=1.0))):
            plans = drive(policy, view)
            assert all(len(p.rows) == view.tokens for p in plans)
            assert all(p.ffn_rows is None for p in plans)
            assert all(np.array_equal(p.local_rows, p.rows) for p in plans)


@given(
    mass=st.lists(st.floats(width=32) | st.just(0.0), max_size=40),
    share=st.floats(0.0, 1.0),
    most=st.integers(0, 50),
)
def test_heaviest_is_the_smallest_set(mass, share, most):
    rows = np.arange(3, 3 + 2 * len(mass), 2, dtype=np.int32)
    beside = torch.tensor([0.25, -1.0])
    taken, carried = heaviest(torch.tensor(mass), rows, share, most, beside)
    assert carried.tolist() == [0.25, -1.0]
    assert len(taken) <= min(most, len(rows))
    known = np.nan_to_num(np.asarray(mass, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    weight = np.maximum(known, 0.0)
    order = np.argsort(-weight, kind="stable")[: len(taken)]
    assert taken.tolist() == sorted(rows[order].tolist())
    if weight.sum() > 0.0 and share < 1.0 and len(taken) > 1:
        assert weight[order[:-1]].sum() <= share * weight.sum() * (1 + 1e-5)
    if weight.sum() > 0.0 and len(taken) < min(most, len(rows)):
        assert weight[order].sum() >= share * weight.sum() * (1 - 1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RedKnot(dense_until=1.5),
        lambda: RedKnot(mass_thresh=-0.1),
        lambda: RedKnot(ffn_share=float("nan")),
        lambda: RedKnot(restore_edge=2.0),
        lambda: RedKnot(recent_n=0),
        lambda: RedKnot(repair=-1),
        lambda: Weave(redknot=SparseX()),
        lambda: Weave(SparseX()),
    ],
)
def test_bad_settings(make):
    with pytest.raises(kvweave.InvalidArgument, match=r"expected .* got"):
        make()


# ---- carried out --------------------------------------------------------------------------

HASTY = RedKnot(dense_until=0.25, mass_thresh=0.8, recent_n=5, restore_edge=0.3)
RUN = [
    SparseX(),
    HASTY,
    RedKnot(dense_until=1.0, restore_edge=1.0, repair=0),
    RedKnot(dense_until=0.5, recent_n=5, restore_edge=1.0, repair=3),
    Foresight(share=0.3),
    Weave(Foresight(share=0.3, draft=17), HASTY),
    Weave(Foresight(count=40, draft=0), RedKnot(dense_until=0.5, recent_n=5, restore_edge=1.0)),
    Weave(Foresight(count=0), HASTY),
]


SPANS = ((10, 70), (70, 131), (150, 199))
"""Segments of a prompt of 200 tokens: two that touch, and one up to the last token."""


def documents(runner, tokens):
    """The prompt's parts, its segments being in the runner's knowledge base."""
    parts, end = [], 0
    for start, stop in SPANS:
        runner.insert(tokens[start:stop].tolist(), f"at {start}", "kb")
        parts += [Segment(tokens=tokens[end:start].tolist())] * (start > end)
        parts.append(Segment(tokens=tokens[start:stop].tolist(), namespace="kb"))
        end = stop
    return [*parts, Segment(tokens=tokens[end:].tolist())]


@pytest.mark.parametrize(
    ("classes", "mode"), [(None, "share"), (CLASSES, "materialise"), (CLASSES, "share")]
)
@pytest.mark.parametrize("policy", RUN, ids=repr)
def test_the_executor_does_what_plans_say(policy, classes, mode):
    model, tokens = tiny("llama"), random_tokens(200, 3)
    heads = classes_of(model, (None,) if classes is None else classes)
    runner = runner_of(model, None if classes is None else heads, mode=mode)
    emulator = Emulator(runner.spec, heads)
    wanted, rows = emulator.prefill(tokens, SPANS, policy)
    parts = documents(runner, tokens)
    with runner.prefill(parts, policy, logits_from=199, remember=False) as done:
        assert done.report.reused_segment == 60 + 61 + 49
        assert rows[-1] == 199
        near(done.logits, wanted[-1:])
        plans, _ = layers_of(emulator.plans)
        restored = {(p.layer, head) for p in plans for head in p.restore}
        assert set(done.report.restored) == restored
        if classes is not None and policy is HASTY:
            assert restored


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize(
    "policy", [RedKnot(dense_until=1.0), RedKnot(0.0, mass_thresh=1.0, ffn_share=1.0)], ids=repr
)
def test_redknot_that_spares_nothing_is_full(policy, mode):
    model, tokens = tiny("qwen3"), random_tokens(200, 4)
    runner = runner_of(model, mode=mode)
    parts = documents(runner, tokens)
    with runner.prefill(parts, "full", logits_from=0, remember=False) as done:
        wanted = done.logits.clone()
    with runner.prefill(parts, policy, logits_from=0, remember=False) as done:
        assert done.report.reused_segment == 60 + 61 + 49
        near(done.logits, wanted)

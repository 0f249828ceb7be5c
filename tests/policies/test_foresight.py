"""`foresight`: its plans as data, and what they come to on tiny models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cached_prompts import answer_of, two_documents
from families import random_tokens, reference, tiny
from head_maps import classes_of, near, runner_of
from kvweave.errors import InvalidArgument
from kvweave.plan import Draft, LayerPlan, Probe
from kvweave.policies import Foresight, Naive, policy_of
from kvweave.policies.depth import first_layer
from kvweave.policies.row_sets import averaged, question, tail
from plan_emulator import Emulator
from plan_policies import Overheard
from prompt_views import drive, noise, view_of, views

SOME = [
    Foresight(),
    Foresight(share=0.5, draft=0, depth=0.0, near=1, ask=3),
    Foresight(count=7, depth=1.0),
    Foresight(mass=0.8),
    Foresight(mass=0.5, most=1.0, near=1, draft=1, drafts=3),
]


def taken_apart(steps):
    """The plans of the first pass (none where nothing is asked), the drafts, those of the last."""
    plans = [step for step in steps if isinstance(step, LayerPlan)]
    starts = [index for index, plan in enumerate(plans) if plan.layer == 0]
    drafts = [step for step in steps if isinstance(step, Draft)]
    return plans[: starts[-1]], drafts, plans[starts[-1] :]


@pytest.mark.parametrize("policy", SOME, ids=repr)
@settings(max_examples=30)
@given(view=views(), seed=st.integers(0, 3))
def test_plans_are_lawful(policy, view, seed):
    steps = drive(policy, view, seed)
    look, drafts, last = taken_apart(steps)
    budget = policy.budget(len(view.reused))
    for plans in (look, last):
        assert [plan.layer for plan in plans] in ([], list(range(view.layers)))
        for plan in plans:
            assert plan.rows.dtype == np.int32
            assert np.array_equal(plan.rows, np.unique(plan.rows))
            assert plan.rows[0] >= view.prefix
            assert plan.rows[-1] == view.tokens - 1
            assert plan.rows is plans[0].rows
    assert len(last) == view.layers
    assert all(plan.probe is None for plan in last)
    asks = budget > 0 and (budget < len(view.reused) or policy.mass is not None)
    assert (len(look) > 0) == asks
    if not asks:
        assert drafts == []
        return
    drafted = Draft(policy.draft, first_layer(policy.depth, view.layers), policy.drafts)
    assert drafts == [drafted] * (policy.draft > 0)
    assert steps.index(drafts[0]) == view.layers if drafts else True
    asking = np.union1d(question(view)[-policy.ask :], tail(view, 64))
    assert np.array_equal(look[0].rows, np.union1d(view.fresh, asking))
    for plan in look:
        measured = plan.layer >= first_layer(policy.depth, view.layers)
        assert plan.probe is (Probe.SCORES if measured else None)
        assert np.array_equal(plan.score_rows, asking if measured else [])
    rows, asked = last[0].rows, question(view)
    assert set(asked) <= set(rows)
    chosen = np.setdiff1d(rows, asked)
    most = budget if budget < len(view.reused) else view.tokens
    assert 0 < len(chosen) <= most
    # Fresh rows before the first segment see nothing that changes; those behind it compete.
    between = view.fresh[view.fresh > view.segments[0][0]]
    candidates = np.setdiff1d(np.union1d(view.reused, between), asked)
    assert set(chosen) <= set(candidates)
    assert policy.mass is not None or len(chosen) == budget


@pytest.mark.parametrize("policy", SOME, ids=repr)
@settings(max_examples=20)
@given(view=views(), seed=st.integers(0, 3))
def test_same_input_same_plan(policy, view, seed):
    once, again = (drive(policy, view, seed) for _ in range(2))
    assert len(once) == len(again)
    for a, b in zip(once, again, strict=True):
        assert a == b if isinstance(a, Draft) else np.array_equal(a.rows, b.rows)


@pytest.mark.parametrize("layers", [1, 2, 3, 24])
def test_the_deeper_layers_are_asked_and_at_least_one(layers):
    view = view_of(101, [99, 100], [(0, 99)], layers=layers)
    for depth in (0.0, 1 / 3, 0.5, 1.0):
        look, drafts, last = taken_apart(drive(Foresight(depth=depth), view))
        asked = [plan.layer for plan in look if plan.probe is not None]
        assert asked == list(range(min(int(depth * layers), layers - 1), layers))
        assert drafts[0].since == asked[0]
        assert [plan.layer for plan in last] == list(range(layers))


NOTHING = [Foresight(share=0.0), Foresight(count=0), Foresight(mass=0.0), Foresight(share=1e-9)]


@pytest.mark.parametrize("policy", NOTHING, ids=repr)
@given(view=views())
def test_no_budget_is_naive(policy, view):
    ours, naive = drive(policy, view), drive(Naive(), view)
    assert [plan.layer for plan in ours] == [plan.layer for plan in naive]
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(ours, naive, strict=True))
    assert all(plan.probe is None for plan in ours)


@given(view=views(), count=st.booleans())
def test_everything_is_every_row_at_once(view, count):
    policy = Foresight(count=10_000) if count else Foresight(share=1.0)
    plans = drive(policy, view)
    assert [plan.layer for plan in plans] == list(range(view.layers))
    assert all(np.array_equal(plan.rows, view.after_prefix) for plan in plans)
    assert all(plan.probe is None for plan in plans)


@given(view=views())
def test_nothing_reused_is_one_pass_of_all_rows(view):
    whole = view_of(view.tokens, range(view.tokens), (), layers=view.layers)
    for policy in (Foresight(), Foresight(mass=0.9, most=1.0)):
        plans = drive(policy, whole)
        assert [plan.layer for plan in plans] == list(range(view.layers))
        assert all(len(plan.rows) == view.tokens for plan in plans)


def test_who_asks():
    def asked(view, **settings):
        return next(p for p in drive(Foresight(**settings), view) if p.probe).score_rows.tolist()

    documents = [(2, 150), (150, 200)]
    # A question of one token behind fresh text, of more than `ask`, and longer than the documents.
    one = view_of(202, [0, 1, 200, 201], documents)
    assert asked(one) == [200, 201]
    assert asked(one, ask=1) == [201]
    long = view_of(1000, [0, 1, *range(200, 1000)], documents)
    assert asked(long) == [*range(1000 - 512, 1000)]
    assert asked(long, ask=2000) == [*range(200, 1000)]
    # None: the prompt ends in reused text, whose last token is computed; its last 64 tokens ask.
    assert asked(view_of(200, [0, 1, 199], [(2, 150), (150, 199)])) == [*range(150, 200)]
    assert asked(view_of(500, [499], [(0, 499)])) == [*range(499 - 64, 500)]


def answered(mass, drafted=None):
    """What a probe of a made-up layer and a draft of it say."""

    def measure(view, step, generator):
        if isinstance(step, Draft):
            return None if drafted is None else torch.tensor(drafted, dtype=torch.float32)
        return None if step.probe is None else torch.tensor(mass, dtype=torch.float32)

    return measure


def chosen_of(policy, mass, drafted=None, view=None):
    view = view or view_of(len(mass), [len(mass) - 1], [(0, len(mass) - 1)], layers=3)
    _, _, last = taken_apart(drive(policy, view, measure=answered(mass, drafted)))
    return np.intersect1d(last[0].rows, view.reused).tolist()


def test_the_question_and_the_draft_weigh_alike():
    view = view_of(9, [7, 8], [(0, 7)], layers=3)
    mass, drafted = [0, 12, 0, 8, 0, 0, 0, 9, 9], [0, 0, 0, 0, 39, 30, 0, 900, 900]
    pick = Foresight(count=2, near=1, depth=1.0, draft=10)
    # Two rows ask: 6 and 4 a row. Ten tokens of the draft give 3.9 and 3 each.
    assert chosen_of(pick, mass, drafted, view) == [1, 3]
    mass[3] = 7
    assert chosen_of(pick, mass, drafted, view) == [1, 4]
    # Without room for a draft the question decides alone.
    assert chosen_of(pick, mass, None, view) == [1, 3]


@given(
    mass=st.lists(st.floats(0.0, 1.0, width=16) | st.just(float("nan")), min_size=3, max_size=60),
    share=st.floats(0.05, 0.99),
    most=st.floats(0.1, 1.0),
    near_=st.sampled_from([1, 3, 5]),
)
def test_mass_is_the_fewest_rows_that_hold_it(mass, share, most, near_):
    policy = Foresight(mass=share, most=most, near=near_, draft=0, depth=1.0)
    room = round(most * (len(mass) - 1))
    if room == 0:
        return
    chosen = chosen_of(policy, mass)
    # Means over neighbours, by plain loops; what is no number weighs nothing.
    known = np.nan_to_num(np.asarray(mass, np.float64))
    half = near_ // 2
    weight = np.asarray([known[max(0, i - half) : i + half + 1].mean() for i in range(len(mass))])[
        :-1
    ]
    total, held = weight.sum(), weight[chosen].sum()
    assert len(chosen) <= room
    if total == 0.0:
        assert len(chosen) == room
        return
    left = np.delete(weight, chosen)
    # The chosen weigh most; together they hold the share unless there was no room for more.
    assert not len(left) or weight[chosen].min() >= left.max() - 1e-6
    assert len(chosen) == room or held >= share * total - 1e-5
    # Without the lightest of them they would not hold it.
    assert held - weight[chosen].min() <= share * total + 1e-5


@pytest.mark.parametrize("near_", [1, 3])
def test_what_is_no_number_is_chosen_last(near_):
    view = view_of(101, [100], [(0, 60), (60, 100)], layers=4)

    def broken(some):
        def measure(view, step, generator):
            found = noise(view, step, generator)
            if found is not None:
                found[some] = torch.nan
            return found

        return measure

    policy = Foresight(share=0.5, near=near_)
    found = taken_apart(drive(policy, view, measure=broken(slice(10, 50))))[2][0].rows
    inside = set(range(10 + near_ // 2, 50 - near_ // 2))
    assert not set(found) & inside
    # Of equals the first: nothing else tells the tokens apart.
    found = taken_apart(drive(policy, view, measure=broken(slice(None))))[2][0].rows
    assert found.tolist() == [*range(50), 100]


def test_means_of_neighbours():
    scores = torch.tensor([3.0, 0.0, 0.0, torch.nan, 6.0])
    assert averaged(scores, 1) is scores
    assert averaged(scores, 3).tolist() == [1.5, 1.0, 0.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Foresight(share=0.1, mass=0.5),
        lambda: Foresight(count=1, share=0.1),
        lambda: Foresight(share=1.5),
        lambda: Foresight(mass=-0.1),
        lambda: Foresight(most=float("nan")),
        lambda: Foresight(depth=2.0),
        lambda: Foresight(count=-1),
        lambda: Foresight(draft=-1),
        lambda: Foresight(drafts=0),
        lambda: Foresight(drafts=1.5),
        lambda: Foresight(ask=0),
        lambda: Foresight(near=2),
        lambda: Foresight(near=-1),
    ],
)
def test_bad_settings(make):
    with pytest.raises(InvalidArgument, match=r"foresight: expected .* got"):
        make()


def test_it_has_a_name():
    assert policy_of("foresight") == Foresight()


# ---- carried out --------------------------------------------------------------------------

MODES = ("materialise", "share")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fresh_end", [True, False])
def test_no_budget_is_naive_bit_for_bit(mode, fresh_end):
    runner = runner_of(tiny("llama"), mode=mode)
    _, parts, _ = two_documents(runner, 150, fresh_end)
    naive, told = answer_of(runner, parts, "naive")
    for policy in NOTHING:
        logits, report = answer_of(runner, parts, policy)
        assert torch.equal(logits, naive)
        assert report.flops == told.flops
        assert [one.kind for one in report.passes] == ["layers"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gemma3", "llama-yarn"])
def test_everything_is_full_but_for_fulls_own_noise(mode, family):
    model = tiny(family)
    runner = runner_of(model, mode=mode)
    tokens, parts, _ = two_documents(runner, 150)
    start = 136
    exact = reference(model, tokens)[start:]
    whole, _ = answer_of(runner, parts, "full", logits_from=start)
    noise_ = float((whole - exact).abs().max())
    for policy in (Foresight(share=1.0), Foresight(count=500), Foresight(mass=1.0, most=1.0)):
        logits, report = answer_of(runner, parts, policy, logits_from=start)
        assert report.reused_segment == 43 + 76
        assert float((logits - exact).abs().max()) <= 4 * noise_ + 1e-6
    # The passes before the last leave nothing: what is measured first changes no answer.
    assert [one.kind for one in report.passes] == ["layers", "draft", "layers"]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_of_few_layers(layers, mode):
    model = tiny("llama", num_hidden_layers=layers)
    runner = runner_of(model, mode=mode)
    tokens, parts, spans = two_documents(runner, 150)
    ours, theirs = Overheard(Foresight()), Overheard(Foresight())
    wanted, _ = Emulator(runner.spec, classes_of(model, (None,))).prefill(tokens, spans, theirs)
    logits, report = answer_of(runner, parts, ours)
    near(logits, wanted[-1:])
    assert len(ours.said) == layers + 1
    assert report.rows_per_layer == [sum(r) for r in zip(*_layer_rows(report), strict=True)]


def _layer_rows(report):
    return [one.rows_per_layer for one in report.passes if one.kind == "layers"]


def test_passes_add_up():
    runner = runner_of(tiny("llama"))
    _, parts, _ = two_documents(runner, 159)
    naive = answer_of(runner, parts, "naive")[1]
    _, report = answer_of(runner, parts, Foresight(share=0.25, draft=3))
    look, draft, last = report.passes
    assert [look.kind, draft.kind, last.kind] == ["layers", "draft", "layers"]
    assert (look.tokens, draft.tokens, last.tokens) == (0, 3, 0)
    assert look.rows_per_layer == naive.rows_per_layer
    assert draft.rows_per_layer == [3] * 4
    assert last.rows_per_layer[0] >= round(0.25 * report.reused_segment)
    for part, count in report.flops.items():
        assert count == sum(one.flops[part] for one in report.passes)
    # The first pass is naive's but for its logits, which the draft asks for, and its scores.
    assert look.flops["logits"] == 0
    for part in ("projections", "attention", "feed_forward"):
        assert look.flops[part] == naive.flops[part]
    assert draft.flops["logits"] == 4 * naive.flops["logits"]
    assert last.flops["scores"] == 0 < look.flops["scores"]
    assert all(one.seconds > 0 for one in report.passes)
    plain = report.to_dict()
    assert [one["kind"] for one in plain["passes"]] == ["layers", "draft", "layers"]


def test_nothing_to_reuse_is_full_bit_for_bit():
    runner = runner_of(tiny("llama"))
    tokens = random_tokens(70, 2).tolist()
    whole, _ = answer_of(runner, tokens, "full")
    logits, report = answer_of(runner, tokens, "foresight")
    assert torch.equal(logits, whole)
    assert [one.kind for one in report.passes] == ["layers"]
    one, _ = answer_of(runner, tokens[:1], "foresight")
    assert torch.equal(one, answer_of(runner, tokens[:1], "full")[0])


def test_the_second_time_is_the_first():
    runner = runner_of(tiny("qwen3"), mode="share")
    _, parts, _ = two_documents(runner, 159)
    once, told = answer_of(runner, parts, "foresight")
    again, told_again = answer_of(runner, parts, "foresight")
    assert torch.equal(once, again)
    assert told.flops == told_again.flops


def test_it_is_nearer_than_naive_where_the_question_looks():
    """Everything the question's rows look at is recomputed when the budget holds it."""
    model = tiny("llama")
    runner = runner_of(model)
    tokens, parts, _ = two_documents(runner, 159)
    exact = reference(model, tokens)[-1:]
    apart = {
        share: float((answer_of(runner, parts, Foresight(share=share))[0] - exact).abs().max())
        for share in (0.0, 0.9)
    }
    assert apart[0.9] < apart[0.0]

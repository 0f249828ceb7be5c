"""`prophet`, `infoflow` and `random`: their plans as data, what they measure, and a real model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from families import random_tokens, reference, tiny
from head_maps import CLASSES, classes_of, near, runner_of
from kvweave.lab.eval.text import speech, speech_names
from kvweave.plan import LayerPlan, Probe
from kvweave.policies import InfoFlow, Naive, Prophet, RandomRows, policy_of
from kvweave.policies.row_sets import question
from kvweave.runner import Runner, Segment
from plan_emulator import Emulator
from plan_policies import Overheard
from prompt_views import drive, noise, view_of, views

RIVALS = [
    Prophet(),
    Prophet(count=3),
    InfoFlow(),
    InfoFlow(score="sum", layers=(1, 0)),
    InfoFlow(score="value", share=0.5),
    RandomRows(),
    RandomRows(count=7, seed=3),
]


def passes_of(plans):
    """The plans of each pass: one begins at layer 0."""
    starts = [i for i, plan in enumerate(plans) if plan.layer == 0] + [len(plans)]
    return [plans[a:b] for a, b in itertools.pairwise(starts)]


def wanted(policy, view):
    """How many reused tokens a policy has to recompute."""
    count = round(policy.share * len(view.reused)) if policy.count is None else policy.count
    return min(count, len(view.reused))


@pytest.mark.parametrize("policy", RIVALS, ids=repr)
@settings(max_examples=20)
@given(view=views(), seed=st.integers(0, 3))
def test_plans_are_lawful(policy, view, seed):
    passes = passes_of(drive(policy, view, seed))
    assert len(passes) <= policy.passes
    for plans in passes:
        assert [plan.layer for plan in plans] == list(range(len(plans)))
        for plan in plans:
            assert plan.rows.dtype == np.int32
            assert np.array_equal(plan.rows, np.unique(plan.rows))
            assert set(view.fresh) <= set(plan.rows)
            assert set(plan.score_rows) <= set(plan.rows)
            assert (plan.probe is None) == (len(plan.score_rows) == 0)
    assert len(passes[-1]) == view.layers
    chosen = np.setdiff1d(passes[-1][0].rows, view.fresh)
    assert set(chosen) <= set(view.reused)
    assert len(chosen) == wanted(policy, view)
    for plan in passes[-1]:
        assert plan.probe is None
        assert plan.rows is passes[-1][0].rows
    for plan in (plan for plans in passes[:-1] for plan in plans):
        assert np.array_equal(plan.rows, view.fresh)


@pytest.mark.parametrize("policy", RIVALS, ids=repr)
@settings(max_examples=20)
@given(view=views(), seed=st.integers(0, 3))
def test_same_input_same_plan(policy, view, seed):
    once, again = (drive(policy, view, seed) for _ in range(2))
    assert [p.layer for p in once] == [p.layer for p in again]
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("make", [Prophet, InfoFlow, RandomRows], ids=lambda make: make.name)
@given(view=views(), count=st.sampled_from([None, 0, 10_000]))
def test_none_is_naive_and_all_is_everything_and_neither_asks(make, view, count):
    share = 0.0 if count is None else 0.5
    plans = drive(make(share=share, count=count), view)
    assert [plan.layer for plan in plans] == list(range(view.layers))
    assert all(plan.probe is None for plan in plans)
    rows = np.union1d(view.fresh, view.reused) if count else view.fresh
    assert all(np.array_equal(plan.rows, rows) for plan in plans)


@dataclass
class Answers:
    """A measuring that keeps what it said."""

    measure: Any = noise
    said: list[Any] = field(default_factory=list)

    def __call__(self, view, plan, generator):
        found = self.measure(view, plan, generator)
        self.said += [(plan.layer, found)] * (found is not None)
        return found


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (Prophet(share=0.3), lambda layers: range(layers)),
        (InfoFlow(share=0.3), lambda layers: InfoFlow().asked(layers)),
        (InfoFlow(count=5, score="sum", layers=(1,)), lambda layers: [1]),
    ],
    ids=["prophet", "infoflow", "infoflow-sum"],
)
@given(view=views(), seed=st.integers(0, 3))
def test_the_highest_sums_over_the_asked_layers_are_chosen(policy, asked, view, seed):
    answers = Answers()
    plans = drive(policy, view, seed, answers)
    count = wanted(policy, view)
    if not 0 < count < len(view.reused):
        assert answers.said == []
        return
    assert [layer for layer, _ in answers.said] == list(asked(view.layers))
    total = np.sum([found.numpy() for _, found in answers.said], axis=0, dtype=np.float32)
    order = view.reused[np.argsort(-total[view.reused], kind="stable")]
    chosen = np.setdiff1d(plans[-1].rows, view.fresh)
    # Sums in f32 may fall together in another order: what is left out scores no more.
    least, most = total[chosen].min(), total[order[count:]].max()
    assert least >= most - 1e-5
    assert len(chosen) == count


@given(view=views())
def test_the_question_is_the_fresh_text_behind_the_last_segment(view):
    asking = question(view)
    assert asking[-1] == view.tokens - 1
    assert np.array_equal(asking, np.arange(asking[0], view.tokens))
    assert not len(view.segments) or asking[0] == view.segments[-1][1]
    for policy in (Prophet(share=0.5), InfoFlow(share=0.5)):
        asked = [p.score_rows for p in drive(policy, view) if p.probe is not None]
        assert all(np.array_equal(rows, asking) for rows in asked)


@pytest.mark.parametrize("policy", [Prophet(share=0.5), InfoFlow(share=0.5)], ids=repr)
def test_what_is_no_number_is_chosen_last(policy):
    view = view_of(101, [100], [(0, 60), (60, 100)], layers=30)

    def broken(some):
        def measure(view, plan, generator):
            found = noise(view, plan, generator)
            if found is not None:
                found[some] = torch.nan
            return found

        return measure

    some = drive(policy, view, measure=broken(slice(10, 50)))[-1].rows
    assert not set(some) & set(range(10, 50))
    assert len(some) == 51
    # Of equals the first: nothing else tells the tokens apart.
    assert drive(policy, view, measure=broken(slice(None)))[-1].rows.tolist() == [*range(50), 100]


def test_infoflow_asks_the_papers_layers_where_a_model_has_them():
    asked = InfoFlow().asked
    assert asked(40) == asked(32) == asked(26) == (22, 23, 24, 25)
    assert asked(24) == (15, 16, 17, 18)
    assert asked(1) == (0,)
    for layers in range(1, 90):
        among = asked(layers)
        assert 1 <= len(among) <= 4
        assert 0 <= among[0] <= among[-1] < layers
    assert InfoFlow(layers=(3, 1, 3)).asked(4) == (1, 3)
    with pytest.raises(kvweave.InvalidArgument, match=r"expected layers below 3, got \(1, 3\)"):
        InfoFlow(layers=(1, 3)).asked(3)


def test_infoflow_stops_where_it_has_asked():
    view = view_of(101, [100], [(0, 100)], layers=40)
    first, second = passes_of(drive(InfoFlow(), view))
    assert (len(first), len(second)) == (26, 40)
    assert [p.layer for p in first if p.probe is Probe.NORMS] == [22, 23, 24, 25]


def test_random_rows_are_drawn_by_seed_and_each_as_often():
    view = view_of(101, [100], [(0, 100)])
    drawn = np.zeros(100)
    for seed in range(400):
        drawn[RandomRows(share=0.25, seed=seed).drawn(view)] += 1
    # Binomial(400, 1/4): 100 ± 8.7; five of these off is one in two million.
    assert drawn.min() > 56
    assert drawn.max() < 144
    longer = view_of(102, [101], [(0, 100)])
    assert not np.array_equal(RandomRows().drawn(view), RandomRows().drawn(longer))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prophet(share=1.5),
        lambda: Prophet(share=float("nan")),
        lambda: Prophet(count=-1),
        lambda: InfoFlow(share=-0.1),
        lambda: InfoFlow(count=-1),
        lambda: InfoFlow(score="entropy"),
        lambda: InfoFlow(layers=()),
        lambda: InfoFlow(layers=(3, -1)),
        lambda: RandomRows(share=2.0),
        lambda: RandomRows(seed=-1),
    ],
)
def test_bad_settings(make):
    with pytest.raises(kvweave.InvalidArgument, match="expected .* got"):
        make()


def test_they_have_names():
    for name in ("prophet", "infoflow", "random"):
        assert policy_of(name).name == name


# ---- carried out --------------------------------------------------------------------------


SPANS = ((10, 70), (70, 131), (150, 186))
"""Segments of a prompt of 200 tokens; the first and third gap and the end are fresh."""


def documents(runner, tokens):
    """The prompt's parts, its segments being in the runner's knowledge base."""
    parts, end = [], 0
    for start, stop in SPANS:
        runner.insert(tokens[start:stop].tolist(), f"at {start}", "kb")
        parts += [Segment(tokens=tokens[end:start].tolist())] * (start > end)
        parts.append(Segment(tokens=tokens[start:stop].tolist(), namespace="kb"))
        end = stop
    return [*parts, Segment(tokens=tokens[end:].tolist())]


CARRIED = [
    Prophet(share=0.3),
    InfoFlow(share=0.3),
    InfoFlow(share=0.3, score="sum", layers=(0, 2)),
    InfoFlow(share=0.3, score="value"),
    RandomRows(share=0.3),
]


@pytest.mark.parametrize(
    ("classes", "mode"), [(None, "share"), (None, "materialise"), (CLASSES, "share")]
)
@pytest.mark.parametrize("policy", CARRIED, ids=repr)
def test_the_executor_measures_and_computes_what_plain_torch_does(policy, classes, mode):
    model, tokens = tiny("llama"), random_tokens(200, 3)
    heads = classes_of(model, (None,) if classes is None else classes)
    runner = runner_of(model, None if classes is None else heads, mode=mode)
    ours, theirs = Overheard(policy), Overheard(policy)
    logits, rows = Emulator(runner.spec, heads).prefill(tokens, SPANS, theirs)
    with runner.prefill(documents(runner, tokens), ours, logits_from=199, remember=False) as done:
        assert done.report.reused_segment == 60 + 61 + 36
        assert (len(theirs.said) > 0) == policy.measures
        for got, expected in zip(ours.said, theirs.said, strict=True):
            torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-4)
        for got, expected in zip(ours.steps, theirs.steps, strict=True):
            assert np.array_equal(got.rows, expected.rows)
        assert rows[-1] == 199
        near(done.logits, logits[-1:])


@dataclass
class Asking:
    """Every row in every layer, all asked for by one probe from some rows; keeps the answers."""

    probe: Probe
    asking: Any
    said: list[torch.Tensor] = field(default_factory=list)
    reuse: str = "none"
    name: str = "asking"
    delta_rope: bool = True
    measures: bool = True
    passes: int = 1

    def rewrites_segments(self, layers):
        return False

    def plan(self, prompt):
        for layer in range(prompt.layers):
            rows = prompt.after_prefix
            self.said.append((yield LayerPlan(layer, rows, self.probe, self.asking)))


@pytest.mark.parametrize("probe", [Probe.CONTEXT, Probe.NORMS, Probe.VALUES], ids=lambda p: p.value)
def test_nobody_asks_or_nothing_is_there_to_be_looked_at(probe):
    model, tokens = tiny("qwen3"), random_tokens(40, 5)
    runner = runner_of(model)
    nobody = Asking(probe, np.zeros(0, np.int32))
    first = Asking(probe, np.arange(1, dtype=np.int32))
    for policy in (nobody, first):
        with runner.prefill(tokens, policy, logits_from=0, remember=False) as done:
            near(done.logits, reference(model, tokens))
        assert len(policy.said) == 4
        assert all(found.shape == (40,) for found in policy.said)
    assert all(not found.any() for found in nobody.said)
    # The first row sees itself alone, and that is not its context.
    assert all(not found[1:].any() for found in first.said)
    assert all((found[0] == 0) == (probe is Probe.CONTEXT) for found in first.said)


@dataclass
class Again(Asking):
    """Some layers of the last rows, once or twice, and then every row in all of them."""

    def plan(self, prompt):
        for layers in (2, 1, 3):
            for layer in range(layers):
                yield LayerPlan(layer, prompt.after_prefix[-7:])
        for layer in range(prompt.layers):
            yield LayerPlan(layer, prompt.after_prefix)


def test_a_pass_may_end_where_the_next_begins():
    model, tokens = tiny("llama"), random_tokens(60, 6)
    runner = runner_of(model)
    with runner.prefill(tokens, Again(Probe.SCORES, None), logits_from=0, remember=False) as done:
        near(done.logits, reference(model, tokens))


# ---- on a real model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def knowledge(smollm2):
    model, tokenizer = smollm2
    runner = Runner(model, tokenizer, max_tokens=8192, mode="share", progress=False)
    names = [name for name in speech_names() if name.startswith("195")][:3]
    parts = ["You are given three passages.\n"]
    for index, name in enumerate(names):
        text = speech(name)[:500]
        runner.insert(text, name, "kb")
        parts += [f"\nPassage {index}:\n", Segment(text=text, namespace="kb")]
    return runner, [*parts, "\n\nIn one sentence, what do the passages have in common?"]


def apart(knowledge, policy, full):
    """KL to full of the question's tokens, in nats, and the report."""
    runner, parts = knowledge
    start = runner.tokenize(parts).segments[-1][1]
    with runner.prefill(parts, policy, logits_from=start, remember=False) as done:
        p, q = torch.log_softmax(full[start:], -1), torch.log_softmax(done.logits, -1)
        return float((p.exp() * (p - q)).sum(-1).mean()), done.report


@pytest.fixture(scope="module")
def exact(knowledge):
    runner, parts = knowledge
    with runner.prefill(parts, "full", logits_from=0, remember=False) as done:
        return done.logits.clone()


@pytest.fixture(scope="module")
def naive(knowledge, exact):
    return apart(knowledge, Naive(), exact)[0]


@pytest.mark.parametrize("make", [Prophet, InfoFlow, RandomRows], ids=lambda make: make.name)
def test_everything_is_full_and_nothing_is_naive(knowledge, exact, naive, make):
    everything, report = apart(knowledge, make(share=1.0), exact)
    assert report.reused_segment > 0
    assert everything < 1e-6
    assert apart(knowledge, make(share=0.0), exact)[0] == naive


def test_what_the_question_chose_beats_what_nobody_did(knowledge, exact, naive):
    drawn = [apart(knowledge, RandomRows(share=0.2, seed=seed), exact)[0] for seed in range(2)]
    assert max(drawn) < naive
    for policy in (Prophet(), InfoFlow(share=0.2)):
        chosen, report = apart(knowledge, policy, exact)
        assert report.row_share < 0.5
        assert chosen < 0.5 * min(drawn)

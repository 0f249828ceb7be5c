"""The protocol between policies and who carries them out: all is carried out or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import InvalidArgument
from kvweave.plan import Draft, LayerPlan, Probe, PromptView, Salience
from kvweave.plan_walk import EARLY, Begin, Deeper, Further, LayerTask, PlanWalk
from kvweave.policies import POLICIES
from prompt_views import noise, view_of, views

TOKENS, LAYERS = 12, 3


class Recorder:
    """Carries a walk out without a model: states are the positions that have some.

    Every task is held to what the states allow, by sets and not by the walk's own rules.
    """

    def __init__(self, tokens: int = TOKENS, layers: int = LAYERS) -> None:
        self.tokens, self.layers = tokens, layers
        self.states: set[int] = set()
        self.at = layers - 1
        self.done: list[Any] = []

    def run(self, walk: PlanWalk, answer: Callable[[Any], Any]) -> None:
        with walk:
            task = walk.advance()
            while task is not None:
                if isinstance(task, Draft):
                    assert self.at == self.layers - 1
                    assert self.tokens - 1 in self.states
                    self.done.append(task)
                    task = walk.advance(answer(task))
                else:
                    task = walk.advance(self.layer(task, walk, answer))

    def layer(self, task: LayerTask, walk: PlanWalk, answer: Callable[[Any], Any]) -> Any:
        plan = task.plan
        rows = set(plan.rows.tolist())
        self.done.append(plan)
        if isinstance(task, Further):
            assert (self.at, plan.layer, plan.probe, plan.restore) == (0, 0, None, ())
            assert rows
            assert not rows & self.states
            self.states |= rows
        elif isinstance(task, Begin):
            assert plan.layer == 0
            self.states = rows
        else:
            assert isinstance(task, Deeper)
            assert plan.layer == self.at + 1
            assert rows <= self.states
        while plan.probe in EARLY:
            narrower = walk.measured(answer(plan))
            assert narrower.layer == plan.layer
            assert set(narrower.rows.tolist()) <= rows
            if plan.probe is Probe.SALIENCE:
                assert np.array_equal(narrower.rows, plan.rows)
                assert narrower.local_rows is plan.local_rows
            plan, rows = narrower, set(narrower.rows.tolist())
            self.done.append(plan)
        if not isinstance(task, Further):
            self.states = rows
        self.at = plan.layer
        for some in (plan.score_rows, plan.local_rows, plan.ffn_rows):
            assert some is None or set(some.tolist()) <= rows
        assert all(0 <= row < self.tokens for row in rows)
        return None if plan.probe is None else answer(plan)


def told(step: Any, tokens: int = TOKENS) -> Any:
    """What a step may have measured."""
    if isinstance(step, Draft):
        return torch.ones(tokens)
    if step.probe is Probe.SALIENCE:
        return Salience(torch.ones(tokens), torch.ones(2))
    return torch.ones(len(step.rows) if step.probe is Probe.DEVIATION else tokens)


class Said:
    """A policy's generator of given steps, that hears how it ends; `raises` instead of a last."""

    def __init__(self, steps: list[Any], raises: BaseException | None = None) -> None:
        self.steps, self.raises = steps, raises
        self.given, self.ended = 0, 0
        self.heard: list[Any] = []

    def plan(self) -> Any:
        try:
            for step in self.steps:
                self.given += 1
                self.heard.append((yield step))
            if self.raises is not None:
                raise self.raises
        finally:
            self.ended += 1


def walked(said: Said, logits_from: int = TOKENS - 1, **options: Any) -> Recorder:
    """Carries out steps; the policy is always at its end then, whatever happened."""
    plans, recorder = said.plan(), Recorder()
    try:
        walk = PlanWalk(plans, LAYERS, TOKENS, logits_from=logits_from, **options)
        recorder.run(walk, told)
    finally:
        assert plans.gi_frame is None
        assert said.ended == 1
    return recorder


def rows_of(*rows: int) -> np.ndarray:
    return np.asarray(rows, np.int32)


ALL = np.arange(TOKENS, dtype=np.int32)
WHOLE = [LayerPlan(layer, ALL) for layer in range(LAYERS)]


# ---- any sequence of steps ------------------------------------------------------------------


@st.composite
def sequences(draw: Any) -> list[Any]:
    """Steps that are mostly lawful: passes, layer 0 once more, probes, drafts, and slips."""
    sets = st.sets(st.integers(0, TOKENS - 1), min_size=1).map(lambda s: rows_of(*sorted(s)))
    steps: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(sets | st.just(ALL))
        for layer in range(draw(st.sampled_from([LAYERS, LAYERS, 2]))):
            probe = draw(st.none() | st.sampled_from(Probe))
            asked = rows[: draw(st.integers(0, len(rows)))]
            plan = LayerPlan(layer, rows, probe, asked)
            steps.append(plan)
            if probe in EARLY:
                if probe is Probe.DEVIATION:
                    rows = rows[draw(st.integers(0, len(rows) - 1)) :]
                then = draw(st.sampled_from([None, None, Probe.SCORES, *EARLY]))
                steps.append(LayerPlan(layer, rows, then, ffn_rows=rows[:1] if not then else None))
            if layer == 0 and draw(st.integers(0, 3)) == 0:
                steps.append(LayerPlan(0, np.union1d(rows, draw(sets)).astype(np.int32)))
                rows = steps[-1].rows
            rows = rows[draw(st.sampled_from([0, 0, len(rows) // 2])) :]
        if draw(st.booleans()):
            drafts = draw(st.integers(1, 3))
            steps.append(Draft(draw(st.integers(1, 3)), draw(st.integers(0, LAYERS - 1)), drafts))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        steps[draw(st.integers(0, len(steps) - 1))] = draw(slips(sets))
    return steps


def slips(sets: Any) -> Any:
    """Steps of any kind, at any place."""
    plans = st.builds(
        LayerPlan,
        st.integers(-1, LAYERS) | st.just("0"),
        sets | st.sampled_from([rows_of(), rows_of(3, 3), rows_of(5, 2), rows_of(-1, 4)]),
        st.none() | st.sampled_from(Probe) | st.just("scores"),
        sets,
        st.none() | sets,
        st.none() | sets,
        st.sampled_from([(), (0,), ("a",), 1]),
    )
    odd = st.sampled_from([None, 3, "full", Draft(0), Draft(1, LAYERS), Draft("8"), (0, ALL)])
    return plans | odd | st.builds(Draft, st.integers(-1, 3), st.integers(-1, LAYERS))


@given(steps=sequences())
def test_any_steps_are_carried_out_or_refused(steps: list[Any]) -> None:
    """What is handed out is what was said, in order; nothing that was said is passed over."""
    said = Said(steps)
    recorder = Recorder()
    plans, refused = said.plan(), False
    try:
        recorder.run(PlanWalk(plans, LAYERS, TOKENS, logits_from=TOKENS - 1), told)
    except InvalidArgument:
        refused = True
    assert plans.gi_frame is None
    assert said.ended == 1
    assert refused or said.given == len(steps)
    done, states = iter(recorder.done), set[int]()
    again = before = None
    carried = steps[: said.given - refused]
    for step in carried:
        if isinstance(step, Draft):
            assert next(done) == step
            before = step
            continue
        # Layer 0 once more: what is new of its rows, which may be nothing.
        twice = isinstance(before, LayerPlan) and before.layer == step.layer == 0
        again = twice and before.probe not in EARLY
        rows = set(step.rows.tolist()) - (states if again else set())
        states = states | rows if again else rows
        if rows:
            plan = next(done)
            assert (plan.layer, plan.probe, plan.restore) == (step.layer, step.probe, step.restore)
            assert set(plan.rows.tolist()) == rows
            if not again:
                assert np.array_equal(plan.score_rows, step.score_rows)
                assert (plan.ffn_rows is None) == (step.ffn_rows is None)
        before = step
    # What the policy said last may have been refused only once the end showed that rows lack.
    assert next(done, None) is None or refused


@given(steps=sequences(), at=st.integers(0, 20))
def test_a_policy_that_raises_is_heard_and_closed(steps: list[Any], at: int) -> None:
    with pytest.raises((InvalidArgument, ZeroDivisionError)):
        walked(Said(steps[:at], ZeroDivisionError("the policy's own")))


@given(steps=sequences(), at=st.integers(0, 20))
def test_who_carries_out_may_stop_anywhere(steps: list[Any], at: int) -> None:
    """An error of the model's: the policy is closed all the same."""
    said, count = Said(steps), 0

    def stop(step: Any) -> Any:
        nonlocal count
        count += 1
        if count > at:
            raise MemoryError
        return told(step)

    plans = said.plan()
    with suppress(InvalidArgument, MemoryError):
        Recorder().run(PlanWalk(plans, LAYERS, TOKENS, logits_from=TOKENS - 1), stop)
    assert plans.gi_frame is None


# ---- policies as they are -------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@given(view=views(), seed=st.integers(0, 3))
def test_every_policy_walks_to_its_end(name: str, view: PromptView, seed: int) -> None:
    """Each step is one task with the same rows, but for what layer 0 has computed already."""
    policy, generator = POLICIES[name](), torch.Generator().manual_seed(seed)
    steps: list[Any] = []

    def plans() -> Any:
        inner = policy.plan(view)
        answer = None
        while True:
            try:
                steps.append(inner.send(answer))
            except StopIteration:
                return
            answer = yield steps[-1]

    recorder = Recorder(view.tokens, view.layers)
    walk = PlanWalk(
        plans(), view.layers, view.tokens, done=view.prefix, logits_from=view.tokens - 1
    )
    recorder.run(walk, lambda step: noise(view, step, generator))
    assert recorder.at == view.layers - 1
    first = [step for step in steps if isinstance(step, LayerPlan) and step.layer == 0]
    twice = [a for a, b in pairwise(first) if a.probe not in EARLY and a is not b]
    assert len(steps) - len(twice) <= len(recorder.done) <= len(steps)


# ---- what is refused ------------------------------------------------------------------------


def early(probe: Probe, then: LayerPlan) -> list[Any]:
    return [LayerPlan(0, ALL, probe, ALL[-2:]), then]


def last(**fields: Any) -> list[Any]:
    return [*WHOLE[:2], replace(WHOLE[2], **fields)]


REFUSED: dict[str, tuple[list[Any], str]] = {
    "nothing": ([], "layer plan: expected 3 layers, got 0"),
    "nothing at the end": ([*WHOLE, None], "expected a LayerPlan or a Draft, got NoneType"),
    "another thing": (["full"], "policy: expected a LayerPlan or a Draft, got str"),
    "layer 1 first": (WHOLE[1:], "layer plan: expected layer 0 first, got 1"),
    "a skipped layer": ([WHOLE[0], WHOLE[2]], "layer plan: expected layer 1, got 2"),
    "a layer again": ([*WHOLE[:2], WHOLE[1]], "layer plan: expected layer 2, got 1"),
    "layer 0 a third time": ([WHOLE[0]] * 3, "layer plan: expected layer 1, got 0"),
    "behind the last": ([*WHOLE, LayerPlan(3, ALL)], "expected layer 0 first, got 3"),
    "an early end": (WHOLE[:2], "layer plan: expected 3 layers, got 2"),
    "a second pass that ends early": (WHOLE + WHOLE[:2], "expected 3 layers, got 2"),
    "no layer": ([LayerPlan("0", ALL)], "layer plan: expected a layer, got str"),
    "no rows": ([LayerPlan(0, rows_of())], "layer plan: expected at least one row, got none"),
    "rows beyond": ([LayerPlan(0, rows_of(3, 12))], r"expected rows in \[0, 12\), got 3 to 12"),
    "unsorted rows": ([LayerPlan(0, rows_of(4, 3))], "rows: expected sorted positions, each once"),
    "a row twice": ([LayerPlan(0, rows_of(4, 4))], "rows: expected sorted positions, each once"),
    "a list": ([LayerPlan(0, [1, 2])], r"rows: expected positions i32 \[R\], got list"),
    "floats": ([LayerPlan(0, ALL / 2)], r"rows: expected positions i32 \[R\], got float64 \[12\]"),
    "a matrix": ([LayerPlan(0, ALL[None])], r"rows: expected .*, got int32 \[1, 12\]"),
    "rows without states": (
        [LayerPlan(0, ALL[2:]), WHOLE[1]],
        "layer plan: expected rows that the layer before computed, got 2 others",
    ),
    "no probe": ([LayerPlan(0, ALL, "scores")], "layer plan: expected a Probe or none, got str"),
    "score rows": ([LayerPlan(0, ALL[:3], Probe.SCORES, ALL[3:])], "score_rows: expected some of"),
    "local rows": (last(local_rows=rows_of(3, 99)), "local_rows: expected some of the plan's rows"),
    "ffn rows": (last(ffn_rows=rows_of(3, 99)), "ffn_rows: expected some of the plan's rows"),
    "heads": (last(restore=("a",)), "restore: expected heads, got str"),
    "no heads": (last(restore=1), "restore: expected a tuple of heads, got int"),
    "no last row": (last(rows=ALL[:-1]), "logits: expected position 11 among the computed rows"),
    "a probe in layer 0 once more": (
        [WHOLE[0], LayerPlan(0, ALL, Probe.SCORES, ALL)],
        "layer plan: expected nothing measured in layer 0 once more, got scores",
    ),
    "a draft first": ([Draft(2)], "draft: expected a pass with the last token before it, got none"),
    "a draft in between": ([*WHOLE[:2], Draft(2)], "draft: expected all 3 layers before it, got 2"),
    "a draft without the last token": (
        [*last(rows=ALL[:-1]), Draft(2)],
        "draft: expected a pass with the last token before it, got none",
    ),
    "no drafts": ([*WHOLE, Draft(2, 0, 0)], "draft: expected drafts >= 1, got 0"),
    "half a draft": ([*WHOLE, Draft(2, 0, 0.5)], "draft: expected drafts, got float"),
    "an empty draft": ([*WHOLE, Draft(0)], "draft: expected tokens >= 1 and 0 <= since < 3, got 0"),
    "a deep draft": ([*WHOLE, Draft(1, 3)], "since < 3, got 1 and 3"),
    "no end behind deviation": ([LayerPlan(0, ALL, Probe.DEVIATION)], "the same layer after a dev"),
    "another layer behind deviation": (
        early(Probe.DEVIATION, WHOLE[1]),
        "layer plan: expected the same layer after a deviation probe",
    ),
    "deviation twice": (
        early(Probe.DEVIATION, LayerPlan(0, ALL, Probe.DEVIATION)),
        "layer plan: expected no further probe before attention, got deviation",
    ),
    "other rows behind salience": (
        early(Probe.SALIENCE, LayerPlan(0, ALL[1:])),
        "layer plan: expected the same layer and rows after a salience probe",
    ),
    "a draft behind salience": (early(Probe.SALIENCE, Draft(1)), "after a salience probe"),
    "salience twice": (
        early(Probe.SALIENCE, LayerPlan(0, ALL, Probe.SALIENCE)),
        "layer plan: expected no further probe before attention, got salience",
    ),
    "other local rows behind salience": (
        early(Probe.SALIENCE, LayerPlan(0, ALL, local_rows=ALL[3:])),
        "local_rows: expected those of before the salience probe, got others",
    ),
    "chosen before it is known": (
        [LayerPlan(0, ALL, Probe.SALIENCE, restore=(1,))],
        "expected ffn_rows and restore behind the salience probe, got them before",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_out_is_refused(case: str) -> None:
    steps, says = REFUSED[case]
    with pytest.raises(InvalidArgument, match=says):
        walked(Said(steps))


def test_rows_that_are_done_are_not_named() -> None:
    with pytest.raises(InvalidArgument, match=r"expected rows in \[5, 12\), got 0 to 11"):
        walked(Said(WHOLE), done=5)


@pytest.mark.parametrize("given_", [None, [WHOLE[0]], iter(WHOLE)])
def test_a_policy_is_a_generator(given_: Any) -> None:
    with pytest.raises(InvalidArgument, match="policy: expected a generator of plans, got"):
        PlanWalk(given_, LAYERS, TOKENS, logits_from=0)


def test_a_refusal_is_heard_though_the_policy_will_not_close() -> None:
    def stubborn() -> Any:
        try:
            yield LayerPlan(2, ALL)
        finally:
            raise ZeroDivisionError

    with pytest.raises(InvalidArgument, match="expected layer 0 first"):
        PlanWalk(stubborn(), LAYERS, TOKENS, logits_from=0).advance()


def test_behind_its_end_a_walk_says_nothing() -> None:
    walk = PlanWalk(Said(WHOLE[:1]).plan(), LAYERS, TOKENS, logits_from=0)
    assert isinstance(walk.advance(), Begin)
    with pytest.raises(InvalidArgument, match="expected a probe that is answered before attention"):
        walk.measured(torch.zeros(1))
    for says in ("expected 3 layers, got 1", "expected no question behind its end"):
        with pytest.raises(InvalidArgument, match=says):
            walk.advance()
    walk.close()


def test_a_probe_before_attention_is_answered_first() -> None:
    walk = PlanWalk(Said(early(Probe.SALIENCE, WHOLE[0])).plan(), LAYERS, TOKENS, logits_from=0)
    walk.advance()
    with pytest.raises(InvalidArgument, match="expected what was measured before attention first"):
        walk.advance()
    assert walk.measured(told(LayerPlan(0, ALL, Probe.SALIENCE))).probe is None


# ---- what is handed out ---------------------------------------------------------------------


def test_where_no_logits_are_wanted_layers_may_be_empty() -> None:
    steps = [LayerPlan(layer, rows_of()) for layer in range(LAYERS)]
    recorder = walked(Said(steps), logits_from=TOKENS)
    assert [len(plan.rows) for plan in recorder.done] == [0, 0, 0]


def test_logits_from_a_position_on() -> None:
    walked(Said(WHOLE), logits_from=0)
    with pytest.raises(InvalidArgument, match="expected position 4 among .*, got 7 rows without"):
        walked(Said(last(rows=ALL[5:])), logits_from=4)


def test_the_answer_of_a_task_goes_to_the_policy() -> None:
    steps = [LayerPlan(0, ALL, Probe.SCORES, ALL), *WHOLE[1:], Draft(1)]
    said = Said(steps)
    walked(said)
    assert [heard is None for heard in said.heard] == [False, True, True, False]


def test_equal_rows_are_one_array_and_nobody_elses() -> None:
    """Also where a policy fills one buffer anew."""
    buffer = np.arange(TOKENS)
    rows = []

    def plans() -> Any:
        yield LayerPlan(0, buffer)
        yield LayerPlan(1, buffer.copy())
        buffer[:] = np.roll(buffer, 1)
        buffer.sort()
        buffer[0] = 1
        yield LayerPlan(2, buffer[1:].astype(np.uint8))

    walk = PlanWalk(plans(), LAYERS, TOKENS, logits_from=5)
    while (task := walk.advance()) is not None:
        assert isinstance(task, LayerTask)
        rows.append(task.plan.rows)
    assert rows[0] is rows[1]
    assert rows[0] is not buffer
    assert [array.dtype for array in rows] == [np.int32] * 3
    assert rows[0].tolist() == list(range(TOKENS))
    assert rows[2].tolist() == list(range(1, TOKENS))


def test_rows_stay_one_array_behind_layer_0_once_more() -> None:
    """Who carries plans out makes tables anew where the array is another one."""
    some, all_but_one, deep = rows_of(0, TOKENS - 1), ALL[1:], 6

    def plans() -> Any:
        yield LayerPlan(0, some[1:])
        yield LayerPlan(0, all_but_one)
        for layer in range(1, deep):
            yield LayerPlan(layer, all_but_one.copy())

    walk = PlanWalk(plans(), deep, TOKENS, logits_from=TOKENS - 1)
    tasks = []
    while (task := walk.advance()) is not None:
        tasks.append(task)
    deeper = [task.plan.rows for task in tasks if isinstance(task, Deeper)]
    assert len(deeper) == deep - 1
    assert all(rows is deeper[0] for rows in deeper)


def test_a_prompt_of_one_layer() -> None:
    view = view_of(3, [0, 1, 2], (), layers=1)
    recorder = Recorder(3, 1)
    steps = [LayerPlan(0, view.fresh), LayerPlan(0, view.fresh), Draft(1)]
    recorder.run(PlanWalk(Said(steps).plan(), 1, 3, logits_from=0), lambda s: told(s, 3))
    assert len(recorder.done) == 3

"""Canaries: what drifts is switched off, what is exact never, and nothing is held afterwards."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from families import random_tokens, tiny
from kvweave.errors import InvalidArgument, PolicySwitchedOff, UncertifiedPolicy
from kvweave.policies import Foresight, Naive, policy_of
from kvweave.runner import Canary, Runner, Segment
from kvweave.runner.lossy.mean_bound import mean_at_least, surely_above
from policy_profiles import profile

# ---- how sure a mean is ----------------------------------------------------------------------


@given(values=st.lists(st.floats(0.0, 100.0), max_size=20), level=st.floats(0.5, 0.999))
def test_what_is_sure_is_below_the_mean(values: list[float], level: float) -> None:
    low = mean_at_least(values, level)
    assert 0.0 <= low <= (np.mean(values) if values else 0.0) + 1e-9


@given(values=st.lists(st.floats(0.01, 9.0), min_size=1, max_size=20), bound=st.floats(0.1, 9.0))
def test_a_bound_below_what_is_sure_is_surely_passed(values: list[float], bound: float) -> None:
    low = mean_at_least(values, 0.99)
    if abs(low - bound) > 1e-6:
        assert surely_above(values, bound, 0.99) == (bound < low)


def test_what_is_sure_is_seldom_wrong_however_often_one_looks() -> None:
    numbers = np.random.default_rng(0)
    runs, wrong = 400, 0
    for _ in range(runs):
        # Skewed as KLs are: most of the mean 0.05 lies in few large values.
        values = 0.05 * numbers.lognormal(-2.0, 2.0, 100)
        wrong += any(surely_above(values[:n].tolist(), 0.05, 0.95) for n in range(1, 101))
    assert wrong / runs <= 0.05
    seen = [0.2] * 20
    assert min(n for n in range(21) if surely_above(seen[:n], 0.05, 0.99)) <= 8


def test_no_number_is_above_any_bound() -> None:
    for value in (math.nan, math.inf):
        assert surely_above([0.0, value], 1e9, 0.99)
        assert mean_at_least([0.0, value], 0.99) == math.inf
    assert not surely_above([], 0.1, 0.99)
    assert mean_at_least([0.0] * 50, 0.99) == 0.0


# ---- on a random model -----------------------------------------------------------------------


@dataclass(frozen=True)
class Unrotated(Naive):
    """A policy that drifts: segments as they are, with keys at their old positions."""

    delta_rope: bool = False
    name: ClassVar[str] = "unrotated"


@dataclass(frozen=True)
class Everything(Foresight):
    """A policy that reuses segments and computes all of them again."""

    name: ClassVar[str] = "everything"

    def budget(self, reused: int) -> int:
        return reused


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny("llama", num_hidden_layers=2)
    # Attention that is sharp enough for a wrong position to matter.
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 30.0
        layer.self_attn.k_proj.weight.data *= 30.0
        layer.self_attn.v_proj.weight.data *= 10.0
    return made


SEGMENT = random_tokens(64, 1).tolist()


def runner_of(model: Any, tokens: int = 2048, **settings: Any) -> Runner:
    """A runner that holds a segment."""
    runner = Runner(model, max_tokens=tokens, progress=False, check=False, **settings)
    runner.insert(SEGMENT, "one")
    return runner


def prompt_of(seed: int = 2, segment: list[int] = SEGMENT) -> list[Segment]:
    """Fresh tokens, the segment, fresh tokens."""
    before, after = random_tokens(40, seed).tolist(), random_tokens(8, seed + 100).tolist()
    return [
        Segment(tokens=before, namespace="before"),
        Segment(tokens=segment),
        Segment(tokens=after, namespace="after"),
    ]


def answered(runner: Runner, policy: Any, requests: int) -> list[str]:
    """The policies that answered so many requests."""
    said = []
    for number in range(requests):
        with runner.prefill(prompt_of(number), policy, remember=False) as done:
            said.append(done.report.policy)
    return said


@pytest.fixture(autouse=True)
def _uncertified_is_no_news(request: pytest.FixtureRequest) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertifiedPolicy)
        yield


def test_what_drifts_is_switched_off(model: Any) -> None:
    runner = runner_of(model, canary=Canary(share=1.0, bound=1e-3))
    with pytest.warns(PolicySwitchedOff, match="unrotated drifted, .* full answers") as said:
        answers = answered(runner, Unrotated(), 40)
    told = [w for w in said if w.category is PolicySwitchedOff]
    assert len(told) == 1
    assert told[0].filename == __file__
    on = answers.index("full")
    assert 1 <= on < 40
    assert answers == ["unrotated"] * on + ["full"] * (40 - on)
    seen = runner.canary.state.policies["unrotated"]
    assert seen.drifted
    assert seen.low > 1e-3
    assert seen.checked == on
    with runner.prefill(prompt_of(99), Unrotated(), remember=False) as done:
        assert done.report.policy == "full"
        assert "canary: unrotated drifted" in done.report.mode_reason
        with runner.prefill(prompt_of(99), "full", remember=False) as full:
            assert torch.equal(done.logits, full.logits)
    assert "canary" in runner.generate(prompt_of(98), Unrotated()).report.mode_reason
    # Only this policy is.
    assert answered(runner, Everything(), 1) == ["everything"]


def test_what_is_exact_never_is(model: Any) -> None:
    runner = runner_of(model, canary=Canary(share=1.0, bound=1e-6, tokens=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolicySwitchedOff)
        assert set(answered(runner, Everything(), 20)) == {"everything"}
    state = runner.canary.state
    assert (state.requests, state.checked, state.skipped) == (20, 20, 0)
    assert state.policies["everything"].mean < 1e-6
    assert not state.policies["everything"].drifted


def test_what_reuses_no_segment_is_no_request_of_a_canarys(model: Any) -> None:
    runner = runner_of(model, canary=Canary(share=1.0, bound=1e-6))
    for policy in ("full", "prefix"):
        runner.prefill(prompt_of(), policy).release()
    runner.prefill(random_tokens(50, 5).tolist(), "naive", remember=False).release()
    assert runner.canary.state.requests == 0


def test_logits_that_are_no_number_are_drift(model: Any) -> None:
    runner = runner_of(model, canary=Canary(share=1.0, bound=100.0))
    # The cached segment holds NaN, as a defect of memory or of an op might leave it.
    runner._prefiller.pages.fill_(torch.nan)
    with pytest.warns(PolicySwitchedOff, match="naive drifted"):
        assert answered(runner, "naive", 2) == ["naive", "full"]
    seen = runner.canary.state.policies["naive"]
    assert (seen.checked, seen.low) == (1, math.inf)


def test_without_room_a_request_is_skipped_and_served(model: Any) -> None:
    # 112 of the request and 112 of full are more than there is, the segment given up or not.
    runner = runner_of(model, tokens=200, canary=Canary(share=1.0, bound=1e-3))
    with runner.prefill(prompt_of(), Unrotated(), remember=False) as done:
        assert done.report.policy == "unrotated"
        assert done.report.canary.kl is None
        assert torch.isfinite(done.logits).all()
    state = runner.canary.state
    assert (state.requests, state.checked, state.skipped) == (1, 0, 1)
    assert state.policies == {}
    assert runner.cache.stats()["held"] == runner.cache.stats()["frozen"]


def test_what_it_costs_is_told(model: Any) -> None:
    runner = runner_of(model, canary=Canary(share=1.0, bound=100.0, tokens=4))
    with runner.prefill(prompt_of(), "naive", remember=False) as done:
        check = done.report.canary
        with runner.prefill(prompt_of(), "full", remember=False) as full:
            assert check.flops == sum(full.report.flops.values())
        assert check.tokens == 4
        assert 0.0 < check.kl < 100.0
        assert check.seconds > 0.0
        assert done.report.to_dict()["canary"]["tokens"] == 4
    state = runner.canary.state
    assert (state.flops, state.seconds) == (check.flops, check.seconds)
    with runner.prefill(prompt_of(), "naive", remember=False, watched=False) as done:
        assert done.report.canary is None


def test_kl_is_that_of_fulls_own_answer(model: Any) -> None:
    runner = runner_of(model, canary=Canary(share=1.0, bound=100.0, tokens=4))
    said = runner.generate(prompt_of(), "full", max_new_tokens=4, remember=False).tokens
    with runner.prefill(prompt_of(), "naive", remember=False) as done:
        found = done.report.canary.kl
        with runner.prefill(prompt_of(), "full", remember=False) as full:
            pairs = [(full.logits, done.logits)]
            pairs.append((runner.extend(full, said[:3]), runner.extend(done, said[:3])))
    p, q = (
        torch.log_softmax(torch.cat(logits).double(), -1) for logits in zip(*pairs, strict=True)
    )
    assert found == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def test_a_canary_changes_no_answer_and_holds_nothing(model: Any) -> None:
    plain = runner_of(model)
    runner = runner_of(model, canary=Canary(share=1.0, bound=100.0, tokens=4))
    before = runner.cache.stats()
    for number in range(4):
        said = [
            one.generate(prompt_of(number), "naive", max_new_tokens=20, remember=False).tokens
            for one in (plain, runner)
        ]
        assert said[0] == said[1]
    after = runner.cache.stats()
    assert runner.canary.state.checked == 4
    assert (after["held"], after["frozen"]) == (before["held"], before["frozen"])
    runner.cache.check()


def turns_of(count: int) -> list[Any]:
    """A prompt with a segment, and further turns of fresh text, or with the segment once more."""
    turns: list[Any] = [prompt_of(0)]
    for number in range(1, count):
        new = random_tokens(9, 200 + number).tolist()
        turns.append(prompt_of(number) if number % 3 == 0 else new)
    return turns


def whole_of(runner: Runner, turns: list[Any], said: list[list[int]]) -> list[int]:
    """The tokens of some turns with the answers between them."""
    parts = [runner.tokenize(turn).tokens.tolist() for turn in turns]
    answers = [*said, []]
    return [token for pair in zip(parts, answers, strict=True) for part in pair for token in part]


def test_a_conversation_that_drifts_goes_on_by_full(model: Any) -> None:
    runner, turns = runner_of(model, canary=Canary(share=1.0, bound=1e-3)), turns_of(12)
    by, said, told = [], list[list[int]](), list[str]()
    how = {"max_new_tokens": 3, "stop": []}
    with runner.conversation(Unrotated(), remember=False) as talk:
        for number, turn in enumerate(turns):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always", PolicySwitchedOff)
                answer = talk.ask(turn, **how)
            told += [w.filename for w in heard if w.category is PolicySwitchedOff]
            by.append(answer.report.policy)
            if by[-1] == "full":
                whole = whole_of(runner, turns[: number + 1], said)
                wanted = runner.generate(whole, "full", remember=False, **how)
                assert answer.tokens == wanted.tokens
                assert "canary: unrotated drifted" in answer.report.mode_reason
                assert answer.report.canary is None
            said.append(answer.tokens)
        reports = talk.reports
    on = by.index("full")
    assert by == ["unrotated"] * on + ["full"] * (12 - on)
    assert told == [__file__]
    assert all(report.canary.kl is not None for report in reports[:on])
    # All of it is computed anew once, and then only what is new.
    assert reports[on].recomputed == reports[on].tokens
    assert reports[on + 1].settled_before == reports[on].tokens + 2
    state = runner.canary.state
    assert (state.requests, state.checked) == (on, on)
    assert 1 <= on < 10
    runner.cache.check()
    assert runner.cache.stats()["held"] == runner.cache.stats()["frozen"]


def test_turns_are_compared_with_full_over_the_whole_conversation(model: Any) -> None:
    plain = runner_of(model)
    runner = runner_of(model, canary=Canary(share=1.0, bound=100.0, tokens=3))
    turns, answers = turns_of(4), []
    for one, seen in ((plain, True), (runner, True), (runner, False)):
        with one.conversation("naive", remember=False, watched=seen) as talk:
            answers.append([talk.ask(turn, max_new_tokens=3, stop=[]).tokens for turn in turns])
            checks = [report.canary for report in talk.reports]
            assert [check is not None for check in checks] == [one is runner and seen] * 4
    assert answers[0] == answers[1] == answers[2]
    state = runner.canary.state
    assert (state.requests, state.checked, state.skipped) == (4, 4, 0)
    whole = whole_of(runner, turns[:3], answers[0][:2])
    with runner.prefill(whole, "full", remember=False) as full:
        with runner.conversation("naive", remember=False) as talk:
            for turn in turns[:3]:
                talk.ask(turn, max_new_tokens=3, stop=[])
            check = talk.reports[-1].canary
        assert check.flops == sum(full.report.flops.values())
        assert check.tokens == 3
    assert set(answered(runner, Everything(), 2)) == {"everything"}
    with runner.conversation(Everything(), remember=False) as talk:
        for number, turn in enumerate(turns):
            talk.ask(turn, max_new_tokens=3, stop=[])
            assert talk.reports[number].canary.kl < 1e-6
    assert runner.cache.stats()["held"] == runner.cache.stats()["frozen"]


def test_a_turn_without_room_to_compare_is_answered(model: Any) -> None:
    runner = runner_of(model, tokens=288, canary=Canary(share=1.0, bound=100.0))
    with runner.conversation("naive", remember=False) as talk:
        reports = [
            talk.ask(turn, max_new_tokens=3, stop=[]).report
            for turn in (prompt_of(), random_tokens(60, 9).tolist())
        ]
    assert [report.canary.kl is None for report in reports] == [False, True]
    assert [report.policy for report in reports] == ["naive"] * 2
    assert runner.canary.state.skipped == 1
    assert runner.cache.stats()["held"] == runner.cache.stats()["frozen"]


def test_the_same_seed_draws_the_same_requests(model: Any) -> None:
    drawn = [Canary(share=0.2, seed=3).draws(i) for i in range(2000)]
    assert drawn == [Canary(share=0.2, seed=3).draws(i) for i in range(2000)]
    assert drawn != [Canary(share=0.2, seed=4).draws(i) for i in range(2000)]
    assert 0.17 < np.mean(drawn) < 0.23
    assert not any(Canary(share=0.0).draws(i) for i in range(200))
    states = []
    for _ in range(2):
        runner = runner_of(model, canary=Canary(share=0.5, bound=1e-3, seed=1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicySwitchedOff)
            answers = answered(runner, Unrotated(), 12)
        state = runner.canary.state
        states.append((answers, state.requests, state.checked, state.flops, state.policies))
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"share": 1.5},
        {"share": math.nan},
        {"bound": 0.0},
        {"bound": math.nan},
        {"window": 0},
        {"tokens": 0},
        {"level": 1.0},
        {"seed": -1},
    ],
)
def test_canaries_that_are_none(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="canary: expected"):
        Canary(**settings)


def test_a_canarys_bound_is_the_profiles(model: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected a bound, or a profile"):
        runner_of(model, canary=Canary())
    fingerprint = runner_of(model).spec.fingerprint
    runner = runner_of(model, canary=Canary(), profile=profile("naive", fingerprint))
    assert runner.canary.bound == 0.05


# ---- the one warning -------------------------------------------------------------------------


def test_a_lossy_policy_without_a_profile_says_so_once(model: Any) -> None:
    runner = runner_of(model)
    calls = [
        lambda: runner.generate(prompt_of(), "naive", max_new_tokens=2),
        lambda: list(runner.stream(prompt_of(), "naive", max_new_tokens=2)),
        lambda: runner.prefill(prompt_of(), "naive").release(),
        lambda: runner.generate_batch([prompt_of()], "naive", max_new_tokens=2),
        lambda: runner.conversation("naive").ask(prompt_of(), max_new_tokens=2),
    ]
    for call in calls:
        runner = runner_of(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
            call()
        assert [w.category for w in said] == [UncertifiedPolicy]
        assert said[0].filename == __file__
        assert "policy naive" in str(said[0].message)
        assert "kvweave certify" in str(said[0].message)


def test_nothing_is_said_of_what_is_exact_certified_or_measured(model: Any) -> None:
    fingerprint = runner_of(model).spec.fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = runner_of(model)
        for policy in ("full", "prefix"):
            runner.prefill(prompt_of(), policy, remember=False).release()
        runner.prefill(prompt_of(), "naive", remember=False, watched=False).release()
        runner.prefill(random_tokens(30, 7).tolist(), "naive", remember=False).release()
        certified = runner_of(model, profile=profile("naive", fingerprint))
        certified.prefill(prompt_of(), remember=False).release()
        certified.prefill(prompt_of(), policy_of("naive"), remember=False).release()
        with pytest.raises(UncertifiedPolicy, match="policy epic"):
            certified.prefill(prompt_of(), "epic", remember=False)
        assert certified.cache.stats()["held"] == certified.cache.stats()["frozen"]

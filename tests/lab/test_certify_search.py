"""What certifying searches: intervals, what is given up, candidates and finalists."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from certificates import EFFORT, losses, noisy
from families import tiny
from head_maps import head_map
from kvweave.lab.eval import bootstrap
from kvweave.lab.profile.candidate import Candidate
from kvweave.lab.profile.losses import samples_needed
from kvweave.lab.profile.search import SHARES, finalists, guessed, near
from kvweave.policies import Foresight, Full, Naive, Policy
from kvweave.policies.policy_profile import Bound
from kvweave.runner.model.model_spec import describe

# ---- losses ----------------------------------------------------------------------------------


def test_an_interval_is_the_bootstraps_over_samples() -> None:
    values = [0.01, 0.02, 0.4, 0.03, 0.05]
    for kind in ("kl", "score-drop"):
        found, wanted = losses(kind, values).interval(0.9), bootstrap(values, level=0.9)
        assert (found.value, found.low, found.high) == pytest.approx(
            (wanted.value, wanted.low, wanted.high)
        )
    both = losses("kl", values, [1.0] * 5)
    assert both.interval(0.9).value == pytest.approx((np.mean(values) + 1.0) / 2)
    assert both.of("job 1").interval(0.9).value == pytest.approx(1.0)
    assert both.flops_share == 0.2


@given(samples=st.integers(2, 60), level=st.floats(0.5, 0.99))
def test_no_loss_seen_is_no_proof_of_none(samples: int, level: float) -> None:
    high = losses("score-drop", [0.0] * samples).interval(level).high
    # A loss in that share of all samples stays unseen with a probability of (1 − level) / 2.
    assert (1.0 - high) ** samples == pytest.approx((1.0 - level) / 2.0)
    needed = samples_needed(high * 1.0001, level)
    assert needed <= samples < needed + 2
    assert losses("score-drop", [-0.5] * samples).interval(level).high >= high


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_within_no_bound(value: float) -> None:
    made = losses("kl", [0.0] * 9 + [value])
    assert made.lost == 1
    assert made.surely_above(1e9)
    assert made.interval(0.95).high == math.inf


def test_what_is_far_above_is_given_up_early() -> None:
    assert losses("kl", [0.5] * 4).surely_above(0.05)
    assert not losses("kl", [0.05] * 60).surely_above(0.05)
    assert losses("score-drop", [1.0] * 30).surely_above(0.01)
    assert not losses("score-drop", [0.5, -0.5] * 30).surely_above(0.01)


@pytest.mark.parametrize(
    ("kls", "wanted"),
    [
        # Each candidate's KL, of a bound of 1, the cheapest first; noise of 2 %.
        ((2.0, 0.8, 0.79, 0.78, 0.6, 0.3), [0.8, 0.6, 0.3]),
        ((0.9, 0.2), [0.9, 0.2]),
        ((0.1, 0.05), [0.1]),
        ((1.2, 0.99), [0.99]),
        ((1.2, 1.1), []),
    ],
)
def test_finalists_are_within_the_bound_by_more_and_by_less(
    kls: tuple[float, ...], wanted: list[float]
) -> None:
    """Those of one margin are alike, and would fail together."""
    seen = [
        noisy(Candidate(Foresight(share=kl / 4)), kl, flops=100 * number)
        for number, kl in enumerate(kls, 1)
    ]
    found = finalists(seen[::-1], Bound("kl", 1.0), EFFORT)
    assert [one.policy.share * 4 for one in found] == pytest.approx(wanted)


def test_what_flops_and_kv_cost_is_their_product() -> None:
    made = losses("kl", [0.1] * 3, [0.2], flops=400, kv_bytes=2, shared_kv_bytes=3)
    assert (made.flops_share, made.kv_share) == (0.4, 0.5)
    assert made.cost == pytest.approx(0.2)
    assert made.of("job 1").cost == pytest.approx(0.2)
    assert losses("kl").cost == math.inf


HALF, MOST = (
    head_map(spec, np.asarray(classes, np.int32))
    for spec in [describe(tiny("llama", num_hidden_layers=1))]
    for classes in ([[(16, 4), (0, 0)]], [[(0, 0), (16, 4)]])
)


def test_a_finalist_without_a_map_stands_beside_those_under_one() -> None:
    cheap = [noisy(Candidate(Naive(), heads), 0.2, kv_bytes=3) for heads in (HALF, MOST)]
    whole = [
        noisy(Candidate(Foresight(share=share)), kl, flops=flops)
        for share, kl, flops in ((0.1, 0.9, 300), (0.2, 0.6, 400), (0.3, 0.4, 500), (0.4, 0.1, 600))
    ]
    found = finalists([*cheap, *whole], Bound("kl", 1.0), EFFORT)
    assert [one.name for one in found] == [cheap[0].candidate.name, "foresight:share=0.3"]
    assert [one.name for one in finalists(cheap, Bound("kl", 1.0), EFFORT)] == [
        cheap[0].candidate.name
    ]
    # What no map helps is tried once, and nothing is no finalist.
    worse = [noisy(Candidate(Full(), heads), 2.0, flops=900) for heads in (HALF, MOST)]
    found = finalists([*worse, *whole], Bound("kl", 1.0), EFFORT)
    assert [one.name for one in found] == [f"foresight:share={share}" for share in (0.1, 0.2, 0.3)]
    assert finalists(worse, Bound("kl", 1.0), EFFORT) == []


def test_pairs_are_guessed_by_what_both_lose() -> None:
    whole = [
        noisy(Candidate(policy), kl, flops=flops)
        for policy, kl, flops in (
            (Naive(), 0.9, 100),
            (Foresight(share=0.2), 0.5, 300),
            (Foresight(share=0.3), 0.2, 400),
            (Foresight(share=0.4), 0.1, 500),
        )
    ]
    maps = [noisy(Candidate(Full(), HALF), 0.4), noisy(Candidate(Full(), MOST), 0.05)]
    names = [(one.text, one.heads) for one in guessed(whole, maps, 1.0)]
    half, most = (
        [text.removeprefix("foresight:share=") for text, heads in names if heads == kept]
        for kept in (HALF, MOST)
    )
    # 0.4 + 0.5 ≤ 1, 0.4 + 0.2 ≤ 0.75, 0.4 + 0.1 ≤ 0.5; 0.05 + 0.9 ≤ 1, 0.05 + 0.5 ≤ 0.75, …
    assert half == ["0.2", "0.3", "0.4"]
    assert most == ["naive", "0.2", "0.3"]
    assert list(guessed(whole, [noisy(Candidate(Full(), HALF), 1.0)], 1.0)) == []
    lost = losses("kl", [math.nan], of=Candidate(Full(), HALF))
    assert list(guessed(whole, [lost], 1.0)) == []


def test_budgets_drafts_and_depths_are_searched() -> None:
    def tried(**kls: float) -> list[Policy]:
        shares = {f"foresight:share={s}": kls.get(f"at_{n}", 9.0) for n, s in enumerate(SHARES)}
        return list(near({"naive": 9.0, **kls, **shares}, 1.0))

    between = round(math.sqrt(0.1 * 0.2), 3)
    found = tried(at_2=0.9, at_3=0.5)
    assert {p.share for p in found} == {between, 0.2}
    assert {p.draft for p in found if p.share == between} == {0, 4, 8, 16}
    assert {p.depth for p in found if p.share == between} == {0.0, 1 / 3, 0.5}
    # Where none of the coarse ones may do, a larger budget or draft may; where naive does, no more.
    assert {p.share for p in tried()} == {round(math.sqrt(0.5), 3)}
    assert {p.share for p in tried(at_0=0.9)} == {round(math.sqrt(0.025 * 0.05), 3), 0.05}
    assert tried(naive=0.9) == []

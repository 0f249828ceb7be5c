"""Policies read from text and told by name: round trips, and text of any origin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import InvalidArgument
from kvweave.policies import POLICIES, CacheBlend, Epic, Naive, SparseX, Weave
from kvweave.policies.policy_text import read_policies, read_policy, title_of, titled


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_is_the_policy_with_its_defaults(name: str) -> None:
    assert read_policy(f" {name} ") == POLICIES[name]()
    assert title_of(name) == POLICIES[name]().name == name


def test_settings_are_read_and_told() -> None:
    text = "naive, cacheblend:ratio=0.25:spread = 1.5,epic:first=32,sparsex:boundary=none:top_k=7"
    assert read_policies(text) == [
        Naive(), CacheBlend(0.25, 1.5), Epic(32), SparseX(boundary=None, top_k=7),
    ]  # fmt: skip
    assert isinstance(read_policy("sparsex:top_k=7").top_k, int)
    assert read_policy("sparsex:top_k=0.5").top_k == 0.5
    assert title_of(CacheBlend(0.25)) == "cacheblend(ratio=0.25)"
    assert title_of(SparseX(tail=8, top_k=0.5)) == "sparsex(top_k=0.5, tail=8)"
    assert title_of(Naive(delta_rope=False)) == "naive-no-rope"


def test_settings_of_parts_stand_behind_a_dot() -> None:
    made = read_policy("weave:redknot.ffn_share=0.75")
    assert isinstance(made, Weave)
    assert made.redknot.ffn_share == 0.75
    assert made.foresight == Weave().foresight
    assert title_of(made) == "weave(redknot.ffn_share=0.75)"


@given(st.floats(0, 1), st.floats(1, 2))
def test_what_is_told_can_be_read_again(ratio: float, spread: float) -> None:
    policy = CacheBlend(ratio, spread)
    name, _, settings = title_of(policy).rstrip(")").partition("(")
    assert read_policy(":".join([name, *filter(None, settings.split(", "))])) == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected one of full, prefix"),
        ("naive,,epic", "expected one of full, prefix"),
        ("magic:x=1", "expected one of full, prefix"),
        ("cacheblend:share=1", "one of ratio, spread, got 'share=1'"),
        ("cacheblend:ratio", "one of ratio, spread, got 'ratio'"),
        ("cacheblend:ratio=", "ratio: expected a number, got ''"),
        ("cacheblend:ratio=nan", "expected a number, got 'nan'"),
        ("cacheblend:ratio=1e999", "expected a number"),
        ("cacheblend:ratio=2", "expected 0 <= ratio <= 1"),
        ("cacheblend:ratio=.1:ratio=.2", "expected ratio once"),
        ("cacheblend:ratio=0.1=2", "expected a number, got '0.1=2'"),
        ("epic:first=1.5", "expected a whole number"),
        ("naive:delta_rope=maybe", "expected true or false"),
        ("full:name=x", "expected no settings"),
        ("epic:__class__=1", "one of first"),
        ("weave:redknot=1", "one of foresight.share"),
        ("sparsex:top_k=many", "expected a whole number or a number"),
    ],
)
def test_other_text_is_refused_with_what_is_known(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_policies(text)
    assert says in str(refused.value)


@given(st.text(max_size=40) | st.from_regex(r"(naive|epic|sparsex)(:[a-z_]+=[-\w.]*){0,3}"))
def test_text_of_any_origin_is_read_or_refused(text: str) -> None:
    try:
        policies = read_policies(text)
    except InvalidArgument:
        return
    assert len(policies) == text.count(",") + 1


def test_one_name_means_one_policy() -> None:
    assert list(titled(["naive", Epic(), "epic", Epic(32)])) == ["naive", "epic", "epic(first=32)"]

    class Odd(Epic):
        pass

    with pytest.raises(InvalidArgument, match="expected one epic, got"):
        titled([Epic(), Odd()])

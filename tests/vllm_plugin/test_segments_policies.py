"""Every recovery policy in a real engine: what the Runner does under it, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from test_segments import compare

from families import tiny
from kvweave.policies import (
    POLICIES,
    CacheBlend,
    Epic,
    Foresight,
    InfoFlow,
    Naive,
    Policy,
    Prophet,
    RandomRows,
    RedKnot,
    Weave,
)
from vllm_segments import (
    DOCUMENT,
    FIRST,
    SECOND,
    SIZES,
    Counterpart,
    ask,
    close,
    named,
    segments,
    settings,
)

CHOSEN: dict[str, Policy | str] = {
    "prefix": "prefix",
    "epic": Epic(first=5),
    "random": RandomRows(share=0.3),
    "naive-no-rope": Naive(delta_rope=False),
    "cacheblend": CacheBlend(ratio=0.3),
    "prophet": Prophet(share=0.3),
    "infoflow": InfoFlow(share=0.3),
    "infoflow-value": InfoFlow(share=0.3, score="value", layers=(1, 2)),
    "foresight-no-draft": Foresight(share=0.3, draft=0),
    "foresight": Foresight(share=0.3, draft=12),
    "foresight-mass": Foresight(mass=0.6),
    "redknot": RedKnot(dense_until=0.25, recent_n=16),
    "weave": Weave(Foresight(share=0.4), RedKnot(dense_until=0.25, recent_n=4)),
}


def test_all_policies_are_here() -> None:
    names = {case.split("-")[0] for case in CHOSEN}
    assert names | {"full", "naive", "sparsex"} == set(POLICIES)


@contextmanager
def about(case: str) -> Iterator[None]:
    """Says which of the policies that share an engine a test fails for."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(case) from error


def test_answers_are_the_runners(checkpoint: Any) -> None:
    """Documents at other places, two of them, side by side, at the end of a prompt."""
    beside = Counterpart(tiny("llama", **SIZES))
    options = {"enable_prefix_caching": False}
    with segments(checkpoint("llama"), settings(), **options) as (llm, _):
        for case, policy in CHOSEN.items():
            with about(case):
                compare(llm, beside, policy, case)


def test_as_many_rows_are_computed(checkpoint: Any) -> None:
    """By all passes together, layer by layer, as the Runner counts them."""
    beside = Counterpart(tiny("qwen3", **SIZES))
    with segments(checkpoint("qwen3"), settings("qwen3")) as (llm, counts):
        for case, policy in CHOSEN.items():
            llm.reset_prefix_cache()
            counts.anew()
            with about(case):
                for given in (FIRST, SECOND):
                    wanted = beside.ask(given, policy, namespace=case)
                    got = ask(llm, given, policy=named(policy), namespace=case)
                close(got, wanted)
                if policy == "prefix":
                    assert counts.total.rows == 0
                    continue
                assert counts.total.rows == sum(beside.rows)
                assert counts.total.reused_tokens == len(DOCUMENT)
                if isinstance(policy, Naive):
                    assert counts.total.copied_keys > counts.total.moved_keys == 0

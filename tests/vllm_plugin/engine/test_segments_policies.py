"""Every recovery policy in a real engine: what the Runner does under it, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from families import tiny
from kvweave.errors import InvalidArgument
from kvweave.plan import PromptView
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
    SparseX,
    Weave,
)
from test_segments import compare
from vllm_engines import answer, same, sampling
from vllm_segments import (
    DOCUMENT,
    FIRST,
    SECOND,
    SIZES,
    UNMARKED,
    Counterpart,
    ask,
    asked,
    close,
    named,
    segments,
    settings,
    stock,
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
    "foresight-drafts": Foresight(share=0.3, draft=5, drafts=3),
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


def test_policies_share_a_step(checkpoint: Any) -> None:
    """Requests of other passes, and one without marks, leave one another alone."""
    beside = Counterpart(tiny("llama", **SIZES))
    names = ("foresight", "infoflow", "cacheblend", "redknot", "epic", "weave")
    cases = {name: CHOSEN[name] for name in names} | {"sparsex": SparseX(0)}
    wanted = stock(checkpoint("llama"), UNMARKED[1])
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    with segments(checkpoint("llama"), settings(), **options) as (llm, counts):
        runners, prompts, params = [], [{"prompt_token_ids": UNMARKED[1]}], [sampling(6)]
        for case, policy in cases.items():
            beside.ask(FIRST, "full", 1, namespace=case)
            runners.append(beside.ask(SECOND, policy, remember=False, namespace=case))
            ask(llm, FIRST, 1, policy="full", namespace=case)
            tokens, said = asked(SECOND, 6, policy=named(policy), namespace=case)
            prompts.append(tokens)
            params.append(said)
        first, *others = [answer(o) for o in llm.generate(prompts, params, use_tqdm=False)]
        same([first], [wanted])
        for case, got, runner in zip(cases, others, runners, strict=True):
            with about(case):
                close(got, runner)
        assert counts.total.reused_tokens == len(cases) * len(DOCUMENT)
        # What drafts wrote is gone.
        for part in counts.worker._layers().parts:
            assert not part.pages[: part.kv_heads].any()


def test_every_policy_in_chunks(checkpoint: Any) -> None:
    """Each chunk is planned alone, drafts none but the last, and the same twice."""
    options = {"max_num_batched_tokens": 48, "enable_prefix_caching": False}
    with segments(checkpoint("llama"), settings(), **options) as (llm, counts):
        for case, policy in CHOSEN.items():
            with about(case):
                ask(llm, FIRST, policy="full", namespace=case)
                first, again = (
                    ask(llm, SECOND, policy=named(policy), namespace=case) for _ in range(2)
                )
                if case != "prefix":
                    same([again], [first])
                stats = counts.worker.store.cache.stats()
                assert stats["held"] == 0
        assert counts.total.reused_tokens > len(CHOSEN) * len(DOCUMENT)


def test_a_draft_without_room(checkpoint: Any) -> None:
    """Of more tokens than a block of vLLM has, or than the model's length: there is none."""
    options = {"enable_prefix_caching": False, "max_model_len": len(SECOND.tokens) + 8}
    with segments(checkpoint("llama"), settings(), **options) as (llm, counts):
        said = {}
        for draft in (0, 8, 9, 33):
            ask(llm, FIRST, policy="full", namespace=str(draft))
            policy = named(Foresight(share=0.3, draft=draft))
            counts.anew()
            said[draft] = ask(llm, SECOND, 5, policy=policy, namespace=str(draft))
            assert counts.total.recomputed_rows == 30
    assert said[0] == said[9] == said[33]
    assert said[8] != said[0]


class Raising(Naive):
    """Computes two layers, and then fails."""

    error: Exception = ZeroDivisionError("the policy's own")

    def plan(self, prompt: PromptView) -> Any:
        yield from islice(super().plan(prompt), 2)
        raise self.error


class Skipping(Naive):
    """Leaves a layer out."""

    def plan(self, prompt: PromptView) -> Any:
        plans = list(super().plan(prompt))
        yield from [*plans[:2], *plans[3:]]


@pytest.mark.parametrize(
    ("policy", "error", "says"),
    [
        (Raising, ZeroDivisionError, "the policy's own"),
        (Skipping, InvalidArgument, "layer plan: expected layer 2, got 3"),
    ],
)
def test_a_policy_that_fails_holds_nothing(
    checkpoint: Any, monkeypatch: Any, policy: Any, error: Any, says: str
) -> None:
    """The Runner says the same, and neither holds a block then."""
    monkeypatch.setitem(POLICIES, "naive", policy)
    beside = Counterpart(tiny("llama", **SIZES))
    beside.ask(FIRST, "full", 1)
    with pytest.raises(error, match=says):
        beside.ask(SECOND, policy())
    assert beside.runner.cache.stats()["held"] == 0
    with segments(checkpoint("llama"), settings()) as (llm, counts):
        ask(llm, FIRST, 1, policy="full")
        store = counts.worker.store.cache
        with pytest.raises(error, match=says):
            ask(llm, SECOND, policy="naive")
        assert store.stats()["held"] == 0
        store.check()


def test_a_layer_that_is_not_there_is_refused(checkpoint: Any) -> None:
    """Before anything is computed, and the engine lives: others are answered as ever."""
    wanted = stock(checkpoint("llama"), FIRST.tokens)
    policy = named(InfoFlow(layers=(99,)))
    with segments(checkpoint("llama"), settings()) as (llm, counts):
        for _ in range(2):
            with pytest.raises(
                (InvalidArgument, VLLMValidationError),
                match=r"policy\.layers: expected layers of 4, got",
            ):
                ask(llm, FIRST, policy=policy)
        assert counts.worker.store.cache.stats()["held"] == 0
        same([ask(llm, FIRST)], [wanted])

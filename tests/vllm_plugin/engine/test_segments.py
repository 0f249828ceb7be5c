"""Segments in a real engine: what is reused, and that answers are those of kvweave's Runner."""

from __future__ import annotations

import logging

import pytest
from vllm import LLM

from families import tiny
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.policies import Policy, SparseX
from vllm_engines import engine, ours, same, sampling
from vllm_segments import (
    BOTH,
    DOCUMENT,
    FAMILIES,
    FIRST,
    OTHER,
    SECOND,
    SHORT,
    SIZES,
    UNMARKED,
    Counterpart,
    Marked,
    answer,
    ask,
    asked,
    close,
    named,
    segments,
    settings,
    stock,
    text,
)

TOUCHING = Marked([text(18, 5), DOCUMENT, OTHER, text(7, 6)])
LAST = Marked([text(33, 5), DOCUMENT])
APART = Marked([text(12, 10), OTHER, text(4, 11)])
SEEDS, PROMPTS = [FIRST, APART], [SECOND, BOTH, TOUCHING, LAST]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
CHANGES = {
    "mistral": {"sliding_window": None},
    # vLLM takes prompts of up to factor times as many tokens.
    "llama-yarn": {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}},
}


def changes(family: str) -> dict:
    return {**SIZES, **CHANGES.get(family, {})}


def test_nothing_cached_is_stock(checkpoint) -> None:
    model = checkpoint("llama")
    wanted = stock(model, BOTH.tokens)
    with segments(model, settings()) as (llm, counts):
        for policy in ("sparsex", "naive", "full"):
            same([ask(llm, BOTH, policy=policy, namespace=policy)], [wanted])
    assert counts.total.requests == 3
    assert counts.total.rows == counts.total.copied_keys == counts.total.reused_tokens == 0


def compare(
    llm: LLM, beside: Counterpart, policy: str | Policy = "sparsex", namespace: str = ""
) -> None:
    """Both see the seeds first, from where documents come in all prompts that follow.

    The Runner, which copies what it reuses, would offer copies that it changed to later prompts.
    """
    markers = {"policy": named(policy), "namespace": namespace}
    for given in SEEDS:
        close(ask(llm, given, **markers), beside.ask(given, policy, namespace=namespace))
    for given in PROMPTS:
        wanted = beside.ask(given, policy, remember=False, namespace=namespace)
        close(ask(llm, given, **markers), wanted)


@pytest.mark.parametrize(
    ("family", "policy"), [(name, "sparsex") for name in FAMILIES] + [("llama", "naive")]
)
def test_answers_are_the_runners(checkpoint, family: str, policy: str) -> None:
    """Documents at other places, two of them, side by side, at the end of a prompt."""
    beside = Counterpart(tiny(family, **changes(family)))
    with segments(checkpoint(family, **changes(family)), settings(family)) as (llm, counts):
        compare(llm, beside, policy)
    reused = 4 * len(DOCUMENT) + 2 * len(OTHER) + 16 - 1  # the last token of a prompt is computed
    # Two prompts begin with the same page of fresh text: that is an exact prefix in the store.
    assert counts.total.hits == {"request": reused - 16, "prefix": 16}
    assert counts.total.reused_tokens == reused
    assert counts.total.moved_keys > 0


def test_fewer_rows_are_computed(checkpoint) -> None:
    """As many as the Runner's plan has, layer by layer; and every other row is copied."""
    beside = Counterpart(tiny("llama", **SIZES))
    with segments(checkpoint("llama"), settings()) as (llm, counts):
        for policy in ("sparsex", "naive"):
            counts.anew()
            llm.reset_prefix_cache()
            for given in (FIRST, SECOND):
                wanted = beside.ask(given, policy, namespace=policy)
                got = ask(llm, given, policy=policy, namespace=policy)
            close(got, wanted)
            spared = [len(SECOND.tokens) - rows for rows in beside.rows]
            assert counts.total.rows == sum(beside.rows)
            assert counts.total.rows_spared == counts.total.copied_keys == sum(spared)
            assert counts.total.recomputed_rows == len(DOCUMENT) - spared[-1]


def test_every_row_recomputed_is_stock(checkpoint) -> None:
    model = checkpoint("qwen3")
    wanted = [stock(model, given.tokens) for given in (FIRST, SECOND)]
    with segments(model, settings("qwen3")) as (llm, counts):
        for policy, namespace in ((SparseX(1, top_k=1.0), "deep"), (SparseX(0, top_k=1.0), "all")):
            counts.anew()
            said = {"policy": named(policy), "namespace": namespace}
            same([ask(llm, given, **said) for given in (FIRST, SECOND)], wanted)
            assert counts.total.recomputed_rows == counts.total.reused_tokens == len(DOCUMENT)


def test_a_segment_within_its_seams_is_stock(checkpoint) -> None:
    """All of it is computed, in a first layer that is run twice."""
    model = checkpoint("llama")
    wanted = stock(model, SHORT.tokens)
    with segments(model, settings()) as (llm, counts):
        KnowledgeBase(llm.collective_rpc).insert("short", DOCUMENT[:24])
        got = ask(llm, SHORT, policy=named(SparseX(0)))
    same([got], [wanted])
    assert counts.total.recomputed_rows == counts.total.reused_tokens == 24


def test_other_depths_are_the_runners(checkpoint) -> None:
    """With depth 0 reused rows never enter the first layer, but for those chosen by its scores."""
    beside = Counterpart(tiny("qwen2", **SIZES))
    with segments(checkpoint("qwen2"), settings("qwen2")) as (llm, _):
        compare(llm, beside, SparseX(0), "whole")
        compare(llm, beside, SparseX(3, top_k=7), "three")


def test_mixed_batches_leave_others_alone(checkpoint) -> None:
    """Prompts that reuse, prompts that do not, and decodes, in the same steps."""
    model = checkpoint("llama")
    others = [{"prompt_token_ids": tokens} for tokens in UNMARKED[:3]]
    wanted = [stock(model, tokens, 24) for tokens in UNMARKED[:3]]
    beside = Counterpart(tiny("llama", **SIZES))
    marked = [FIRST, SECOND, BOTH]
    runners = [beside.ask(given, "naive", 8) for given in marked]
    with segments(model, settings()) as (llm, counts):
        close(ask(llm, FIRST, 8, policy="naive"), runners[0])
        ask(llm, Marked([OTHER, text(3, 3)]), 1, policy="naive")
        prompts, params = [], []
        for given, other in zip([SECOND, FIRST, SECOND], others, strict=True):
            tokens, said = asked(given, 8, policy="naive")
            prompts += [other, tokens]
            params += [sampling(24), said]
        outputs = [answer(o) for o in llm.generate(prompts, params, use_tqdm=False)]
    same(outputs[::2], wanted)
    close(outputs[1], runners[1])
    close(outputs[5], runners[1])
    assert counts.total.reused_tokens >= 3 * len(DOCUMENT)


def test_half_precision(checkpoint) -> None:
    """In bf16 the first token's probability is as near the f32 Runner's as rounding lets it."""
    beside = Counterpart(tiny("llama", **SIZES))
    with segments(checkpoint("llama"), settings(), dtype="bfloat16") as (llm, _):
        for given in (FIRST, SECOND):
            wanted = beside.ask(given, "naive", 1)
            got = ask(llm, given, 1, policy="naive")
            assert abs(got.logprobs[0] - wanted.logprobs[0]) < 0.15


def test_marks_beside_logprobs_of_the_prompt_are_refused(checkpoint) -> None:
    tokens, params = asked(SECOND, 1, policy="naive")
    params.prompt_logprobs = 0
    with segments(checkpoint("llama"), settings()) as (llm, counts):
        ask(llm, FIRST, 1, policy="naive")
        with pytest.raises(Exception, match="prompt_logprobs: expected none beside") as raised:
            llm.generate([tokens], params, use_tqdm=False)
        assert isinstance(ours(raised.value), InvalidArgument), raised.value
        # Without a segment there is nothing that they would be in the way of.
        params.extra_args = {"kvweave": {"namespace": "acme"}}
        llm.generate([tokens], params, use_tqdm=False)
    assert counts.total.requests == 1


def test_what_is_not_followed_is_warned_of(checkpoint, monkeypatch) -> None:
    """Where nobody looks at requests before they are scheduled."""
    said: list[str] = []
    log = logging.getLogger("vllm.kvweave.segments")
    monkeypatch.setattr(log, "warning", lambda text, *given: said.append(text % given))
    tokens, params = asked(SECOND, 1, policy="naive")
    beyond = params.clone()
    params.prompt_logprobs = 0
    beyond.extra_args = {"kvweave": {"segments": [[0, 400]]}}
    _, deep = asked(SECOND, 1, policy={"name": "sparsex", "boundary": 99})
    idle = deep.clone()
    idle.extra_args = {"kvweave": {"policy": "naive"}}
    choice = {**settings(), "logits_processors": None}
    with segments(checkpoint("llama"), choice) as (llm, counts):
        ask(llm, FIRST, 1, policy="naive")
        llm.generate([tokens] * 4, [params, beyond, deep, idle], use_tqdm=False)
    assert counts.total.requests == 1
    named = ("prompt_logprobs", "kvweave.segments[0]", "kvweave.policy.boundary", "kvweave.policy")
    for line, what in zip(said, [f"{name}: " for name in named], strict=True):
        assert f": {what}expected " in line
        assert line.endswith("; its marks have no effect")


REFUSED = {
    "connector": ({"kv_transfer_config": None}, {}, "expected kv_connector KvweaveSegments, got"),
    "no map": ({}, {"heads": "map.json"}, "heads: expected a readable file, got map.json"),
    "bytes": ({}, {"segment_bytes": 0}, "segment_bytes: expected bytes, at least 1, got 0"),
    "window": ({}, {}, "expected layers that see the whole context beside segments"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_compose_is_refused(checkpoint, case: str) -> None:
    engine_changes, options, says = REFUSED[case]
    family = "mistral" if case == "window" else "llama"
    choice = settings(family, **options) | engine_changes
    with (
        pytest.raises((Unsupported, InvalidArgument), match=says),
        engine(checkpoint(family), choice),
    ):
        pass

"""Segments in a real engine: what is reused, and that answers are those of kvweave's Runner."""

from __future__ import annotations

import pytest
from vllm import LLM

from families import tiny
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.policies import Policy, SparseX
from vllm_engines import STOCK, answers, engine, same, sampling
from vllm_segments import (
    DOCUMENT,
    FAMILIES,
    FIRST,
    SECOND,
    SIZES,
    Counterpart,
    Marked,
    answer,
    ask,
    asked,
    close,
    named,
    plain,
    segments,
    settings,
    text,
)

OTHER = tuple(text(70, 8))
BOTH = Marked([text(5, 5), OTHER, text(9, 6), DOCUMENT, text(30, 7)])
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


@pytest.mark.parametrize("policy", ["sparsex", "naive", "full"])
def test_nothing_cached_is_stock(checkpoint, policy: str) -> None:
    model = checkpoint("llama")
    with engine(model, STOCK, max_num_batched_tokens=512) as llm:
        wanted = plain(llm, BOTH.tokens)
    with segments(model, settings()) as (llm, counts):
        got = ask(llm, BOTH, policy=policy)
    same([got], [wanted])
    assert counts.total.rows == counts.total.copied_keys == counts.total.reused_tokens == 0


def compare(llm: LLM, beside: Counterpart, policy: str | Policy = "sparsex") -> None:
    """Both see the seeds first, from where documents come in all prompts that follow.

    The Runner, which copies what it reuses, would offer copies that it changed to later prompts.
    """
    for given in SEEDS:
        close(ask(llm, given, policy=named(policy)), beside.ask(given, policy))
    for given in PROMPTS:
        wanted = beside.ask(given, policy, remember=False)
        close(ask(llm, given, policy=named(policy)), wanted)


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


@pytest.mark.parametrize("policy", ["sparsex", "naive"])
def test_fewer_rows_are_computed(checkpoint, policy: str) -> None:
    """As many as the Runner's plan has, layer by layer; and every other row is copied."""
    beside = Counterpart(tiny("llama", **SIZES))
    with segments(checkpoint("llama"), settings()) as (llm, counts):
        for given in (FIRST, SECOND):
            wanted = beside.ask(given, policy)
            got = ask(llm, given, policy=policy)
    close(got, wanted)
    spared = [len(SECOND.tokens) - rows for rows in beside.rows]
    assert counts.total.rows == sum(beside.rows)
    assert counts.total.rows_spared == counts.total.copied_keys == sum(spared)
    assert counts.total.recomputed_rows == len(DOCUMENT) - spared[-1]


@pytest.mark.parametrize("policy", [SparseX(1, top_k=1.0), SparseX(0, top_k=1.0)])
def test_every_row_recomputed_is_stock(checkpoint, policy: SparseX) -> None:
    with engine(checkpoint("qwen3"), STOCK, max_num_batched_tokens=512) as llm:
        wanted = [plain(llm, given.tokens) for given in (FIRST, SECOND)]
    with segments(checkpoint("qwen3"), settings("qwen3")) as (llm, counts):
        got = [ask(llm, given, policy=named(policy)) for given in (FIRST, SECOND)]
    same(got, wanted)
    assert counts.total.recomputed_rows == counts.total.reused_tokens == len(DOCUMENT)


def test_a_segment_within_its_seams_is_stock(checkpoint) -> None:
    """All of it is computed, in a first layer that is run twice."""
    short = Marked([text(20, 1), DOCUMENT[:24], text(15, 2)])
    with engine(checkpoint("llama"), STOCK, max_num_batched_tokens=512) as llm:
        wanted = plain(llm, short.tokens)
    with segments(checkpoint("llama"), settings()) as (llm, counts):
        KnowledgeBase(llm.collective_rpc).insert("short", DOCUMENT[:24])
        got = ask(llm, short, policy=named(SparseX(0)))
    same([got], [wanted])
    assert counts.total.recomputed_rows == counts.total.reused_tokens == 24


@pytest.mark.parametrize("policy", [SparseX(0), SparseX(3, top_k=7)])
def test_other_depths_are_the_runners(checkpoint, policy: SparseX) -> None:
    """With depth 0 reused rows never enter the first layer, but for those chosen by its scores."""
    beside = Counterpart(tiny("qwen2", **SIZES))
    with segments(checkpoint("qwen2"), settings("qwen2")) as (llm, _):
        compare(llm, beside, policy)


def test_mixed_batches_leave_others_alone(checkpoint) -> None:
    """Prompts that reuse, prompts that do not, and decodes, in the same steps."""
    model = checkpoint("llama")
    others = [{"prompt_token_ids": text(length, seed)} for seed, length in enumerate([9, 80, 150])]
    with engine(model, STOCK) as llm:
        wanted = answers(llm, others, 24)
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


def test_rows_of_a_prompt_with_logprobs_are_all_computed(checkpoint) -> None:
    with segments(checkpoint("llama"), settings()) as (llm, counts):
        ask(llm, FIRST, 1, policy="naive")
        tokens, params = asked(SECOND, 1, policy="naive")
        params.prompt_logprobs = 0
        llm.generate([tokens], params, use_tqdm=False)
    assert counts.total.requests == 1


REFUSED = {
    "connector": ({"kv_transfer_config": None}, {}, "expected kv_connector KvweaveSegments, got"),
    "heads": ({}, {"heads": "map.json"}, "expected it without kvweave.heads"),
    "bytes": ({}, {"segment_bytes": 0}, "segment_bytes: expected bytes, at least 1, got 0"),
    "window": ({}, {}, "expected layers that see the whole context"),
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

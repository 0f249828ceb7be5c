"""Results go through pickles, copies and JSON as they are."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvweave
from families import random_tokens, tiny
from kvweave.cache import KvCache, KvShape, ReusePlan

WAYS: list[Callable[[Any], Any]] = [
    lambda given: pickle.loads(pickle.dumps(given)),
    copy.copy,
    copy.deepcopy,
]


@pytest.fixture(scope="module")
def answer(smollm2: tuple[Any, Any]) -> Any:
    """Of a prompt with a part of every outcome."""
    model, tokenizer = smollm2
    runner = kvweave.Runner(model, tokenizer, max_tokens=512, progress=False, check=False)
    text = "The harbour wall is repaired before winter. " * 4
    runner.insert(text, 'the "<harbour>" letter')
    prompt = ["It says: ", kvweave.Segment(text=text), "So when?"]
    first = runner.generate(["It says: ", "all of this text, and more of it, is new here."])
    assert first.report.reused_segment == 0
    return runner.generate(prompt, max_new_tokens=4)


@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
def test_an_answer_is_itself_afterwards(answer: Any, way: Callable[[Any], Any]) -> None:
    again = way(answer)
    assert again is not answer
    assert again == answer
    assert again.report.plan.to_dict() == answer.report.plan.to_dict()
    assert str(again.report.plan) == str(answer.report.plan)
    assert way(answer.report.plan.spans) == answer.report.plan.spans


def test_an_answer_is_plain_data(answer: Any) -> None:
    plain = json.loads(json.dumps(answer.to_dict()))
    assert (plain["text"], plain["tokens"]) == (answer.text, answer.tokens)
    assert plain["report"]["reused_segment"] == answer.report.reused_segment > 0
    kinds = [span["kind"] for span in plain["report"]["plan"]["spans"]]
    assert {"segment", "recompute"} <= set(kinds)


def test_every_plan_of_a_cache_is_read_again() -> None:
    """Prefixes, segments of both sources, fresh text and misses."""
    cache = KvCache(KvShape(1, 1, 8), blocks=64)
    tokens = np.arange(100, dtype=np.int32)
    first = cache.admit(tokens, segments=[(16, 64, "")])
    first.commit(100, 100)
    moved = np.concatenate((np.full(5, 7, np.int32), tokens[16:64], tokens[:40] + 500))
    plans = [first.plan, cache.admit(moved, segments=[(5, 53, ""), (60, 80, "")]).plan]
    plans.append(cache.admit(np.concatenate((tokens[:64], tokens[:9]))).plan)
    assert {span.kind for plan in plans for span in plan.spans} == {
        "prefix",
        "segment",
        "recompute",
    }
    for plan in plans:
        assert ReusePlan.from_json(plan.to_json()) == plan
        assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("text", ["", "{}", '{"tokens": 1, "spans": []}', "[1]", "\x00" * 99])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(kvweave.InvalidArgument, match="plan: expected"):
        ReusePlan.from_json(text)


@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
def test_shapes_and_entries_are_plain_data(way: Callable[[Any], Any]) -> None:
    cache = KvCache(KvShape(2, 1, 8, 16, "bf16"), blocks=8)
    with cache.admit(np.arange(32, dtype=np.int32), namespace="somebody") as request:
        request.commit(32, 32)
        request.freeze("a text", 0, 32)
    for given in (cache.shape, *cache.frozen("somebody")):
        again = way(given)
        assert again == given
        assert hash(again) == hash(given)
        assert repr(again) == repr(given)
    assert way(cache.shape) != KvShape(2, 1, 8, 16, "f32")


def test_what_is_at_work_says_what_it_is() -> None:
    """In a line of a notebook: the model and its blocks, what a prompt and a talk hold."""
    runner = kvweave.Runner(tiny("llama"), max_tokens=256, progress=False, check=False)
    before = "Runner(4 layers, 2 KV heads, torch.float32, cpu; blocks held=0, cached=0, free=17)"
    assert repr(runner) == before
    with runner.prefill(random_tokens(20, 1), "full") as done:
        assert repr(done) == "Prefill(20 tokens, exact_tokens=20)"
        assert "blocks held=2," in repr(runner)
    assert repr(done) == "Prefill(released, exact_tokens=20)"
    with runner.conversation("full") as talk:
        talk.ask(random_tokens(9, 2), max_new_tokens=2)
        assert repr(talk) == "Conversation(full, turns=1, tokens=11)"
    assert repr(talk) == "Conversation(full, turns=1, closed)"
    packed = kvweave.Runner(tiny("llama"), max_tokens=256, check=False, kv_dtype="int4")
    assert "; blocks held=0, cached=0, free=" in repr(packed)
    assert repr(packed).endswith("packed blocks held=0, cached=0, free=5)")

"""Results go through pickles, copies and JSON as they are."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvweave
from kvweave.cache import HeadClassMap, KvCache, KvShape, ReusePlan
from kvweave.ops import PackedFormat

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


def test_what_was_missed_is_counted_by_its_reason(answer: Any) -> None:
    """By every token's own reason in the plan; what was reused has none."""
    report = answer.report
    reasons = [s.reason for s in report.plan.spans for _ in range(s.start, s.end)]
    assert report.missed == {r: reasons.count(r) for r in set(reasons) if r is not None}
    assert report.missed["last-token"] == 1
    assert sum(report.missed.values()) == report.recomputed
    assert report.to_dict()["missed"] == report.missed
    assert list(report.missed.values()) == sorted(report.missed.values(), reverse=True)


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
    for given in (cache.shape, *cache.frozen("somebody"), *cache.groups):
        again = way(given)
        assert again == given
        assert hash(again) == hash(given)
        assert repr(again) == repr(given)
    assert way(cache.shape) != KvShape(2, 1, 8, 16, "f32")


@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
def test_head_maps_and_their_groups_are_plain_data(way: Callable[[Any], Any]) -> None:
    """Of all three classes of heads."""
    shape = KvShape(1, 3, 8)
    told = json.loads(HeadClassMap.full(shape, "some model").to_json())
    told["heads"][1]["class"] = {"kind": "window", "sink": 16, "recent": 48}
    told["heads"][2]["class"] = {"kind": "top_k", "pages": 3, "rerank_every": 2}
    heads = HeadClassMap.from_json(json.dumps(told))
    assert way(heads) == heads
    assert repr(way(heads)) == repr(heads)
    groups = KvCache(shape, blocks=9, heads=heads).groups
    assert [group.kind for group in groups] == ["full", "window", "top_k"]
    assert way(groups) == groups
    assert len({*groups, *way(groups)}) == 3


@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
def test_formats_of_pages_are_plain_data(way: Callable[[Any], Any]) -> None:
    formats = [
        PackedFormat("int4", 64),
        PackedFormat("int8", 32, 16, "f16"),
        PackedFormat("top-r", 64, kept=16, group=2, channels=48, numbers="int4"),
        PackedFormat("planes", 64, token_bytes=48),
    ]
    for given in formats:
        assert way(given) == given
        assert hash(way(given)) == hash(given)
    assert len({*formats, *way(formats)}) == 4


@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
def test_what_a_store_lists_is_plain_data(way: Callable[[Any], Any], tmp_path: Path) -> None:
    """A whole shard, and a file that says nothing."""
    store = kvweave.Store(tmp_path)
    how = {"layers": 2, "kv_heads": 1, "head_dim": 8, "namespace": "a tenant"}
    provenance = kvweave.Provenance("model", dtype="f32", layout="rows", regime=3, **how)
    tokens = np.arange(5, dtype=np.uint32)
    store.put(provenance, tokens, {"kv": b"bytes"})
    assert way(provenance) == provenance
    assert way(provenance).shard_name(tokens) == provenance.shard_name(tokens)
    (line,) = store.list()
    assert way(line) == line
    assert way(line).provenance == provenance
    kept = f'tokens=5, namespace="a tenant", file_bytes={line.file_bytes}, documents=0'
    assert repr(line) == f'StoredShard("{line.name}", {kept})'
    (file,) = (path for path in tmp_path.rglob(f"*{line.name}*") if path.is_file())
    file.write_bytes(b"nothing")
    (spoiled,) = kvweave.Store(tmp_path).list()
    assert spoiled.error
    assert way(spoiled) == spoiled
    assert f"error={json.dumps(spoiled.error)}" in repr(spoiled)

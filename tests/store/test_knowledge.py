"""Knowledge bases in a store: a runner that starts again finds its documents and says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from families import random_tokens, tiny
from kvweave import (
    CorruptShard,
    ForeignShard,
    InvalidArgument,
    PoolFull,
    Runner,
    Segment,
    Store,
    StoreDegraded,
    StoreFull,
    UnknownSegment,
)
from local_heads import local_heads
from versions import needs_cuda

MANUAL = "The pump must be primed with two litres of clean water before its first start. " * 4
LETTER = "The committee agreed to repair the harbour wall before the winter storms come. " * 4
FRESH = random_tokens(30, 6).tolist()


def runner_of(model: Any, local: int = 0, **more: Any) -> Runner:
    """A runner in which `local` heads of each layer keep a window."""
    heads = None
    if local:
        plain = Runner(model, max_tokens=64, check=False, progress=False)
        heads = local_heads(plain.cache.shape, local, 4, 24, model=plain.spec.fingerprint)
    options = {"max_tokens": 2048, "check": False, **more}
    return Runner(model, heads=heads, progress=False, **options)


def no_prefill(runner: Runner) -> None:
    """From here on the runner computes no document: it would have to raise."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a document is computed")

    runner._prefiller.prefill = refused


def answer(runner: Runner, document: list[int], policy: str = "naive") -> Any:
    prompt = [Segment(tokens=FRESH[:11]), Segment(tokens=document), Segment(tokens=FRESH[11:])]
    return runner.generate(prompt, policy, max_new_tokens=12, stop=(), remember=False)


def kept_kv(runner: Runner) -> torch.Tensor:
    pages = torch.from_dlpack(runner.cache.arena)
    return pages[pages.abs().sum((1, 2, 3)) > 0].flatten(1).sum(1).sort().values


def test_a_restarted_runner_says_the_same(tmp_path: Path, smollm2: Any) -> None:
    """Real weights, the default policy."""
    model, tokenizer = smollm2
    texts = [("manual", MANUAL), ("letters/2026", LETTER)]
    asked = ["Read this.\n", Segment(text=LETTER, namespace="tenant"), "\nWhat is agreed?\n"]
    asked += [Segment(text=MANUAL, namespace="tenant"), "\nWhat must be done first?\n"]
    options = {"max_new_tokens": 8, "stop": (), "namespace": "tenant", "remember": False}

    first = runner_of(model, tokenizer=tokenizer)
    first.insert_many(texts, "tenant", store=Store(tmp_path))
    said = first.generate(asked, "foresight", **options)
    restored = runner_of(model, tokenizer=tokenizer)
    entries = restored.restore(Store(tmp_path), "tenant")
    assert [entry.name for entry in entries] == ["letters/2026", "manual"]
    again = restored.generate(asked, "foresight", **options)
    assert again.tokens == said.tokens
    assert again.report.reused_segment == said.report.reused_segment > 50
    assert again.report.recomputed == said.report.recomputed
    restored.cache.check()


def test_what_is_inserted_again_is_read_and_not_computed(tmp_path: Path) -> None:
    model, document = tiny("llama"), random_tokens(60, 1).tolist()
    first, again = runner_of(model), runner_of(model)
    entry = first.insert(document, "document", store=Store(tmp_path))
    no_prefill(again)
    assert again.insert(document, "again", store=Store(tmp_path)).tokens == entry.tokens
    # One shard, two names. A name that is given to another text means that one.
    store = Store(tmp_path)
    assert len(store.list()) == 1
    assert [name for _, name, _ in store.documents()] == ["again", "document"]
    other = random_tokens(50, 2).tolist()
    first.insert(other, "document", store=store)
    third = runner_of(model)
    third.restore(store, name="document")
    assert third.segments()[0].tokens == 50


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "qwen2-sliding", "qwen3"])
def test_any_model_and_pages_of_any_size(tmp_path: Path, family: str, local: int) -> None:
    model, document = tiny(family), random_tokens(90, 5).tolist()
    first = runner_of(model, local)
    first.insert(document, "document", store=Store(tmp_path))
    said, heads_said = answer(first, document), answer(first, document, "redknot")
    for page_tokens in (16, 8):
        other = runner_of(model, local, page_tokens=page_tokens)
        other.restore(Store(tmp_path))
        again = answer(other, document)
        assert again.tokens == said.tokens
        if local and family == "llama":
            assert answer(other, document, "redknot").tokens == heads_said.tokens
        # Blocks of a segment are reused whole, so how many tokens depends on their size.
        assert abs(again.report.reused_segment - said.report.reused_segment) < 16
        other.cache.check()


def test_a_document_is_an_exact_prefix_as_it_was(tmp_path: Path) -> None:
    model, document = tiny("llama"), random_tokens(90, 5).tolist()
    first, other = runner_of(model), runner_of(model)
    first.insert(document, "document", store=Store(tmp_path))
    other.restore(Store(tmp_path))
    for runner in (first, other):
        done = runner.prefill([*document, *FRESH], "prefix", remember=False)
        assert done.report.reused_prefix == 90
        done.release()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_pages_are_the_same_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model, document = tiny("llama").to(dtype), random_tokens(77, 5).tolist()
    first, other = runner_of(model), runner_of(model)
    first.insert(document, "document", store=Store(tmp_path))
    other.restore(Store(tmp_path), name="document")
    assert torch.equal(kept_kv(first), kept_kv(other))


def test_what_is_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    model, document = tiny("llama"), random_tokens(60, 1).tolist()
    store = Store(tmp_path)
    runner_of(model).insert(document, "document", store=store)
    for other, says in (
        (runner_of(tiny("llama-yarn")), "model|regime"),
        (runner_of(tiny("llama").to(torch.bfloat16)), "model|dtype"),
        (runner_of(model, local=1), "head map"),
    ):
        with pytest.raises(ForeignShard, match=says):
            other.restore(store, name="document")
        with pytest.warns(StoreDegraded, match="left out") as told:
            assert other.restore(store) == []
        assert told[0].filename == __file__
        assert other.segments() == []
        assert other.cache.stats()["held"] == 0
    runner = runner_of(model)
    with pytest.raises(UnknownSegment):
        runner.restore(store, "tenant", name="document")
    assert runner.restore(store, "tenant") == []
    with pytest.raises(InvalidArgument, match="expected a Store"):
        runner.restore(str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="expected a Store"):
        runner.insert(document, "x", store=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(PoolFull):
        runner_of(model, max_tokens=32).restore(store)


def test_what_is_spoiled_is_computed_anew_and_kept_again(tmp_path: Path) -> None:
    model, document = tiny("llama"), random_tokens(60, 1).tolist()
    store = Store(tmp_path)
    runner = runner_of(model)
    runner.insert(document, "document", store=store)
    said = answer(runner, document)
    file = next((tmp_path / "shards").iterdir())
    whole = bytearray(file.read_bytes())
    whole[-5000] ^= 1
    file.write_bytes(bytes(whole))
    with pytest.raises(CorruptShard):
        runner_of(model).restore(Store(tmp_path), name="document")
    again = runner_of(model)
    with pytest.warns(StoreDegraded, match="computed anew") as told:
        again.insert(document, "document", store=Store(tmp_path))
    assert told[0].filename == __file__
    assert answer(again, document).tokens == said.tokens
    third = runner_of(model)
    assert [entry.name for entry in third.restore(Store(tmp_path))] == ["document"]
    assert answer(third, document).tokens == said.tokens


def test_a_store_without_room_leaves_the_document_here(tmp_path: Path) -> None:
    model, document = tiny("llama"), random_tokens(60, 1).tolist()
    runner = runner_of(model)
    with pytest.raises(StoreFull):
        runner.insert(document, "document", store=Store(tmp_path, capacity_bytes=4096))
    assert [entry.name for entry in runner.segments()] == ["document"]
    assert answer(runner, document).report.reused_segment > 40
    assert Store(tmp_path).documents() == []


@needs_cuda
def test_on_a_gpu(tmp_path: Path) -> None:
    model, document = tiny("llama").to("cuda"), random_tokens(90, 5).tolist()
    first = runner_of(model)
    first.insert(document, "document", store=Store(tmp_path))
    other = runner_of(model)
    other.restore(Store(tmp_path))
    assert answer(other, document).tokens == answer(first, document).tokens

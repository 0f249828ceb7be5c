"""Engines that sleep, load other weights or reset their caches: documents are valid, or none.

On CPUs vLLM's workers sleep without losing anything. What a GPU does at level 2 is done here to the
store alone: its memory has other numbers afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from families import tiny
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.errors import DeviceUnavailable
from vllm_engines import Answer, answer, same
from vllm_segments import (
    DOCUMENT,
    FIRST,
    OTHER,
    SECOND,
    SIZES,
    Marked,
    ask,
    asked,
    segments,
    settings,
    stock,
    text,
)

LATER = Marked([text(11, 61), OTHER, text(13, 62)])
FORMATS = [(None, True), ("int4", False), ("half-int4", True), ("planes-3", False)]
"""Of a store's pages, and whether a folder keeps documents."""


def lose_memory(worker: Any) -> None:
    """What level 2 leaves: other numbers wherever the store had its own."""
    store = worker.store
    parts = [*store._parts(), store._mark._there]
    if getattr(store, "bases", None) is not None:
        parts += [store.bases.bases.data, store.bases.bases.of]
    for part in parts:
        part.view(torch.uint8).fill_(0xFF)


def slept(llm: Any, level: int, worker: Any) -> None:
    llm.sleep(level=level)
    if level == 2:
        lose_memory(worker)
    llm.wake_up()


def options(folder: Path, kind: str | None, kept: bool) -> dict[str, Any]:
    store = {"store": str(folder), "store_reads": "always"} if kept else {}
    return settings(**store, **({} if kind is None else {"segment_dtype": kind}))


def expect_idle(worker: Any) -> None:
    """That nobody holds anything but documents."""
    worker.store.cache.check()
    stats = worker.store.cache.stats()
    assert stats["held"] == stats["frozen"]
    assert worker._admitted == worker._prompts == {}


@pytest.mark.parametrize(("kind", "kept"), FORMATS)
def test_a_store_after_sleep(checkpoint: Any, tmp_path: Path, kind: str | None, kept: bool) -> None:
    """Level 1 leaves documents as they are; level 2 leaves none, but those of a folder."""
    model = checkpoint("llama")
    computed = stock(model, SECOND.tokens)
    with segments(model, options(tmp_path, kind, kept)) as (llm, counts):
        base, worker = KnowledgeBase(llm.collective_rpc), counts.worker
        base.insert("one", list(DOCUMENT))
        said = ask(llm, SECOND, policy="naive")
        ask(llm, LATER, policy="naive")
        for level in (1, 2, 2):
            slept(llm, level, worker)
            listed = base.entries()
            assert [entry["resident_blocks"] > 0 for entry in listed] == (
                [level == 1] if level == 1 or kept else []
            )
            counts.anew()
            again = ask(llm, SECOND, policy="naive")
            found = level == 1 or kept
            same([again], [said if found else computed])
            assert counts.total.hits["frozen"] == found * len(DOCUMENT)
            # What requests left went with vLLM's own cache.
            ask(llm, LATER, policy="naive")
            assert counts.total.hits["request"] == 0
            expect_idle(worker)
            if not found:
                # It can be put again, elsewhere in a prompt.
                base.insert("one", list(DOCUMENT))
                assert np.isfinite(ask(llm, FIRST, policy="naive").logprobs).all()
                assert counts.total.hits["frozen"] == len(DOCUMENT)
        assert base.store().get("brought_refused", 0) == 0


@pytest.mark.parametrize("kind", [None, "int4", "planes-3"])
def test_caches_that_are_reset_in_the_middle(checkpoint: Any, tmp_path: Path, kind: Any) -> None:
    """Prompts that are being computed go on, by their own tokens, and nothing of theirs is left."""
    model = checkpoint("llama")
    changes = {"max_num_batched_tokens": 48, "enable_prefix_caching": False}
    wanted = stock(model, SECOND.tokens)
    with segments(model, options(tmp_path, kind, kept=True), **changes) as (llm, counts):
        base, inner = KnowledgeBase(llm.collective_rpc), llm.llm_engine
        base.insert("one", list(OTHER), "a")
        ask(llm, FIRST, policy="naive")
        inner.add_request("x", *asked(SECOND, 6, policy="full"))
        inner.step()
        assert len(counts.worker._admitted) == 1
        # Nobody waits for it to end.
        inner.reset_prefix_cache(False, True)
        done: list[Answer] = []
        while inner.has_unfinished_requests():
            done += [answer(out) for out in inner.step() if out.finished]
        same(done, [wanted])
        expect_idle(counts.worker)
        counts.anew()
        same([ask(llm, SECOND, policy="naive")], [wanted])
        assert counts.total.hits["request"] == 0
        assert [entry["resident_blocks"] for entry in base.entries("a")] == [
            entry["blocks"] for entry in base.entries("a")
        ]


@pytest.mark.parametrize(("kind", "kept"), [(None, True), ("half-int4", True), ("int4", False)])
def test_other_weights_have_no_documents_of_the_former(
    checkpoint: Any, tmp_path: Path, kind: str | None, kept: bool
) -> None:
    """The same ones again may have what a folder keeps; others have nothing, and leave it alone."""
    model, other = checkpoint("llama"), checkpoint("llama", initializer_range=0.3)
    wanted = stock(other, SECOND.tokens)
    folder = tmp_path / "kept"
    with segments(model, options(folder, kind, kept)) as (llm, counts):
        base, worker = KnowledgeBase(llm.collective_rpc), counts.worker
        base.insert("one", list(DOCUMENT))
        said = ask(llm, SECOND, policy="naive")
        llm.collective_rpc("reload_weights")
        assert [entry["resident_blocks"] for entry in base.entries()] == ([0] if kept else [])
        if kept:
            same([ask(llm, SECOND, policy="naive")], [said])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        # vLLM's own cache is its caller's to reset.
        assert llm.reset_prefix_cache()
        counts.anew()
        same([ask(llm, SECOND, policy="naive")], [wanted])
        assert counts.total.reused_tokens == 0
        assert base.entries() == []
        expect_idle(worker)
        # What is put now is of these weights, and of no folder.
        assert "kept" not in base.insert("two", list(OTHER))
    if kept:
        with segments(model, options(folder, kind, kept)) as (llm, counts):
            base = KnowledgeBase(llm.collective_rpc)
            assert [entry["name"] for entry in base.entries()] == ["one"]
            same([ask(llm, SECOND, policy="naive")], [said])
            assert counts.total.hits["frozen"] == len(DOCUMENT)


def test_documents_of_an_engine_that_sleeps_are_refused(checkpoint: Any) -> None:
    """Nobody touches memory that is not there; when it wakes all is as it was."""
    with segments(checkpoint("llama"), settings()) as (llm, _):
        base, connector = KnowledgeBase(llm.collective_rpc), get_kv_transfer_group()
        base.insert("one", list(DOCUMENT))
        # What vLLM 0.33 tells connectors on a GPU.
        connector.unregister_kv_caches()
        for call in (
            base.entries,
            base.store,
            lambda: base.insert("two", list(OTHER)),
            lambda: base.delete("one"),
        ):
            with pytest.raises(DeviceUnavailable, match="expected an engine that is awake, got"):
                call()
        connector.restore_kv_caches()
        assert [entry["name"] for entry in base.entries()] == ["one"]


def test_weights_of_a_seed_are_no_folders(tmp_path: Path) -> None:
    """Nothing is known of weights that no file has: a folder is left alone at once."""
    from kvweave.adapters.vllm.segments.kept_weights import KeptWeights

    tiny("llama", **SIZES).save_pretrained(tmp_path)
    weights = dict(tiny("llama", **SIZES).state_dict())
    files = sorted(tmp_path.iterdir())
    for known, came, are_same in (
        (files, weights, True),
        (files, {name: weights[name] for name in list(weights)[:2]}, True),
        (files, {**weights, "model.norm.weight": weights["model.norm.weight"] + 1}, False),
        (files, {"other.weight": weights["model.norm.weight"]}, False),
        ([], weights, False),
    ):
        kept = KeptWeights(known)
        assert dict(kept.watched(came.items())).keys() == came.keys()
        assert kept.are_same is are_same

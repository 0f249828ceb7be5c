"""Packed segments while requests are aborted, preempted, and their documents deleted or evicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.errors import PoolFull
from vllm_engines import Answer, answer, metric, same
from vllm_segments import Marked, ask, asked, segments, settings, text

KINDS = [("int4", False), ("half-int4", True), ("planes-3", True)]
"""Of a store's pages, and whether a folder keeps documents."""
DOCUMENT = tuple(text(150, 9))
PROMPT = Marked([text(37, 3), DOCUMENT, text(21, 4)])
CHUNKS = {"max_num_batched_tokens": 48, "enable_prefix_caching": False}


def options(folder: Path, kind: str, kept: bool, **changes: Any) -> dict[str, Any]:
    store = {"store": str(folder), "store_reads": "always"} if kept else {}
    return settings(segment_dtype=kind, **store, **changes)


def begun(llm: Any) -> KnowledgeBase:
    """A knowledge base with the document; pages that have a basis have it already."""
    for seed in (50, 51):
        ask(llm, Marked([tuple(text(400, seed))]), 1, policy="full")
    base = KnowledgeBase(llm.collective_rpc)
    base.insert("one", list(DOCUMENT))
    return base


def stepped(inner: Any, event: Callable[[int], None]) -> dict[str, Answer]:
    """What an engine answers, step by step; before each something may happen."""
    done: dict[str, Answer] = {}
    for step in range(300):
        if not inner.has_unfinished_requests():
            return done
        event(step)
        done |= {out.request_id: answer(out) for out in inner.step() if out.finished}
    raise AssertionError("requests without an end")


def expect_idle(counts: Any) -> None:
    """That nobody holds anything but documents."""
    store = counts.worker.store
    store.cache.check()
    stats = store.cache.stats()
    assert stats["held"] == stats["frozen"]
    assert counts.worker._admitted == counts.worker._prompts == {}


@pytest.mark.parametrize(("kind", "kept"), KINDS)
def test_aborted_in_the_middle(checkpoint: Any, tmp_path: Path, kind: str, kept: bool) -> None:
    """At each step of a prefill; who reads the same document beside it says what it says alone."""
    with segments(checkpoint("llama"), options(tmp_path, kind, kept), **CHUNKS) as (llm, counts):
        begun(llm)
        inner, wanted = llm.llm_engine, ask(llm, PROMPT, policy="naive")
        for at in range(1, 6):
            other = Marked([text(30 + at, 80 + at), DOCUMENT, text(90, 4)])
            inner.add_request("gone", *asked(other, 12, policy="naive"))
            inner.add_request("b", *asked(PROMPT, 6, policy="naive"))
            abort = {at: lambda: inner.abort_request(["gone"])}
            done = stepped(inner, lambda step, of=abort: of.get(step, bool)() and None)
            same([done["b"]], [wanted])
            expect_idle(counts)
            assert counts.total.hits["frozen"] >= 2 * len(DOCUMENT)
            counts.anew()


@pytest.mark.parametrize(("kind", "kept"), KINDS)
def test_preempted_and_looked_up_again(
    checkpoint: Any, tmp_path: Path, kind: str, kept: bool
) -> None:
    """By few blocks; by policy full what is said is what was computed without anybody beside."""
    made = options(tmp_path, kind, kept)
    changes = {"enable_prefix_caching": False, "num_gpu_blocks_override": 20}
    with segments(checkpoint("llama"), made, **changes) as (llm, counts):
        base = begun(llm)
        for first, policy in enumerate(("full", "naive")):
            seeds = range(5 * first, 5 * first + 5)
            marked = [Marked([text(9, seed), DOCUMENT, text(11, 50 + seed)]) for seed in seeds]
            alone = [ask(llm, given, 40, policy=policy) for given in marked]
            before = metric(llm, "num_preemptions")
            assert before == 0 or policy == "naive"
            pairs = [asked(given, 40, policy=policy) for given in marked]
            found = llm.generate(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
            assert metric(llm, "num_preemptions") > before
            said = [answer(output) for output in found]
            assert np.isfinite([one.logprobs for one in said]).all()
            if policy == "full":
                same(said, alone)
            # What comes first is said before anybody is thrown out.
            assert [one.tokens[0] for one in said] == [one.tokens[0] for one in alone]
            expect_idle(counts)
        assert counts.total.hits["frozen"] >= 10 * len(DOCUMENT)
        assert [entry["name"] for entry in base.entries()] == ["one"]


@pytest.mark.parametrize(("kind", "kept"), KINDS)
def test_deleted_and_evicted_while_a_prompt_reads_it(
    checkpoint: Any, tmp_path: Path, kind: str, kept: bool
) -> None:
    """What a prompt has begun to read stays for it, whatever comes; nobody else finds it then."""
    arena = 1 << 20
    made = options(tmp_path, kind, kept, arena=arena)
    with segments(checkpoint("llama"), made, **CHUNKS) as (llm, counts):
        base = begun(llm)
        inner, wanted = llm.llm_engine, ask(llm, PROMPT, policy="naive")

        def replace(step: int) -> None:
            if step == 2:
                base.delete("one")
            if step >= 2:
                for number in range(3):
                    tokens = text(140, 200 + 10 * step + number)
                    try:
                        base.insert(f"other {number}", tokens)
                    except PoolFull:
                        continue

        before = base.store()["evictions"]
        inner.add_request("held", *asked(PROMPT, 6, policy="naive"))
        done = stepped(inner, replace)
        same([done["held"]], [wanted])
        assert base.store()["evictions"] > before
        expect_idle(counts)
        assert "one" not in [entry["name"] for entry in base.entries()]

"""Documents of several formats: read as what their pages stand for, switched between two steps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import DocumentDecoding, documents, fresh
from families import random_tokens
from kvweave import OutOfMemory, PoolFull
from kvweave.runner import Packing, Strategy
from kvweave.runner.kv.final_text import FormatPages
from kvweave.runner.kv.text_memory import TextMemory
from kvweave.runner.tiers import strategies
from packed_decoding import apart, packed_runner, steps_of
from page_meaning import Layer, int4, random_packing
from strategy_runners import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    LONG,
    all_is_back,
    held_back,
    meaning_of,
    runner_of,
    text_of,
    uneven_model,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


# ---- how it is read -----------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16])
def test_a_document_is_read_as_what_its_pages_stand_for(model: Any, page_tokens: int) -> None:
    """Heads of several formats, behind text and before it; what is decoded is in the pool's."""
    docs = documents([LONG, 40])
    prompt = [fresh(70, 1), docs[0], fresh(30, 2), docs[1], fresh(3, 4)]
    packing, shared = random_packing("quarter-bf16", LAYERS * HEADS, DIM)
    known = {"kv_dtype": replace(packing, strategy=Strategy(0.13)), "page_tokens": page_tokens}
    runner = runner_of(model, 0.13, **known)
    report = runner.encode(docs[0].tokens, "long").packing
    runner.insert(docs[1].tokens, "short")
    runner.flush()
    assert len(report.formats) > 1
    asked = {"reserve_tokens": 140, "remember": False, "watched": False}
    texts = runner.packed.final.texts
    assert len(texts) == 2
    meanings = dict(zip((LONG, 40), map(meaning_of, texts), strict=True))
    with runner.prefill(prompt, "naive", **asked) as done:
        assert done.report.shared_kv_bytes == sum(text.nbytes for text in texts)
        sequence = decoding(runner, done, 140)
        logits = [done.logits[-1], *steps_of(runner, sequence, 139)]
        said = sequence.tokens

    def own(layer: int, of: Layer) -> Layer:
        return meanings[of[0].shape[1]](layer, of)

    known = {"exact_first": 1}
    doubles = [
        DocumentDecoding(model, 400, page_tokens, shared, of, **known) for of in (own, shared)
    ]
    wanted, first = (
        [each.prefill(prompt), *(each.step(token) for token in said[:-1])] for each in doubles
    )
    assert apart(first, wanted) > 1e-4
    assert apart(logits, wanted) < 0.05 * apart(first, wanted)


def test_a_prompt_that_begins_with_a_document_reads_it_too(model: Any) -> None:
    """As a prefix, in whole pages, and the newest of them unpacked."""
    tokens = random_tokens(LONG, 3)
    runner, plain = runner_of(model, 0.8), packed_runner(model, kv_dtype=None, max_tokens=8192)
    runner.insert(tokens, "long")
    runner.flush()
    assert text_of(runner).nbytes < BLOCKS * runner.packed.block_bytes
    prompt = np.concatenate((tokens, random_tokens(80, 4)))
    runner.prefill(prompt, "full").release()
    with runner.prefill(prompt, "prefix") as done, plain.prefill(prompt, "full") as exact:
        assert done.report.reused_prefix == (LONG + 80) // 64 * 64
        assert done.logits.isfinite().all()
        assert not torch.equal(done.logits, exact.logits)


@pytest.mark.parametrize("policy", ["foresight", "cacheblend", "epic"])
def test_every_policy_reads_it(model: Any, policy: str) -> None:
    """What a policy recomputes of it is brought aside from its pages; everything comes back."""
    docs = documents([LONG, 300])
    runner = runner_of(model, 0.8, chunk_tokens=4096, max_tokens=16384)
    for number, doc in enumerate(docs):
        runner.insert(doc.tokens, str(number))
    runner.flush()
    prompt = [fresh(70, 1), docs[1], docs[0], fresh(30, 2)]
    answer = runner.generate(prompt, policy, max_new_tokens=70, stop=[])
    assert len(answer.tokens) == 70
    engine = runner.engine(token_budget=4096, chunk_tokens=400)
    asked = [engine.submit(prompt, policy, max_new_tokens=70, stop=[]) for _ in range(2)]
    asked += [engine.submit(random_tokens(300, 9), max_new_tokens=20, stop=[])]
    engine.run()
    assert [len(request.result().tokens) for request in asked] == [70, 70, 20]
    for number in range(2):
        runner.delete(str(number))
    assert all_is_back(runner)


# ---- the switch ---------------------------------------------------------------------------


def test_who_decodes_meanwhile_goes_on_and_is_switched_between_two_steps(
    model: Any, monkeypatch: Any
) -> None:
    """Each step is that over the first pages or that over the final ones."""
    docs = documents([LONG])
    prompt = [fresh(70, 1), docs[0], fresh(150, 2)]
    runner = runner_of(model, 0.8)
    with held_back(monkeypatch) as go:
        report = runner.encode(docs[0].tokens, "long").packing
        asked = {"reserve_tokens": 20, "remember": False, "watched": False}
        with runner.prefill(prompt, "naive", **asked) as done:
            sequence = decoding(runner, done, 20)
            logits = [done.logits[-1], *steps_of(runner, sequence, 5)]
            with runner._prefiller.computing:
                go.set()
                runner.flush()
                # Nobody's pages change while somebody computes.
                assert report.waiting
                logits += steps_of(runner, sequence, 2)
            assert not report.waiting
            assert report.formats
            logits += steps_of(runner, sequence, 5)
            said = sequence.tokens
    before, after = (
        DocumentDecoding(model, 400, 16, int4(), of, exact_first=1)
        for of in (int4(), meaning_of(text_of(runner)))
    )
    wanted = [before.prefill(prompt), *(before.step(token) for token in said[:7])]
    assert apart(logits[:8], wanted) < 1e-4
    after.prefill(prompt)
    for number, (kept, now) in enumerate(zip(before.layers, after.layers, strict=True)):
        for side in (0, 1):
            kept[side][:, 70 : 70 + LONG] = now[side][:, 70 : 70 + LONG]
        before.layers[number] = kept
    wanted = [before.step(token) for token in said[7:12]]
    assert apart(logits[8:], wanted) < 1e-4


def test_a_worker_that_dies_leaves_the_first_packing(model: Any, monkeypatch: Any) -> None:
    """Its loss is reported, and not a bit of what is decoded changes."""
    docs, said = documents([LONG]), []
    prompt = [fresh(70, 1), docs[0], fresh(5, 2)]
    asked = {"reserve_tokens": 12, "remember": False, "watched": False}

    def fails(*_given: Any) -> None:
        raise RuntimeError("no memory for eigenvectors")

    for dies in (False, True):
        runner = runner_of(model, 0.8)
        with held_back(monkeypatch) as go, monkeypatch.context() as patched:
            if dies:
                patched.setattr(strategies, "ChosenFormats", fails)
            report = runner.encode(docs[0].tokens, "long").packing
            with runner.prefill(prompt, "naive", **asked) as done:
                sequence = decoding(runner, done, 12)
                logits = steps_of(runner, sequence, 5)
                if dies:
                    go.set()
                    runner.flush()
                    assert report.why == "failed: no memory for eigenvectors"
                    assert (report.lost, report.most_lost, report.formats) == (None, None, {})
                    assert 0.0 < min(report.lost_first) <= max(report.lost_first) < 0.05
                said.append([*logits, *steps_of(runner, sequence, 5)])
            go.set()
            runner.flush()
    assert all(torch.equal(one, other) for one, other in zip(*said, strict=True))
    assert runner.packing_stats()["failed"] == 1
    runner.delete("long")
    assert all_is_back(runner)


@pytest.mark.parametrize("of", [(TextMemory, "take"), (FormatPages, "fill")], ids=["room", "bytes"])
def test_a_shortage_at_the_switch_leaves_the_first_packing(
    model: Any, monkeypatch: Any, of: tuple[Any, str]
) -> None:
    """Whoever decodes goes on, nothing stays held, and another text finds its place."""
    docs = documents([LONG, LONG + 70])

    def fails(*_given: Any) -> None:
        raise OutOfMemory("packed documents: expected memory for it, got none")

    runner = runner_of(model, 0.8)
    prompt = [fresh(70, 1), docs[0], fresh(5, 2)]
    asked = {"reserve_tokens": 12, "remember": False, "watched": False}
    with held_back(monkeypatch) as go, monkeypatch.context() as patched:
        patched.setattr(*of, fails)
        report = runner.encode(docs[0].tokens, "long").packing
        with runner.prefill(prompt, "naive", **asked) as done:
            sequence = decoding(runner, done, 12)
            logits = steps_of(runner, sequence, 5)
            go.set()
            runner.flush()
            logits += steps_of(runner, sequence, 5)
    assert report.why == "failed: packed documents: expected memory for it, got none"
    assert not report.waiting
    assert runner.packing_stats()["failed"] == 1
    assert torch.stack(logits).isfinite().all()
    runner.insert(docs[1].tokens, "other")
    runner.flush()
    assert len(runner.packed.final.texts) == 1
    for name in ("long", "other"):
        runner.delete(name)
    assert all_is_back(runner)


# ---- room ---------------------------------------------------------------------------------


def test_what_a_final_text_had_in_the_pool_is_others(model: Any) -> None:
    """More documents are there at once than the pool has pages for, each read as itself."""
    packing = Packing("int4", strategy=Strategy(0.9, final_share=1.0))
    known = {"kv_dtype": packing, "max_tokens": 5120, "frozen_share": 1.0}
    runner = runner_of(model, 0.9, **known)
    backed = runner.packed.stats()["total"]
    docs = documents([LONG] * 3)
    alone = []
    for number, doc in enumerate(docs):
        lone = runner_of(model, 0.9)
        lone.insert(doc.tokens, "lone")
        lone.flush()
        prompt = [fresh(70, 1), doc, fresh(5, number)]
        alone.append(lone.generate(prompt, "naive", max_new_tokens=5, stop=[]).tokens)
        runner.insert(doc.tokens, str(number))
        runner.flush()
    known = runner.packed.stats()
    assert known["final_blocks"] == 3 * BLOCKS > backed
    assert known["held_bytes"] == known["final_bytes"] == runner.packed.final.nbytes
    assert runner.packing_stats()["final_bytes"] == known["final_bytes"]
    # All of the pool's own pages are there for requests meanwhile.
    assert len(runner.generate(random_tokens(5000, 5), max_new_tokens=60, stop=[]).tokens) == 60
    for number, doc in enumerate(docs):
        prompt = [fresh(70, 1), doc, fresh(5, number)]
        said = runner.generate(prompt, "naive", max_new_tokens=5, stop=[]).tokens
        assert said == alone[number]
        runner.delete(str(number))
        runner.packed.cache.check()
    assert all_is_back(runner)


def test_a_text_stays_for_who_reads_it_and_nobody_new_finds_it(model: Any) -> None:
    doc = documents([LONG])[0]
    runner = runner_of(model, 0.9, max_tokens=32768)
    runner.insert(doc.tokens, "a")
    runner.flush()
    prompt = [fresh(70, 1), doc, fresh(5, 2)]
    asked = {"reserve_tokens": 20, "remember": False, "watched": False}
    with runner.prefill(prompt, "naive", **asked) as done:
        sequence = decoding(runner, done, 20)
        steps_of(runner, sequence, 3)
        runner.delete("a")
        assert runner.packed.stats()["final_blocks"] == BLOCKS
        with runner.prefill(prompt, "naive", **asked) as other:
            assert other.report.reused_segment == 0
        # Another one that lacks room lets nothing of it go.
        runner.insert(random_tokens(LONG, 7), "b")
        runner.flush()
        assert all(logits.isfinite().all() for logits in steps_of(runner, sequence, 3))
        assert runner.packed.stats()["final_blocks"] == 2 * BLOCKS
    # Whoever computes next finds that nobody reads it any more.
    runner.generate(random_tokens(9, 8), max_new_tokens=2, stop=[])
    assert runner.packed.stats()["final_blocks"] == BLOCKS
    runner.delete("b")
    assert all_is_back(runner)


def test_a_text_that_nobody_reads_has_no_memory(model: Any) -> None:
    """Also where the last step of all was one that read it."""
    doc = documents([LONG])[0]
    runner = runner_of(model, 0.9)
    memory = runner.packed.final.memory
    whole = [(memory.most_bytes, 1)]
    runner.insert(doc.tokens, "a")
    runner.flush()
    runner.generate([fresh(70, 1), doc, fresh(5, 2)], "naive", max_new_tokens=3, stop=[])
    assert not memory.fits(whole)
    runner.delete("a")
    assert memory.fits(whole)


def test_names_of_a_text(model: Any, monkeypatch: Any) -> None:
    """One with two names goes with the last; a name that is given anew lets the old text go."""
    runner = runner_of(model, 0.9)
    tokens = random_tokens(LONG, 1)
    runner.insert(tokens, "a")
    runner.flush()
    assert runner.encode(tokens, "b").packing.why == "packed before"
    runner.delete("a")
    assert runner.packed.stats()["final_blocks"] == BLOCKS
    runner.insert(random_tokens(LONG, 2), "b")
    runner.flush()
    assert runner.packed.stats()["final_blocks"] == BLOCKS
    assert runner.packed.cache.match_prefix(tokens) == 0
    runner.delete("b")
    with held_back(monkeypatch) as go:
        report = runner.encode(tokens, "c").packing
        runner.delete("c")
        go.set()
        runner.flush()
    assert report.why == "deleted before it was packed finally"
    assert all_is_back(runner)


def test_a_name_that_is_given_twice_keeps_no_other_text(model: Any) -> None:
    """The block that a second insertion had for its last page is another document's then."""
    runner = runner_of(model, 0.9)
    for _ in range(2):
        runner.insert(random_tokens(70, 3), "short")
    runner.insert(random_tokens(LONG, 1), "long")
    runner.flush()
    assert runner.packed.stats()["final_blocks"] == BLOCKS
    runner.delete("long")
    assert runner.packed.stats()["final_blocks"] == 0
    runner.delete("short")
    assert all_is_back(runner)


def test_a_text_that_is_inserted_again_stays_as_it_is(model: Any) -> None:
    doc = documents([LONG])[0]
    runner = runner_of(model, 0.9)
    prompt = [fresh(70, 1), doc, fresh(5, 2)]
    said = []
    for _ in range(3):
        runner.insert(doc.tokens, "a")
        runner.flush()
        done = runner.generate(prompt, "naive", max_new_tokens=5, stop=[])
        said.append((done.tokens, done.report.reused_segment, text_of(runner)))
    assert said[0] == said[1] == said[2]
    assert said[0][1] == LONG
    runner.delete("a")
    assert all_is_back(runner)


def test_texts_without_room_stay_in_the_pool(model: Any) -> None:
    small = Strategy(0.9, final_share=0.2)
    known = {"max_tokens": 8192, "frozen_share": 1.0}
    runner = runner_of(model, 0.9, kv_dtype=Packing("int4", strategy=small), **known)
    reports = [runner.encode(random_tokens(n, n), str(n)).packing for n in (LONG, LONG + 1)]
    runner.flush()
    assert [bool(report.formats) for report in reports] == [True, False]
    assert reports[1].why == "no room beside the pool for one more document"
    with suppress(PoolFull):
        runner.prefill(random_tokens(4000, 3), "full").release()
    for segment in runner.segments():
        runner.delete(segment.name)
    assert all_is_back(runner)


@pytest.mark.parametrize("megabytes", [2, 10])
def test_all_is_within_its_bytes(model: Any, megabytes: int) -> None:
    given = {"arena_bytes": megabytes << 20, "max_tokens": None}
    runner = runner_of(model, 0.9, **given)
    exact = runner.cache.stats()["arena_pages"] * runner.cache.shape.page_bytes
    assert 0.9 * (megabytes << 20) < exact + runner.packed.nbytes <= megabytes << 20

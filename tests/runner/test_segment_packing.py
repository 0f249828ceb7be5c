"""Text of requests that is packed finally in segments: what is read, the switch, who keeps it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import documents, fresh
from families import random_tokens
from head_maps import class_map
from kvweave import InvalidArgument, PoolFull, Unsupported
from kvweave.adapters.transformers import PagedCache
from kvweave.payload import KvPayload
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.hand_off import take_over
from kvweave.runner.kv.final_text import FinalText
from kvweave.runner.tiers import final_packing, strategies
from kvweave.runner.tiers.final_packing import NO_ROOM
from packed_decoding import PackedDecoding, apart, nothing_is_held, packed_runner, steps_of
from page_meaning import Layer, Meaning, int4, of_format, random_packing
from ranked_pages import FULL, kinds_map, top_k
from strategy_runners import (
    DIM,
    HEADS,
    LAYERS,
    all_is_gone,
    held_back,
    meaning_of,
    uneven_model,
)

SEGMENT = 640
BLOCKS = SEGMENT // 64
PROMPT = 2 * SEGMENT + 220
"""Tokens of a prompt with two segments, and of a third what an answer fills."""
ASKED: dict[str, Any] = {"reserve_tokens": 480, "remember": False, "watched": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


def runner_of(model: Any, bound: float = 0.3, **settings: Any) -> Any:
    packing = Packing("int4", strategy=Strategy(bound), segment_tokens=SEGMENT)
    given = {"kv_dtype": packing, "max_tokens": 16384, "chunk_tokens": 400, **settings}
    return packed_runner(model, **given)


def texts_of(runner: Any) -> tuple[FinalText, ...]:
    return runner.packed.final.texts


def forget_all(runner: Any) -> None:
    """Lets go of all that was remembered of requests, and of what they had lent."""
    runner.packed.documents.forget_cached("")


def by_segments(meanings: Sequence[Meaning], rest: Meaning, size: int = SEGMENT) -> Meaning:
    """What pages stand for whose segments have a meaning each, and `rest` what is behind them."""

    def meaning(layer: int, of: Layer) -> Layer:
        parts, at = [], 0
        for own in meanings:
            end = min(at + size, of[0].shape[1])
            parts.append(own(layer, (of[0][:, at:end], of[1][:, at:end])))
            at = end
        if at < of[0].shape[1]:
            parts.append(rest(layer, (of[0][:, at:], of[1][:, at:])))
        return torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1)

    return meaning


# ---- what is read -------------------------------------------------------------------------


def test_each_segment_is_read_as_what_its_pages_stand_for(model: Any, monkeypatch: Any) -> None:
    """A prompt over pages as they were packed first, and its steps over both kinds."""
    tokens = random_tokens(PROMPT, 1)
    runner = runner_of(model)
    with held_back(monkeypatch) as go, runner.prefill(tokens, "full", **ASKED) as done:
        reports = done.report.packed.segments
        assert [report.waiting for report in reports] == [True] * 3
        go.set()
        runner.flush()
        assert [report.tokens for report in reports] == [SEGMENT] * 3
        assert [bool(report.formats) for report in reports] == [True, True, False]
        assert all(report.most_lost is not None for report in reports[:2])
        meanings = [meaning_of(text) for text in texts_of(runner)]
        sequence = decoding(runner, done, 80)
        logits = [done.logits[-1], *steps_of(runner, sequence, 60)]
        said = sequence.tokens
    double = PackedDecoding(model)
    wanted = [double.prefill(tokens, 400)]
    double.meaning = by_segments(meanings, int4())
    wanted += [double.step(token) for token in said[:-1]]
    assert apart(logits, wanted) < 1e-4
    double = PackedDecoding(model)
    first = [double.prefill(tokens, 400), *(double.step(token) for token in said[:-1])]
    assert apart(first, wanted) > 1e-3
    assert all_is_gone(runner)


def test_an_answer_fills_segments_too(model: Any, monkeypatch: Any) -> None:
    """One that is full is packed finally between two steps, and read so from the next one on."""
    tokens, until = random_tokens(PROMPT, 2), 3 * SEGMENT - PROMPT + 5
    runner = runner_of(model)
    with runner.prefill(tokens, "full", **ASKED) as done:
        runner.flush()
        two = [meaning_of(text) for text in texts_of(runner)]
        with held_back(monkeypatch) as go:
            sequence = decoding(runner, done, 470)
            logits = [done.logits[-1], *steps_of(runner, sequence, until)]
            assert len(texts_of(runner)) == 2
            go.set()
            runner.flush()
        third = done.report.packed.segments[2]
        assert third.formats
        assert not third.waiting
        logits += steps_of(runner, sequence, 10)
        said = sequence.tokens
        three = [meaning_of(text) for text in texts_of(runner)]
    double = PackedDecoding(model)
    wanted = [double.prefill(tokens, 400)]
    double.meaning = by_segments(two, int4())
    wanted += [double.step(token) for token in said[:until]]
    double.meaning = by_segments(three, int4())
    wanted += [double.step(token) for token in said[until:-1]]
    assert apart(logits, wanted) < 1e-4
    assert all_is_gone(runner)


@pytest.mark.parametrize(("name", "size", "count"), [("half-int4", 2560, 2), ("planes-3", 5632, 1)])
def test_without_a_strategy_segments_have_bases_of_their_own(
    model: Any, name: str, size: int, count: int
) -> None:
    """Pages of the pool, in the basis of each segment from the switch on."""
    tokens = random_tokens(count * size + 300, 3)
    packing, _ = random_packing(name, LAYERS * HEADS, DIM)
    known = {"kv_dtype": replace(packing, segment_tokens=size), "max_tokens": 32768}
    runner = packed_runner(model, chunk_tokens=1000, **known)
    with runner.prefill(tokens, "full", **ASKED) as done:
        runner.flush()
        reports = done.report.packed.segments
        assert [report.basis for report in reports] == [*["own"] * count, "shared"]
        assert all(max(report.lost) < max(report.lost_first) for report in reports[:count])
        bases = runner.packed.bases
        own = np.unique(bases.numbers(done.kv.packed.entries()[:, 0]))
        own = own[own > 1]
        assert len(own) == count
        sequence = decoding(runner, done, 20)
        logits = steps_of(runner, sequence, 8)
        said = sequence.tokens
        form = runner.packed.pages.format
        of_each = [of_format(form, bases.on_host(int(n))) for n in own]
        shared = of_format(form, bases.on_host(bases.shared))
    wanted = []
    for of in (shared, by_segments(of_each, shared, size)):
        double = PackedDecoding(model, meaning=shared)
        double.prefill(tokens, 1000)
        double.meaning = of
        wanted.append([double.step(token) for token in said[:-1]])
    first, final = wanted
    assert apart(logits, final) < 0.2 * apart(logits, first)
    assert nothing_is_held(runner)


# ---- the switch ---------------------------------------------------------------------------


def test_who_decodes_meanwhile_is_switched_between_two_steps(model: Any, monkeypatch: Any) -> None:
    tokens = random_tokens(PROMPT, 4)
    runner = runner_of(model)
    with held_back(monkeypatch) as go, runner.prefill(tokens, "full", **ASKED) as done:
        sequence = decoding(runner, done, 40)
        logits = [done.logits[-1], *steps_of(runner, sequence, 5)]
        with runner._prefiller.computing:
            go.set()
            runner.flush()
            logits += steps_of(runner, sequence, 2)
            assert not texts_of(runner)
        logits += steps_of(runner, sequence, 5)
        meanings = [meaning_of(text) for text in texts_of(runner)]
        said = sequence.tokens
    double = PackedDecoding(model)
    wanted = [double.prefill(tokens, 400), *(double.step(token) for token in said[:7])]
    double.meaning = by_segments(meanings, int4())
    wanted += [double.step(token) for token in said[7:-1]]
    assert apart(logits, wanted) < 1e-4
    assert all_is_gone(runner)


@pytest.mark.parametrize("where", ["measured", "chosen"])
def test_a_worker_that_dies_leaves_the_first_packing(
    model: Any, monkeypatch: Any, where: str
) -> None:
    def fails(*_given: Any) -> None:
        raise RuntimeError("no memory for eigenvectors")

    of = (final_packing, "part_losses") if where == "measured" else (strategies, "ChosenFormats")
    monkeypatch.setattr(*of, fails)
    tokens = random_tokens(PROMPT, 5)
    runner, plain = runner_of(model), packed_runner(model, max_tokens=8192, chunk_tokens=400)
    answer = runner.generate(tokens, max_new_tokens=30, stop=[])
    runner.flush()
    reports = answer.report.packed.segments
    assert [report.why for report in reports[:2]] == ["failed: no memory for eigenvectors"] * 2
    assert answer.tokens == plain.generate(tokens, max_new_tokens=30, stop=[]).tokens
    assert runner.packing_stats()["copied_bytes"] == 0


def test_one_that_is_released_before_keeps_nothing(model: Any, monkeypatch: Any) -> None:
    runner = runner_of(model)
    with held_back(monkeypatch) as go:
        with runner.prefill(random_tokens(PROMPT, 6), "full", **ASKED) as done:
            reports = done.report.packed.segments
        go.set()
        runner.flush()
    assert [report.why for report in reports[:2]] == ["nobody reads it any more"] * 2
    assert [report.waiting for report in reports] == [False] * 3
    assert runner.packing_stats()["copied_bytes"] == 0
    assert all_is_gone(runner)


def test_without_room_on_the_host_a_segment_stays_as_it_is(model: Any) -> None:
    """The next one has its copy again, once there is room."""
    packing = Packing("int4", strategy=Strategy(0.3), segment_tokens=SEGMENT)
    one = SEGMENT * 2 * HEADS * DIM * LAYERS * 4
    runner = runner_of(model, kv_dtype=replace(packing, copy_bytes=one - 1))
    with runner.prefill(random_tokens(PROMPT, 7), "full", **ASKED) as done:
        runner.flush()
        assert [report.why for report in done.report.packed.segments[:2]] == [NO_ROOM] * 2
    assert runner.packing_stats()["copied_bytes"] == 0
    assert all_is_gone(runner)


# ---- who keeps it -------------------------------------------------------------------------


def test_what_is_remembered_is_found_as_it_was_packed_finally(model: Any) -> None:
    tokens = random_tokens(PROMPT, 8)
    runner = runner_of(model)
    runner.prefill(tokens, "full").release()
    runner.flush()
    first = texts_of(runner)
    assert len(first) == 2
    longer = np.concatenate((tokens, random_tokens(900, 9)))
    with runner.prefill(longer, "prefix", **ASKED) as done:
        assert done.report.reused_prefix == PROMPT // 64 * 64
        # What follows has segments of its own, from the first page on that was computed.
        runner.flush()
        assert len(texts_of(runner)) == 3
        assert done.logits.isfinite().all()
    runner.generate(random_tokens(9, 1), max_new_tokens=2, stop=[])
    assert texts_of(runner) == first
    forget_all(runner)
    assert all_is_gone(runner)


def test_one_that_is_remembered_while_it_waits_is_found(model: Any, monkeypatch: Any) -> None:
    tokens = random_tokens(PROMPT, 10)
    runner = runner_of(model)
    with held_back(monkeypatch) as go:
        runner.prefill(tokens, "full").release()
        go.set()
        runner.flush()
    assert len(texts_of(runner)) == 2
    with runner.prefill(tokens, "prefix", **ASKED) as done:
        assert done.report.reused_prefix > 2 * SEGMENT
    forget_all(runner)
    assert all_is_gone(runner)


def test_later_segments_make_room_before_those_that_they_follow(model: Any) -> None:
    packing = Packing("int4", strategy=Strategy(0.9, final_share=0.3), segment_tokens=SEGMENT)
    runner = runner_of(model, kv_dtype=packing, max_tokens=8192)
    for seed in range(12):
        runner.prefill(random_tokens(PROMPT, 20 + seed), "full").release()
        runner.flush()
        final = runner.packed.final
        assert final.nbytes <= final.memory.most_bytes
        runner.packed.cache.check()
        held = [text.held.length for text in texts_of(runner)]
        assert all(length in (SEGMENT, 2 * SEGMENT) for length in held)
        assert held.count(SEGMENT) >= held.count(2 * SEGMENT) > 0
    assert 0 < len(texts_of(runner)) < 24
    forget_all(runner)
    assert all_is_gone(runner)


def test_requests_that_come_and_go_lose_nothing(model: Any) -> None:
    """Those that begin alike, are remembered or not, branch, and end while a segment is packed."""
    draws = np.random.default_rng(3)
    packing = Packing("int4", strategy=Strategy(0.9, final_share=0.3), segment_tokens=512)
    runner = runner_of(model, kv_dtype=packing, max_tokens=12288)
    beginnings = [random_tokens(1400, seed) for seed in range(3)]
    live: list[Any] = []
    for step in range(50):
        if live and draws.random() < 0.45:
            live.pop(int(draws.integers(len(live)))).release()
        else:
            begun = beginnings[int(draws.integers(3))][: int(draws.integers(1, 1400))]
            tokens = np.concatenate((begun, random_tokens(int(draws.integers(1, 900)), 100 + step)))
            asked = {"remember": bool(draws.random() < 0.5), "watched": False}
            try:
                live.append(runner.prefill(tokens, "prefix", reserve_tokens=64, **asked))
            except PoolFull:
                live.pop(0).release() if live else None
        if draws.random() < 0.3:
            runner.flush()
        runner.packed.cache.check()
        for done in live:
            assert done.logits.isfinite().all()
    for done in live:
        done.release()
    runner.flush()
    known = runner.packing_stats()
    assert known["final"] > 10
    assert known["kept"] > 0
    assert known["failed"] == known["copied_bytes"] == 0
    forget_all(runner)
    assert all_is_gone(runner)


def test_an_engine_batches_them(model: Any) -> None:
    runner = runner_of(model, 0.9, max_tokens=8192)
    prompts = [random_tokens(count, 40 + count) for count in (1500, 700, 90, 1290)]
    engine = runner.engine(token_budget=800, chunk_tokens=400)
    asked = [engine.submit(p, max_new_tokens=40, stop=[]) for p in prompts]
    engine.run()
    for request in asked:
        assert len(request.result().tokens) == 40
    runner.flush()
    forget_all(runner)
    assert all_is_gone(runner)


# ---- beside what else there is ------------------------------------------------------------


def test_heads_with_windows_read_their_own_of_it(model: Any, monkeypatch: Any) -> None:
    sights = np.array([[[128, 64], [0, 0]], [[0, 0], [17, 1]]], np.int32)
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    runner = runner_of(model, heads=class_map(sights, plain.spec.fingerprint))
    tokens = random_tokens(PROMPT, 12)
    with held_back(monkeypatch) as go, runner.prefill(tokens, "full", **ASKED) as done:
        go.set()
        runner.flush()
        meanings = [meaning_of(text) for text in texts_of(runner)]
        sequence = decoding(runner, done, 30)
        logits = [done.logits[-1], *steps_of(runner, sequence, 20)]
        said = sequence.tokens
    double = PackedDecoding(model, sights=sights)
    wanted = [double.prefill(tokens, 400)]
    double.meaning = by_segments(meanings, int4())
    wanted += [double.step(token) for token in said[:-1]]
    assert apart(logits, wanted) < 1e-4
    assert all_is_gone(runner)


def test_heads_that_choose_all_of_it_say_what_whole_ones_say(model: Any) -> None:
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    choosing = kinds_map(plain.spec, [top_k(64), FULL])
    logits = []
    for heads in (None, choosing):
        runner = runner_of(model, heads=heads)
        with runner.prefill(random_tokens(PROMPT, 12), "full", **ASKED) as done:
            runner.flush()
            assert len(texts_of(runner)) == 2
            seen = [done.logits[-1], *steps_of(runner, decoding(runner, done, 30), 30)]
        logits.append(seen)
        assert all_is_gone(runner)
    assert apart(*logits) < 1e-4


def test_heads_that_choose_read_fewer_pages_of_segments(model: Any) -> None:
    """What they choose from a segment are its final pages; everything comes back."""
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    runner = runner_of(model, heads=kinds_map(plain.spec, [top_k(3), FULL]))
    with runner.prefill(random_tokens(PROMPT, 13), "full", **ASKED) as done:
        runner.flush()
        logits = steps_of(runner, decoding(runner, done, 40), 40)
        assert all(each.isfinite().all() for each in logits)
    assert all_is_gone(runner)


def test_a_payload_has_segments_in_their_formats(model: Any) -> None:
    here, there = runner_of(model), runner_of(model)
    with here.prefill(random_tokens(PROMPT, 14), "full", **ASKED) as done:
        here.flush()
        payload = KvPayload.from_bytes(here.export(done).to_bytes())
        wanted = steps_of(here, decoding(here, done, 40), 30)
    with take_over(there._prefiller, payload, None, 40) as done:
        assert len(texts_of(there)) == 2
        got = steps_of(there, decoding(there, done, 40), 30)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert all_is_gone(here)
    assert all_is_gone(there)


def test_documents_in_the_hosts_memory_and_segments_share_the_room(model: Any) -> None:
    runner = runner_of(model, 0.9, max_tokens=32768, document_bytes=1 << 22)
    docs = documents([2600, 700])
    for turn in range(2):
        for number, doc in enumerate(docs):
            runner.insert(doc.tokens, str(number))
        runner.prefill(random_tokens(PROMPT, 15 + turn), "full").release()
        runner.flush()
        prompt = [fresh(70, 1), docs[0], fresh(20, 2), docs[1], fresh(9, 3)]
        assert len(runner.generate(prompt, "naive", max_new_tokens=5, stop=[]).tokens) == 5
        for number in range(2):
            runner.delete(str(number))
    forget_all(runner)
    assert all_is_gone(runner)


def test_prompts_of_documents_have_no_segments(model: Any) -> None:
    docs = documents([700])
    runner = runner_of(model, max_tokens=32768)
    runner.insert(docs[0].tokens, "one")
    runner.flush()
    answer = runner.generate(
        [fresh(700, 1), docs[0], fresh(30, 2)], "naive", max_new_tokens=5, stop=[]
    )
    assert len(answer.tokens) == 5
    runner.delete("one")
    forget_all(runner)
    assert all_is_gone(runner)


# ---- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 63, 100, -64, 64.0, "64", True])
def test_segments_are_whole_pages(tokens: Any) -> None:
    with pytest.raises(InvalidArgument, match="segment_tokens"):
        Packing("half-int4", segment_tokens=tokens)


def test_a_format_without_bases_needs_a_strategy() -> None:
    with pytest.raises(InvalidArgument, match="segment_tokens: expected None beside 'int4'"):
        Packing("int4", segment_tokens=640)


def test_segments_are_long_enough_for_bases_of_their_own(model: Any) -> None:
    """The least that is said is enough, and a page less is not."""
    with pytest.raises(InvalidArgument, match="segment_tokens: expected at least") as told:
        runner_of(model, kv_dtype=Packing("half-int4", segment_tokens=64))
    least = int(re.search(r"at least (\d+)", str(told.value))[1])
    runner_of(model, kv_dtype=Packing("half-int4", segment_tokens=least))
    with pytest.raises(InvalidArgument, match="segment_tokens"):
        runner_of(model, kv_dtype=Packing("half-int4", segment_tokens=least - 64))


def test_only_a_runner_packs_segments(model: Any) -> None:
    with pytest.raises(Unsupported, match="segment_tokens"):
        PagedCache(model, kv_dtype=Packing("half-int4", segment_tokens=640))

"""What a runner is told of texts: kept, held, fetched and given up as it was said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families import random_tokens, tiny
from kvweave import (
    AlreadyStepping,
    InvalidArgument,
    PoolFull,
    Runner,
    Segment,
    Unsupported,
    Workflow,
)
from packed_decoding import packed_runner
from tiered_runners import answer, evict, sources, tiered

TEXT = 96
TEXTS = [random_tokens(TEXT, seed).tolist() for seed in range(8)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def runner_of(model: Any, texts: int, eviction: str = "cost-aware", **more: Any) -> Runner:
    """A runner with room for so many texts and one request's last page."""
    room = texts * TEXT + 2 * 16
    options = {"check": False, "progress": False, **more}
    return Runner(model, max_tokens=room, eviction=eviction, **options)


def learn(runner: Runner, *numbers: int, namespace: str = "") -> None:
    for number in numbers:
        runner.prefill(TEXTS[number], "full", namespace=namespace).release()


def cached(runner: Runner, number: int, namespace: str = "") -> int:
    tokens = np.asarray(TEXTS[number], np.int32)
    return runner.cache.match_prefix(tokens, namespace, regime=runner.regime(TEXT))


def test_what_is_retained_stays_and_what_is_demoted_goes(model: Any) -> None:
    runner = runner_of(model, 3)
    learn(runner, 0, 1, 2)
    assert runner.retain(TEXTS[0]) == TEXT
    assert runner.demote(TEXTS[2]) == TEXT
    learn(runner, 3)
    assert [cached(runner, number) for number in (0, 1, 3)] == [TEXT] * 3
    assert cached(runner, 2) < TEXT
    learn(runner, 4, 5, 6)
    assert cached(runner, 0) == TEXT
    assert runner.retain(TEXTS[0], priority=0) == TEXT
    learn(runner, 7, 1, 2, 3)
    assert cached(runner, 0) == 0
    runner.cache.check()


def test_a_higher_priority_stays_longer(model: Any) -> None:
    runner = runner_of(model, 3)
    learn(runner, 0, 1, 2)
    runner.retain(TEXTS[0], priority=1)
    runner.retain(TEXTS[1], priority=2)
    runner.retain(TEXTS[2], priority=2)
    learn(runner, 3)
    assert cached(runner, 0) < TEXT
    assert (cached(runner, 1), cached(runner, 2)) == (TEXT, TEXT)


def test_ranges_of_a_text_have_priorities_of_their_own(model: Any) -> None:
    """Its beginning outlives its end, and what was said of neither goes first."""
    runner = runner_of(model, 3)
    learn(runner, 0, 1, 2)
    half = TEXT // 2
    assert runner.retain(TEXTS[0], priority=3, tokens=(0, half)) == half
    assert runner.retain(TEXTS[0], priority=1, tokens=(half, TEXT)) == TEXT - half
    assert runner.retain(TEXTS[1], priority=2) == TEXT
    learn(runner, 3)
    assert [cached(runner, number) for number in (0, 1)] == [TEXT, TEXT]
    assert cached(runner, 2) < TEXT
    runner.retain(TEXTS[3], priority=2)
    learn(runner, 4)
    assert half <= cached(runner, 0) < TEXT
    assert (cached(runner, 1), cached(runner, 3)) == (TEXT, TEXT)
    assert runner.retain(TEXTS[0], tokens=(TEXT, TEXT)) == 0


def test_the_end_of_a_text_is_demoted_alone(model: Any) -> None:
    runner = runner_of(model, 3)
    learn(runner, 0, 1, 2)
    half = TEXT // 2
    assert runner.demote(TEXTS[2], tokens=(half, TEXT)) == half
    learn(runner, 3)
    assert [cached(runner, number) for number in range(4)] == [TEXT, TEXT, half, TEXT]


def test_of_a_marked_document_what_is_in_the_range_is_meant(model: Any) -> None:
    runner = runner_of(model, 4)
    learn(runner, 0, namespace="library")
    learn(runner, 1, namespace="library")
    head = Segment(tokens=random_tokens(16, 99))
    prompt = [head, Segment(tokens=TEXTS[0], namespace="library")]
    runner.retain(prompt, priority=2, tokens=(0, 16 + TEXT // 2))
    learn(runner, 2, 3, 4, 5)
    assert TEXT // 2 <= cached(runner, 0, "library") < TEXT
    assert cached(runner, 1, "library") < TEXT


def test_what_is_retained_for_a_time_is_as_any_other_then(model: Any) -> None:
    runner = runner_of(model, 3)
    learn(runner, 0)
    runner.retain(TEXTS[0], priority=9, ttl=600.0)
    learn(runner, 1, 2, 3, 4)
    assert cached(runner, 0) == TEXT
    runner.retain(TEXTS[0], priority=9, ttl=0.02)
    time.sleep(0.03)
    learn(runner, 5, 6, 7)
    assert cached(runner, 0) < TEXT


def test_nothing_is_said_of_what_is_not_cached(model: Any) -> None:
    runner = runner_of(model, 3)
    learn(runner, 0, namespace="a")
    assert runner.retain(TEXTS[0]) == 0
    assert runner.retain(TEXTS[0], namespace="a") == TEXT
    assert runner.demote(TEXTS[1], namespace="a") == 0


def test_marked_documents_are_retained_with_their_text(model: Any) -> None:
    runner = runner_of(model, 4)
    learn(runner, 0, namespace="library")
    head = Segment(tokens=TEXTS[1][:16], namespace="x")
    runner.retain([head, Segment(tokens=TEXTS[0], namespace="library")])
    learn(runner, 2, 3, 4, 5, 6)
    assert cached(runner, 0, "library") == TEXT


def test_a_pin_holds_until_it_is_released(model: Any) -> None:
    runner = runner_of(model, 3, eviction="lru")
    learn(runner, 0)
    with runner.pin(TEXTS[0]) as pin:
        assert pin.tokens == TEXT
        learn(runner, 1, 2, 3, 4)
        assert cached(runner, 0) == TEXT
        with pytest.raises(PoolFull):
            runner.prefill([*TEXTS[1], *TEXTS[2], *TEXTS[3], *TEXTS[4]], "full")
    learn(runner, 5, 6, 7)
    assert cached(runner, 0) < TEXT
    pin.release()
    stats = runner.cache.stats()["groups"][0]
    assert stats["held"] == 0
    runner.cache.check()


def test_a_pin_of_nothing_holds_nothing(model: Any) -> None:
    runner = runner_of(model, 3)
    with runner.pin(TEXTS[0]) as pin:
        assert pin.tokens == 0
        assert runner.cache.stats()["groups"][0]["held"] == 0


def test_a_pin_that_finds_no_room_holds_nothing(model: Any) -> None:
    runner = runner_of(model, 3, eviction="lru")
    learn(runner, 0)
    blocks = runner.cache.stats()["groups"][0]["total"]
    with runner.cache.admit(np.zeros((blocks - TEXT // 16) * 16, np.int32), reuse="none"):
        before = runner.cache.stats()["groups"][0]
        with pytest.raises(PoolFull):
            runner.pin(TEXTS[0])
        assert runner.cache.stats()["groups"][0] == before
    runner.cache.check()


def test_documents_are_fetched_before_they_are_asked_for(model: Any, tmp_path: Path) -> None:
    runner = tiered(model, store=tmp_path / "store", document_bytes=1 << 22)
    runner.insert(TEXTS[0], "a")
    runner.insert(TEXTS[1], "b")
    runner.flush()
    for name in ("a", "b"):
        runner.cache.delete(name)
    evict(runner)
    text = [Segment(tokens=TEXTS[0]), Segment(tokens=TEXTS[2])]
    assert cached(runner, 0) == 0
    assert runner.prefetch(text) == ["host", "computed"]
    assert cached(runner, 0) == TEXT
    assert sources(answer(runner, TEXTS[0])) == ["device"]
    assert runner.prefetch(text)[0] == "device"
    assert runner.prefetch(TEXTS[0]) == []
    runner.cache.check()
    runner.close()


def test_documents_of_a_store_alone_are_fetched(model: Any, tmp_path: Path) -> None:
    runner = tiered(model, store=tmp_path / "store")
    runner.insert(TEXTS[0], "a")
    runner.flush()
    runner.cache.delete("a")
    evict(runner)
    assert runner.prefetch([Segment(tokens=TEXTS[0])]) == ["disk"]
    assert sources(answer(runner, TEXTS[0])) == ["device"]
    assert runner.tiers is not None
    assert runner.tiers.stats()["reading_bytes"] == 0
    runner.close()


def test_without_tiers_nothing_is_fetched(model: Any) -> None:
    assert runner_of(model, 3).prefetch([Segment(tokens=TEXTS[0])]) == ["computed"]


def test_a_workflow_fetches_what_may_come_next(model: Any, tmp_path: Path) -> None:
    runner = tiered(model, store=tmp_path / "store", eviction="cost-aware")
    runner.insert(TEXTS[0], "a")
    runner.flush()
    runner.cache.delete("a")
    evict(runner)
    texts = {"planner": TEXTS[1], "reader": [Segment(tokens=TEXTS[0])]}
    with Workflow(runner, texts, {"planner": ["reader"]}) as flow:
        with flow.step("planner"):
            limit = time.monotonic() + 20
            while not flow._ahead["reader"].is_read and time.monotonic() < limit:
                time.sleep(0.005)
        assert cached(runner, 0) == TEXT
        with flow.step("reader"):
            assert sources(answer(runner, TEXTS[0])) == ["device"]
        assert flow._ahead == {}
    assert runner.tiers is not None
    assert runner.tiers.stats()["reading_bytes"] == 0
    runner.cache.check()
    runner.close()


def test_what_a_workflow_has_not_read_in_time_is_given_up(model: Any, tmp_path: Path) -> None:
    runner = tiered(model, store=tmp_path / "store", eviction="cost-aware")
    runner.insert(TEXTS[0], "a")
    runner.flush()
    runner.cache.delete("a")
    evict(runner)
    assert runner.tiers is not None
    texts = {"planner": TEXTS[1], "reader": [Segment(tokens=TEXTS[0])]}
    with runner.tiers.reads["disk"].worker.changed:
        # No read begins while this is held.
        flow = Workflow(runner, texts, {"planner": ["reader"]})
        flow.begin("planner")
        flow.begin("reader")
    assert sources(answer(runner, TEXTS[0])) == ["disk"]
    flow.close()
    assert runner.tiers.stats()["reading_bytes"] == 0
    runner.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"priority": 256}, "expected 0 <= priority <= 255, got 256"),
        ({"priority": -1}, "expected 0 <= priority <= 255, got -1"),
        ({"priority": "high"}, "priority"),
        ({"ttl": 0}, "ttl: expected a time above 0, got 0"),
        ({"ttl": -1.0}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": float("inf")}, "ttl"),
        ({"namespace": 3}, "namespace"),
        ({"tokens": 3}, "tokens: expected a start and an end, got 3"),
        ({"tokens": (0, 1, 2)}, "tokens: expected a start and an end"),
        ({"tokens": (-1, 2)}, "start of tokens: expected 0 <= "),
        ({"tokens": (5, 4)}, "end of tokens: expected 5 <= "),
        ({"tokens": (0, 10**6)}, "end of tokens"),
        ({"tokens": (0.0, 2)}, "start of tokens"),
    ],
)
def test_what_cannot_be_retained_is_refused(model: Any, call: dict[str, Any], words: str) -> None:
    runner = runner_of(model, 2)
    with pytest.raises(InvalidArgument, match=words):
        runner.retain(TEXTS[0], **call)
    if "tokens" in call:
        with pytest.raises(InvalidArgument, match=words):
            runner.demote(TEXTS[0], **call)


def test_calls_that_make_no_sense_are_refused(model: Any) -> None:
    for eviction in ("lru", "s3-fifo", "lfu"):
        runner = runner_of(model, 2, eviction)
        for call in (runner.retain, runner.demote):
            with pytest.raises(
                InvalidArgument, match="runner: expected eviction='cost-aware', got"
            ):
                call(TEXTS[0])
    with pytest.raises(InvalidArgument, match="expected"):
        runner_of(model, 2).pin("")
    packed = packed_runner(tiny("llama", head_dim=64))
    with pytest.raises(Unsupported, match="pin"):
        packed.pin(TEXTS[0])


def test_one_thread_fetches(model: Any, tmp_path: Path) -> None:
    runner = tiered(model, store=tmp_path / "store")
    with runner.serve() as server:
        with pytest.raises(AlreadyStepping):
            runner.prefetch([Segment(tokens=TEXTS[0])])
        assert server.call(lambda: runner.prefetch([Segment(tokens=TEXTS[0])])) == ["computed"]
    runner.close()

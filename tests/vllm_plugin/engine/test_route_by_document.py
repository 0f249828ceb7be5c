"""The example of a router: what it knows of engines by their events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

from kvweave.adapters.vllm.segments.events import events_of
from vllm_router import (
    heard,
    names,
    payload,
    played,
    published,
    removed,
    router,
    stored,
    taken,
    until,
)

# ---- what events say ---------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_documents_come_and_go(monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> None:
    """Whether vLLM publishes whole hashes or their last 64 bits."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0" if whole else "1")
    (event,) = events_of(stored("a"))
    assert isinstance(event.block_hashes[0], bytes) is whole
    held = taken(payload(*events_of([*stored("a", "b"), *stored("c", tokens=7)])))
    assert held.of(names("a", "b", "c", "d")) == 135
    held.take(1, payload(*events_of(removed("a", "d"))))
    assert held.of(names("a", "b", "c")) == 71
    assert held.counts == {"batches": 2}


def test_events_of_prefixes_say_nothing_of_documents() -> None:
    """Neither does vLLM's word that it has emptied its own cache of prefixes."""
    block = BlockStored([1], None, [5] * 16, 16, None, "GPU", None)
    held = taken(payload(block, *events_of(stored("a")), AllBlocksCleared()))
    assert list(held.tokens) == names("a")
    assert held.counts["malformed"] == 0


MALFORMED: dict[str, Any] = {
    "no event": 5,
    "another type": {"type": "Nothing"},
    "no hashes": {"type": "BlockStored", "block_size": 4, "medium": "KVWEAVE_SEGMENT"},
    "hashes are text": {"type": "BlockRemoved", "block_hashes": ["a"]},
    "no tokens": {
        "type": "BlockStored",
        "block_hashes": [1],
        "block_size": 0,
        "medium": "KVWEAVE_SEGMENT",
    },
    "deep": json.loads("[" * 900 + "]" * 900),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_event_is_dropped_and_counted(case: str) -> None:
    """Those beside it count."""
    held = taken(payload(*events_of(stored("a")), MALFORMED[case], *events_of(stored("b"))))
    assert list(held.tokens) == names("a", "b")
    assert held.counts == {"batches": 1, "malformed": 1}


@given(st.binary(max_size=60))
def test_bytes_that_are_no_batch_change_nothing(data: bytes) -> None:
    held = taken(payload(*events_of(stored("a"))), data, data[:1], b"\x93\x00\x91\xc1\x00")
    assert list(held.tokens) == names("a")
    assert held.counts["malformed"] >= 2
    assert held.expected == 4


def test_no_more_documents_are_kept_than_there_is_room_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(router, "MOST_DOCUMENTS", 3)
    held = taken(payload(*events_of(stored(*"abc"))), payload(*events_of(stored("a", "d"))))
    assert list(held.tokens) == names("c", "a", "d")


def test_the_least_busy_of_the_best_is_asked() -> None:
    engines = [router.Engine(name, "") for name in "abc"]
    for engine, texts in zip(engines, ("xy", "xz", "z"), strict=True):
        engine.held.take(0, payload(*events_of(stored(*texts))))
    assert router.best(engines, names("x", "y")).url == "a"
    assert router.best(engines, names("z")).url == "b"
    engines[1].busy = 1
    assert router.best(engines, names("z")).url == "c"
    assert router.best(engines, names("x", "z")).url == "b"
    engines[0].busy = 2
    assert router.best(engines, []).url == "c"


# ---- batches that come late, twice, or not at all ----------------------------------------------


def test_what_was_said_before_is_asked_for() -> None:
    async def scenario() -> None:
        with published() as events:
            events.change(stored("a"))
            events.change(stored("b"))
            await until(lambda: len(events.publisher._buffer) == 2)
            async with heard(events) as held:
                await until(lambda: len(held.tokens) == 2)
                assert held.counts["replayed"] == 2
                events.change(removed("a"))
                await until(lambda: list(held.tokens) == names("b"))
                assert held.counts["replayed"] == 2
                assert not {"gaps", "restarts", "malformed"} & held.counts.keys()

    played(scenario)


@pytest.mark.parametrize("replay", [True, False])
def test_a_gap_has_all_forgotten_that_is_not_said_again(*, replay: bool) -> None:
    async def scenario() -> None:
        with published(replay=replay) as events:
            async with heard(events) as held:
                # A subscription takes a moment; what is published by then nobody hears.
                while not held.tokens:
                    events.change(stored("a"))
                    await asyncio.sleep(0.1)
                events.lose()
                events.change(stored("b"))
                await until(lambda: held.of(names("b")) > 0)
                assert held.counts["gaps"] >= 1
                assert held.of(names("a")) == (64 if replay else 0)
                events.change(removed("b"))
                await until(lambda: held.of(names("b")) == 0)

    played(scenario)


def test_what_an_engine_has_no_more_is_not_believed() -> None:
    """Batches of before the oldest that it can say again are lost, and what they said with them."""

    async def scenario() -> None:
        with published() as events:
            async with heard(events) as held:
                events.change(stored("a"))
                await until(lambda: list(held.tokens) == names("a"))
                for number in range(8):
                    events.change(stored(str(number)))
                await until(lambda: held.of(names("7")) > 0)
                assert held.of(names("a")) == 64
                events.lose()
                events.change(stored("b"))
                await until(lambda: held.of(names("b")) > 0)
                assert held.of(names("a")) == 0
                assert len(held.tokens) == 6

    played(scenario)


def test_an_engine_that_starts_again_holds_nothing() -> None:
    async def scenario() -> None:
        with published() as events:
            async with heard(events) as held:
                events.change(stored("a"))
                events.change(stored("b"))
                await until(lambda: len(held.tokens) == 2)
                events.end()
                await until(lambda: not held.tokens)
                events.begin()
                events.change(stored("c"))
                await until(lambda: list(held.tokens) == names("c"))

    played(scenario)


def test_numbers_that_begin_anew_are_a_restart() -> None:
    """Where a proxy stands between, no connection ends with the engine."""
    held = router.Held()
    for number in range(3):
        assert held.is_due(number)
        held.take(number, payload(*events_of(stored(str(number)))))
    assert not held.is_due(0)
    assert held.counts["restarts"] == 1
    held.forget()
    assert held.is_due(0)
    # What was said again in the meantime comes once more, and says nothing new.
    held.take(0, payload(*events_of(stored("a"))))
    held.take(1, payload(*events_of(removed("a"))))
    assert held.is_due(1)
    held.take(0, payload(*events_of(stored("a"))))
    assert not held.tokens


def test_frames_that_are_none_are_counted() -> None:
    async def scenario() -> None:
        with published() as events:
            async with heard(events) as held:
                events.change(stored("a"))
                await until(lambda: len(held.tokens) == 1)
                publisher = events.publisher
                publisher._topic_bytes = b"kv too"
                for frames in ([b"kv"], [b"kv", b"1", b""], [b"kv", b"", b"", b""]):
                    await asyncio.sleep(0.3)
                    publisher._pub.send_multipart(frames)
                await until(lambda: held.counts["malformed"] == 3)
                assert list(held.tokens) == names("a")
                events.change(stored("b"))
                await until(lambda: len(held.tokens) == 2)

    played(scenario)

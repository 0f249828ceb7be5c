"""Blocks of a request that lie in the host's memory: its tables, its room, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvweave import InvalidArgument, PoolFull
from kvweave.cache import HeadClassMap, KvCache, KvRequest, KvShape

P, LAYERS, HEADS = 4, 2, 2
FULL = {"kind": "full"}
WINDOW = {"kind": "window", "sink": 4, "recent": 8}
CHOOSING = {"kind": "top_k", "pages": 4, "rerank_every": 4}
SHAPE = KvShape(LAYERS, HEADS, 8, P, "f32")


def cache_of(blocks: int, *kinds: dict[str, Any]) -> KvCache:
    """A cache of books alone; the classes of its heads are dealt out in turn."""
    places = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    entries = [
        {
            "layer": layer,
            "head": head,
            "class": kinds[at % len(kinds)],
            "reach": "local" if kinds[at % len(kinds)]["kind"] == "window" else "global",
            "stability": "stable",
        }
        for at, (layer, head) in enumerate(places)
    ]
    known = {"schema_version": 1, "model_fingerprint": "m", "layers": LAYERS, "kv_heads": HEADS}
    heads = HeadClassMap.from_json(json.dumps({**known, "heads": entries}))
    return KvCache(SHAPE, blocks=blocks, heads=heads, memory=False, fingerprint="m")


def prompt(tokens: int, text: int = 1) -> np.ndarray:
    return (np.arange(tokens, dtype=np.int32) * 7 + 1000 * text) % 50_000


def at_home(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32) * 3


def test_a_table_says_where_each_block_lies() -> None:
    cache = cache_of(64, FULL, CHOOSING)
    request = cache.admit(prompt(42), reuse="none")
    before, others = request.entries(1), request.entries(0)
    slots = request.spill(1, at_home(7), 5)
    after = request.entries(1)
    assert after[:7, 0].tolist() == (-1 - at_home(7)).tolist()
    assert np.array_equal(after[:, 1:], before[:, 1:])
    assert np.array_equal(after[7:], before[7:])
    assert np.array_equal(request.entries(0), others)
    assert len(set(slots.tolist())) == 5
    assert set(slots.tolist()).isdisjoint(after[:, 0].tolist())
    assert (request.spilled(0), request.spilled(1)) == (0, 7)
    # What is private is written again: a slot takes no other room.
    assert cache.stats()["groups"][1]["held"] == 5 + 11 - 7
    assert request.kv_bytes() == ((11 + 9) * 2 * SHAPE.page_bytes, 0)
    again = request.spill(1, at_home(3, 7), 5)
    assert again.tolist() == slots.tolist()
    request.append(prompt(9))
    assert request.entries(1)[:10, 0].tolist() == (-1 - at_home(10)).tolist()
    request.bring_back(1)
    assert (request.entries(1)[:, 0] > 0).all()
    assert len(set(request.entries(1)[:, 0].tolist())) == 13
    assert cache.stats()["groups"][1]["held"] == 13
    request.release()
    cache.check()
    assert cache.stats()["held"] == 0


def test_what_others_find_stays_theirs() -> None:
    """Blocks of a prefix that somebody else reads are given back, and never written."""
    cache = cache_of(64, FULL, CHOOSING)
    first = cache.admit(prompt(40))
    first.commit(40, 40)
    other = cache.admit(np.append(prompt(40), [1, 2, 3]).astype(np.int32))
    assert other.plan.reused_prefix == 40
    kept = first.entries(1)
    slots = other.spill(1, at_home(10), 6)
    assert set(slots.tolist()).isdisjoint(kept[:, 0].tolist())
    assert np.array_equal(first.entries(1), kept)
    first.spill(1, at_home(9, 50), 6)
    assert cache.match_prefix(prompt(40)) == 40
    with cache.admit(prompt(44)) as third:
        assert third.plan.reused_prefix == 40
    other.bring_back(1)
    other.commit(43, 43)
    other.release()
    first.release()
    cache.check()
    assert cache.stats()["held"] == 0


def test_a_text_that_has_lost_blocks_of_one_full_group_is_not_found() -> None:
    """Slots are room of one group alone: what is cached in the other is of no use then."""
    cache = cache_of(20, FULL, CHOOSING)
    with cache.admit(prompt(40)) as first:
        first.commit(40, 40)
    with cache.admit(prompt(24, 2), reuse="none") as other:
        other.spill(1, at_home(5), 18)
        cache.check()
        found = cache.match_prefix(prompt(40))
        assert found < 40
        with cache.admit(prompt(20)) as third:
            assert third.plan.reused_prefix <= found
    cache.check()
    assert cache.stats()["held"] == 0


def test_without_room_nothing_has_changed() -> None:
    cache = cache_of(14, FULL, CHOOSING)
    first, other = (cache.admit(prompt(n, n), reuse="none") for n in (24, 16))
    table, stats = first.entries(1), cache.stats()
    with pytest.raises(PoolFull):
        first.spill(1, at_home(2), 200)
    assert np.array_equal(first.entries(1), table)
    assert cache.stats() == stats
    first.spill(1, at_home(5), 1)
    third = cache.admit(prompt(12, 3), reuse="none")
    table = first.entries(1)
    fill(third)
    stats = cache.stats()
    with pytest.raises(PoolFull):
        first.bring_back(1)
    assert np.array_equal(first.entries(1), table)
    assert first.spilled(1) == 5
    assert cache.stats() == stats
    for request in (third, other):
        request.release()
    first.bring_back(1)
    first.release()
    assert cache.stats()["held"] == 0


def fill(request: KvRequest) -> None:
    """Appends until there is no room."""
    with suppress(PoolFull):
        while True:
            request.append(prompt(P))


def refused(request: KvRequest) -> dict[str, Callable[[], Any]]:
    return {
        "fork": request.fork,
        "commit": lambda: request.commit(20, 20),
        "make_writable": lambda: request.make_writable(np.asarray([38], np.int32)),
    }


def test_what_needs_all_kv_is_refused_until_it_is_brought_back() -> None:
    cache = cache_of(64, FULL, CHOOSING)
    with cache.admit(prompt(40), reuse="none") as request:
        request.spill(1, at_home(4), 3)
        for what, call in refused(request).items():
            with pytest.raises(InvalidArgument, match=f"{what}: expected .*brought back, got 4"):
                call()
        request.bring_back(1)
        request.bring_back(1)
        for call in refused(request).values():
            made = call()
            if made is not None:
                made.release()
    cache.check()
    assert cache.stats()["held"] == 0


def sharing(cache: KvCache, length: int = 41) -> KvRequest:
    """A request that reads a cached text where it lies: from position 6 on, two pages into it."""
    with cache.admit(prompt(30, 5), reuse="none") as text:
        text.commit(30, 30)
    tokens = prompt(length)
    tokens[6:34] = prompt(30, 5)[:28]
    return cache.admit(tokens, segments=[(6, 34, "")], mode="share")


def test_entries_of_others_blocks_are_spilled_as_they_lie() -> None:
    """Slots and distances stay; a block that others may find is only let go of."""
    cache = cache_of(64, FULL, CHOOSING)
    request = sharing(cache)
    before = request.entries(1)
    assert (before[:, 4] != 0).sum() == 7
    # The second page of the request's own ends before the text, and goes on behind it.
    assert before[:2, 3].tolist() == [0, 4]
    held = cache.stats()["groups"][1]["held"]
    most = int((before[:, 3] < 40).sum())
    slots = request.spill(1, at_home(most), 3)
    after = request.entries(1)
    assert after[:most, 0].tolist() == (-1 - at_home(most)).tolist()
    assert np.array_equal(after[:, 1:], before[:, 1:])
    assert np.array_equal(after[most:], before[most:])
    assert cache.stats()["groups"][1]["held"] == held - most + 3
    assert set(slots.tolist()).isdisjoint(before[before[:, 4] != 0, 0].tolist())
    assert cache.match_segment(prompt(28, 5)) == 28
    assert request.spilled(1) == most
    request.bring_back(1)
    back = request.entries(1)
    assert np.array_equal(back[:, 1:], before[:, 1:])
    assert len(set(back[:, 0].tolist())) == len(back)
    # What was read in place is a copy of its own now, and still nobody's to write.
    assert set(back[:most, 0].tolist()).isdisjoint(before[before[:, 4] != 0, 0].tolist())
    with pytest.raises(InvalidArgument, match="read from a donor"):
        request.slots(np.asarray([10], np.int32), 1)
    request.spill(1, at_home(most, 70), 3)
    request.release()
    cache.check()
    assert cache.stats()["held"] == 0


def test_entries_of_one_block_go_together_to_one_place() -> None:
    cache = cache_of(64, FULL, CHOOSING)
    with cache.admit(prompt(2, 5), reuse="none") as text:
        text.commit(2, 2)
    tokens = prompt(30)
    tokens[5:7] = prompt(2, 5)
    with cache.admit(tokens, segments=[(5, 7, "")], mode="share") as request:
        before = request.entries(1)
        assert before[:4, 3].tolist() == [0, 4, 5, 7]
        assert before[1, 0] == before[3, 0] != before[2, 0]
        with pytest.raises(InvalidArgument, match="one number for entries of one block, got sev"):
            request.spill(1, at_home(4), 2)
        for count in (2, 3):
            with pytest.raises(InvalidArgument, match="all entries of a block, got some of block"):
                request.spill(1, at_home(count), 2)
        assert np.array_equal(request.entries(1), before)
        request.spill(1, at_home(1), 2)
        request.spill(1, np.asarray([30, 60, 30], np.int32), 2)
        assert request.entries(1)[:4, 0].tolist() == [-1, -31, -61, -31]
        request.bring_back(1)
        back = request.entries(1)
        assert np.array_equal(back[:, 1:], before[:, 1:])
        assert back[1, 0] == back[3, 0] != back[2, 0]
    cache.check()
    assert cache.stats()["held"] == 0


def test_without_room_for_slots_donors_are_still_held() -> None:
    cache = cache_of(30, FULL, CHOOSING)
    request = sharing(cache)
    table, stats = request.entries(1), cache.stats()
    with pytest.raises(PoolFull):
        request.spill(1, at_home(8), 200)
    assert np.array_equal(request.entries(1), table)
    assert cache.stats() == stats
    request.release()
    cache.check()
    assert cache.stats()["held"] == 0


def test_tokens_behind_what_was_spilled_may_be_taken_back() -> None:
    cache = cache_of(64, CHOOSING)
    with cache.admit(prompt(18), reuse="none") as request:
        request.append(prompt(12, 2))
        request.spill(0, at_home(6), 2)
        request.truncate(27)
        for fewer in (24, 20):
            with pytest.raises(InvalidArgument, match="truncate: expected 25 <= tokens <= 27"):
                request.truncate(fewer)
        request.truncate(25)
        request.append(prompt(3, 3))
        assert request.entries(0)[:6, 0].tolist() == (-1 - at_home(6)).tolist()
        assert request.entries(0)[6].tolist()[1:] == [0, 4, 24, 0]
        request.bring_back(0)
        request.truncate(20)
    cache.check()
    assert cache.stats()["held"] == 0


def test_what_cannot_be_spilled_is_refused() -> None:
    cache = cache_of(64, WINDOW, CHOOSING, FULL)
    kinds = [group.kind for group in cache.groups]
    window, chosen = kinds.index("window"), kinds.index("top_k")
    with cache.admit(prompt(42), reuse="none") as request:
        before = [request.entries(table).tolist() for table in range(3)]
        with pytest.raises(InvalidArgument, match="keeps every token"):
            request.spill(window, at_home(2), 2)
        with pytest.raises(InvalidArgument, match="numbers from 0 on, got -3"):
            request.spill(chosen, np.asarray([4, -3], np.int32), 2)
        with pytest.raises(InvalidArgument, match="up to 10 entries"):
            request.spill(chosen, at_home(11), 2)
        for group in (3, 200, 2**40):
            for call in (
                lambda group=group: request.spill(group, at_home(1), 2),
                lambda group=group: request.bring_back(group),
                lambda group=group: request.spilled(group),
            ):
                with pytest.raises(InvalidArgument):
                    call()
        for home in ([1, 2], at_home(4).astype(np.int64), at_home(4)[None], "12", None):
            with pytest.raises((InvalidArgument, TypeError)):
                request.spill(chosen, home, 2)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            request.spill(chosen, at_home(2), -1)
        assert [request.entries(table).tolist() for table in range(3)] == before
        assert request.spill(chosen, at_home(0), 0).tolist() == []
    with pytest.raises(InvalidArgument, match="released"):
        request.spill(chosen, at_home(1), 2)

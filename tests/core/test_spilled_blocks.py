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
        with pytest.raises(InvalidArgument, match="up to 10 blocks"):
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

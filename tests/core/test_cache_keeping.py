"""What a cache keeps where room is wanted: orders of eviction, advice, quotas of namespaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from kvweave import InvalidArgument, KvCache, KvShape, PoolFull, QuotaExceeded

P = 4
ROOM = 8


def cache_of(blocks: int = ROOM, **more: Any) -> KvCache:
    # Room for the null block is the shape's business: `blocks` are those of requests.
    return KvCache(KvShape(1, 1, 8, P, "f32"), blocks=blocks, **more)


def text(start: int, blocks: int) -> np.ndarray:
    return np.arange(start, start + blocks * P, dtype=np.int32)


def learn(cache: KvCache, tokens: np.ndarray, namespace: str = "", name: str | None = None) -> None:
    with cache.admit(tokens, namespace=namespace) as request:
        request.take_copies()
        request.finish_copies()
        request.commit(len(tokens), len(tokens))
        if name is not None:
            request.freeze(name, 0, len(tokens))


def left(eviction: str, *calls: tuple[int, dict[str, Any]], now: int = 0) -> list[bool]:
    """Which of three texts of two blocks stay, after text for four more blocks has come."""
    cache = cache_of(eviction=eviction)
    texts = [text(start, 2) for start in (100, 200, 300)]
    for tokens in texts:
        learn(cache, tokens)
    for which, advice in calls:
        assert cache.advise(texts[which], **advice) == 2 * P
    cache.set_time(now)
    learn(cache, text(1000, 4))
    cache.check()
    return [cache.match_prefix(tokens) == 2 * P for tokens in texts]


@pytest.mark.parametrize("eviction", ["lru", "cost-aware", "s3-fifo", "lfu"])
def test_without_advice_what_was_used_longest_ago_goes(eviction: str) -> None:
    assert left(eviction) == [False, True, True]


def test_the_default_is_the_least_recently_used_whatever_is_advised() -> None:
    dear = (0, {"priority": 9, "cost": 1000})
    for eviction in ("lru", "s3-fifo", "lfu"):
        assert left(eviction, dear) == [False, True, True]
    cache = cache_of()
    learn(cache, text(100, 4))
    learn(cache, text(200, 4))
    cache.advise(text(100, 4), priority=255)
    learn(cache, text(300, 1))
    assert [cache.match_prefix(text(start, 4)) for start in (100, 200)] == [3 * P, 4 * P]


@pytest.mark.parametrize(
    ("advice", "now", "stay"),
    [
        ((0, {"priority": 1}), 0, [True, False, True]),
        ((0, {"cost": 50}), 0, [True, False, True]),
        ((0, {"hint": "soon"}), 0, [True, False, True]),
        ((2, {"hint": "done", "priority": 9}), 0, [True, True, False]),
        ((2, {"until": 10, "priority": 9}), 9, [False, True, True]),
        ((2, {"until": 10, "priority": 9}), 10, [True, True, False]),
        ((0, {"until": 10, "priority": 9, "past": "plain"}), 9, [True, False, True]),
        ((0, {"until": 10, "priority": 9, "past": "plain"}), 10, [True, False, True]),
        ((2, {"until": 10, "priority": 9, "past": "plain"}), 10, [False, True, True]),
        ((2, {"cost": 0}), 0, [True, True, False]),
    ],
)
def test_advice_is_followed(advice: Any, now: int, stay: list[bool]) -> None:
    assert left("cost-aware", advice, now=now) == stay


def test_advice_is_of_what_is_cached() -> None:
    cache = cache_of(eviction="cost-aware")
    learn(cache, text(100, 2)[:-1], "a")
    assert cache.advise(text(100, 3), "a") == 2 * P - 1
    assert cache.advise(text(100, 3), "b", priority=1) == 0
    assert cache.advise(text(100, 3), "a", regime=1, priority=1) == 0
    assert cache.advise(text(500, 3), "a", priority=1) == 0
    assert cache.advise(np.array([], np.int32), "a", priority=1) == 0


def test_a_request_advises_on_a_range_of_its_positions() -> None:
    """The first of three texts of two blocks is meant whole, of the second a half, no third."""
    cache = cache_of(eviction="cost-aware")
    texts = [text(start, 2) for start in (100, 200, 300)]
    for tokens, start in zip(texts, (0, P, 2 * P), strict=True):
        request = cache.admit(tokens)
        request.commit(len(tokens), len(tokens))
        request.advise(start, 2 * P, priority=1)
        request.release()
    learn(cache, text(1000, 5))
    cache.check()
    assert [cache.match_prefix(tokens) for tokens in texts] == [2 * P, 0, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"end": 2 * P + 1}, rf"a range inside \[0, {2 * P}\), got \[0, {2 * P + 1}\)"),
        ({"start": 5, "end": 4}, r"got \[5, 4\)"),
        ({"start": -1}, "start: expected at least 0, got -1"),
        ({"priority": 256}, "priority: expected 0 to 255, got 256"),
        ({"hint": "never"}, "hint: expected none, soon or done"),
    ],
)
def test_advice_of_a_request_is_refused(call: dict[str, Any], words: str) -> None:
    cache = cache_of(eviction="cost-aware")
    request = cache.admit(text(0, 2))
    with pytest.raises(kvweave.KvweaveError, match=words):
        request.advise(**{"start": 0, "end": P, **call})
    request.advise(0, 0)
    request.release()
    with pytest.raises(InvalidArgument, match="expected a live request, got a released one"):
        request.advise(0, P)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"priority": 256}, "priority: expected 0 to 255, got 256"),
        ({"priority": -1}, "priority: expected 0 to 255, got -1"),
        ({"cost": 2**32}, "cost: expected 0 to 4294967295, got 4294967296"),
        ({"cost": -(2**70)}, "cost: expected 0 to 4294967295, got -9223372036854775808"),
        ({"until": -1}, "until: expected at least 0, got -1"),
        ({"hint": "Soon"}, 'hint: expected none, soon or done, got "Soon"'),
        ({"past": "never"}, 'past: expected first or plain, got "never"'),
        ({"hint": "\ud800"}, "text: expected characters that UTF-8 can hold"),
        ({"regime": -1}, "regime: expected a number from 0"),
        ({"tokens": [1, 2]}, "tokens: expected a tensor, got an object of type list"),
    ],
)
def test_advice_refuses(call: dict[str, Any], words: str) -> None:
    cache = cache_of(eviction="cost-aware")
    learn(cache, text(0, 2))
    with pytest.raises(InvalidArgument, match=words):
        cache.advise(**{"tokens": text(0, 2), **call})
    with pytest.raises(InvalidArgument, match="now: expected at least 0, got -1"):
        cache.set_time(-1)


@pytest.mark.parametrize("name", ["LRU", "fifo", "", "cost_aware", "s3fifo"])
def test_orders_have_names(name: str) -> None:
    words = "eviction: expected lru, cost-aware, s3-fifo or lfu, got"
    with pytest.raises(InvalidArgument, match=words):
        cache_of(eviction=name)


@pytest.mark.parametrize(
    ("eviction", "stays"), [("lru", False), ("cost-aware", True), ("s3-fifo", True), ("lfu", True)]
)
def test_what_came_often_outlives_what_comes_once(eviction: str, stays: bool) -> None:
    """One text is used four times; then others come once, as many blocks as have room."""
    cache = cache_of(eviction=eviction)
    often = text(100, 2)
    for _ in range(4):
        learn(cache, often)
    for start in range(200, 600, 100):
        learn(cache, text(start, 2))
    cache.check()
    assert (cache.match_prefix(often) == 2 * P) == stays


def test_what_is_beyond_a_quota_goes_first() -> None:
    cache = cache_of(12)
    cache.set_quota("a", blocks=2)
    learn(cache, text(100, 4), "b")
    learn(cache, text(200, 6), "a")
    assert cache.stats()["quotas"] == {"a": {"blocks": 2, "frozen": 0, "cached": 6}}
    learn(cache, text(900, 6))
    assert cache.match_prefix(text(100, 4), "b") == 4 * P
    assert cache.match_prefix(text(200, 6), "a") == 2 * P
    cache.check()


def test_a_document_beyond_a_quota_is_refused() -> None:
    cache = cache_of(40)
    cache.set_quota("a", bytes=4 * cache.block_bytes + cache.block_bytes // 2)
    learn(cache, text(0, 3), "a", "one")
    request = cache.admit(text(200, 2), namespace="a")
    request.commit(2 * P, 2 * P)
    before = cache.stats()
    said = 'quota of namespace "a": expected 2 blocks to be available, got 1'
    with pytest.raises(QuotaExceeded, match=said) as told:
        request.freeze("two", 0, 2 * P)
    assert (told.value.expected, told.value.got) == ("2 blocks to be available", "1")
    assert isinstance(told.value, PoolFull)
    assert cache.stats() == before
    request.freeze("two", 0, P)
    assert cache.stats()["quotas"]["a"] == {"blocks": 4, "frozen": 4, "cached": 0}
    request.release()
    cache.set_quota("a", blocks=0)
    assert [entry.resident_blocks for entry in cache.frozen("a")] == [0, 0]
    cache.set_quota("a")
    assert cache.stats()["quotas"] == {}
    assert [entry.resident_blocks for entry in cache.frozen("a")] == [3, 1]
    cache.check()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"blocks": -1}, "blocks: expected at least 0, got -1"),
        ({"bytes": -1}, "bytes: expected at least 0, got -1"),
        ({"blocks": 1, "bytes": 1}, "quota: expected blocks or bytes, got both"),
        ({"namespace": "\udfff", "blocks": 1}, "text: expected characters that UTF-8 can hold"),
    ],
)
def test_quotas_refuse(call: dict[str, Any], words: str) -> None:
    cache = cache_of()
    with pytest.raises(InvalidArgument, match=words):
        cache.set_quota(**{"namespace": "a", **call})
    assert cache.stats()["quotas"] == {}
    cache.set_quota("a", blocks=2**80)
    cache.check()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["learn", "freeze", "delete", "quota"]),
            st.sampled_from(["a", "b"]),
            st.integers(0, 3),
            st.integers(0, 6),
        ),
        max_size=40,
    )
)
def test_no_namespace_is_above_its_quota(steps: list[tuple[str, str, int, int]]) -> None:
    cache, quotas = cache_of(20, eviction="cost-aware"), {}
    for what, namespace, which, blocks in steps:
        tokens = text(10_000 * (1 + (namespace == "b")) + 100 * which, max(1, blocks))
        before = cache.stats()
        if what == "learn":
            learn(cache, tokens, namespace)
        elif what == "freeze":
            with cache.admit(tokens, namespace=namespace) as request:
                request.take_copies()
                request.finish_copies()
                request.commit(len(tokens), len(tokens))
                before = cache.stats()
                try:
                    request.freeze(str(which), 0, len(tokens))
                    assert max(1, blocks) <= quotas.get(namespace, 20)
                except PoolFull:
                    assert cache.stats() == before
        elif what == "delete":
            try:
                cache.delete(str(which), namespace)
            except kvweave.UnknownSegment:
                assert cache.stats() == before
        else:
            cache.set_quota(namespace, blocks=blocks)
            quotas[namespace] = blocks
        cache.check()
        for tenant, quota in cache.stats()["quotas"].items():
            pinned = sum(entry.resident_blocks for entry in cache.frozen(tenant))
            assert quota["blocks"] == quotas[tenant]
            assert pinned == quota["frozen"] <= quota["blocks"]


SAID = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4 * P), st.integers(0, 4 * P), st.integers(0, 3)),
    max_size=12,
)


@settings(deadline=None)
@given(said=SAID, wanted=st.integers(0, 12))
def test_ranges_go_by_their_priority_and_of_equal_ones_tails_first(
    said: list[tuple[int, int, int, int]], wanted: int
) -> None:
    """Held to a list of blocks that is sorted anew for each thing that is said."""
    cache = cache_of(12, eviction="cost-aware")
    texts = [text(start, 4) for start in (100, 200, 300)]
    # (priority, when it was last said anything of): the first goes first.
    order: dict[tuple[int, int], tuple[int, int]] = {}
    for number, tokens in enumerate(texts):
        learn(cache, tokens)
        order |= {(number, block): (0, len(order) + 3 - block) for block in range(4)}
    turn = len(order)
    for number, start, end, priority in said:
        meant = cache.advise(texts[number], priority=priority, start=start, end=end)
        assert meant == max(0, end - start)
        blocks = range(start // P, -(-end // P)) if meant else range(0)
        for block in reversed(blocks):
            order[number, block] = (priority, turn)
            turn += 1
    if wanted:
        learn(cache, text(1000, wanted))
    cache.check()
    gone = set(sorted(order, key=order.__getitem__)[:wanted])
    for number, tokens in enumerate(texts):
        missing = [block for block in range(4) if (number, block) in gone]
        assert cache.match_prefix(tokens) == min(missing, default=4) * P


def reasons(cache: KvCache, tokens: np.ndarray, **asked: Any) -> list[tuple[int, str | None]]:
    """The last token of each run of a prompt that is computed, and why it is."""
    with cache.admit(tokens, **asked) as request:
        spans = [span for span in request.plan.spans if span.kind == "recompute"]
        return [(span.end, span.reason) for span in spans]


@pytest.mark.parametrize("eviction", ["lru", "cost-aware", "s3-fifo", "lfu"])
def test_what_had_to_go_is_told_from_what_never_was(eviction: str) -> None:
    cache = cache_of(ROOM, eviction=eviction)
    book, other = text(100, 3), text(500, 2)
    learn(cache, book)
    asked = np.concatenate([book, other])
    end = len(asked)
    assert reasons(cache, asked) == [(end - 1, "fresh"), (end, "last-token")]
    for start in range(1000, 1400, 100):
        learn(cache, text(start, 4))
    assert cache.match_prefix(book) == 0
    evicted = (3 * P, "evicted")
    assert reasons(cache, asked) == [evicted, (end - 1, "fresh"), (end, "last-token")]
    assert reasons(cache, asked, discover=True)[0] == evicted
    off = [(end - 1, "reuse-off"), (end, "last-token")]
    assert reasons(cache, asked, reuse="none") == off
    assert reasons(cache, asked, namespace="other")[0] == (end - 1, "fresh"), "not his own"
    marked = np.concatenate([other[:P], book, other[P:]])
    segment = [(P, 4 * P, "")]
    told = [(P, "fresh"), (4 * P, "evicted"), (end - 1, "fresh"), (end, "last-token")]
    assert reasons(cache, marked, segments=segment) == told
    assert reasons(cache, marked, segments=segment, reuse="prefix")[1][1] == "segments-off"
    assert reasons(cache, asked, segments=[(0, 3 * P, "")], reuse="prefix")[0] == evicted
    learn(cache, book)
    assert reasons(cache, asked) == [(end - 1, "fresh"), (end, "last-token")]


def test_of_a_document_that_lost_its_end_the_end_had_to_go() -> None:
    cache = cache_of(ROOM)
    book = text(100, 3)
    learn(cache, book)
    learn(cache, text(1000, ROOM - 2))
    assert cache.match_prefix(book) == 2 * P
    asked = np.concatenate([text(2000, 1), book, text(3000, 1)])
    told = [(P, "fresh"), (4 * P, "evicted"), (5 * P - 1, "fresh"), (5 * P, "last-token")]
    assert reasons(cache, asked, segments=[(P, 4 * P, "")]) == told

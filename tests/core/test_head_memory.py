"""Head groups in memory: tables, windows that move on, promoted heads, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from kvweave import CorruptHeadMap, HeadClassMap, InvalidArgument, KvCache, KvShape, PoolFull

P = 16
SHAPE = KvShape(2, 4, 8, P)


def head_map(
    shape: KvShape = SHAPE, sink: int = 4, recent: int = 32, full: int = 1
) -> HeadClassMap:
    """The first `full` heads of each layer are full, the others keep a window."""
    document = json.loads(HeadClassMap.full(shape, "m").to_json())
    for entry in document["heads"]:
        if entry["head"] >= full:
            entry["class"] = {"kind": "window", "sink": sink, "recent": recent}
    return HeadClassMap.from_json(json.dumps(document))


def cache_of(blocks: int = 64, **more: object) -> KvCache:
    return KvCache(SHAPE, blocks=blocks, heads=head_map(), **more)


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)


def until_full(step: Callable[[], object]) -> list[object]:
    """What a step returns, again and again until there is no room."""
    done = []
    while True:
        try:
            done.append(step())
        except PoolFull:
            return done


def settle(request: kvweave.KvRequest) -> int:
    groups = request.tables - len(request.promoted)
    copied = sum(int(request.take_copies(group)[:, 4].sum()) for group in range(groups))
    request.finish_copies()
    return copied


def prefill(request: kvweave.KvRequest, chunk: int, commits: bool = False) -> None:
    length = request.length
    for start in range(request.plan.reused_prefix, length, chunk):
        end = min(length, start + chunk)
        request.advance(start, end)
        settle(request)
        if commits:
            request.commit(end, end)
    request.advance(length, length)


def kept(entries: np.ndarray) -> set[int]:
    """The positions that a table lists."""
    starts, counts = entries[:, 3], entries[:, 2] - entries[:, 1]
    return {
        p for start, count in zip(starts, counts, strict=True) for p in range(start, start + count)
    }


def test_groups_and_where_heads_lie() -> None:
    cache = cache_of()
    full, window = cache.groups
    assert (full.kind, full.pages) == ("full", 2)
    assert (window.kind, window.sink, window.recent, window.pages) == ("window", 4, 32, 6)
    assert cache.head_rows(1).tolist() == [[0, 1, 0, 0]] + [[1, 3 + r, 32, 4] for r in range(3)]
    assert cache.page_layers(0).tolist() == [0, 1]
    assert cache.page_layers(1).tolist() == [0, 0, 0, 1, 1, 1]
    assert cache.fingerprint == "m"
    assert "window" in repr(window)
    for call in (cache.head_rows, cache.page_layers):
        with pytest.raises(InvalidArgument, match="expected"):
            call(2)
        with pytest.raises(InvalidArgument, match="at least 0, got -1"):
            call(-1)


def test_one_group_is_as_it_was() -> None:
    cache = KvCache(SHAPE, blocks=8)
    assert [group.kind for group in cache.groups] == ["full"]
    assert cache.head_rows(1).tolist() == [[0, 4 + head, 0, 0] for head in range(4)]
    with cache.admit(prompt(40), chunk_tokens=16) as request:
        assert request.tables == 1
        request.advance(0, 16)
        assert kept(request.entries()) == set(range(40))
        assert request.kv_bytes() == (3 * cache.block_bytes, 0)
        with pytest.raises(InvalidArgument, match="a head of a window group, got one that is full"):
            request.promote(0, 0)


@pytest.mark.parametrize(("layers", "heads", "full"), [(2, 4, 1), (24, 2, 1), (7, 5, 2), (3, 3, 0)])
@pytest.mark.parametrize("blocks", [1, 40, 261])
def test_an_arena_of_some_blocks_takes_a_prompt_of_them(layers, heads, full, blocks) -> None:
    shape = KvShape(layers, heads, 8, P)
    classes = head_map(shape, full=full)
    cache = KvCache(shape, blocks=blocks, heads=classes, memory=False)
    assert cache.stats()["arena_pages"] == shape.pages_for_blocks(blocks, classes)
    assert shape.pages_for_blocks(blocks) == (blocks + 1) * layers * heads
    request = cache.admit(prompt(blocks * P))
    request.release()
    cache.check()
    with pytest.raises(CorruptHeadMap, match="head map: expected"):
        KvShape(layers + 1, heads, 8, P).pages_for_blocks(blocks, classes)
    with pytest.raises(InvalidArgument, match="at most 2147483647 pages"):
        shape.pages_for_blocks(2**40, classes)


def test_chunks_keep_what_rows_see() -> None:
    cache, tokens = cache_of(), prompt(300)
    with cache.admit(tokens, chunk_tokens=32) as request:
        reserved = request.kv_bytes()
        for start in range(0, 300, 32):
            end = min(300, start + 32)
            request.advance(start, end)
            rows = np.arange(start, end, dtype=np.int32)
            assert (request.slots(rows, 1) >= 0).all()
            seen = set(range(4)) | set(range(max(0, start - 31), end))
            assert seen <= kept(request.entries(1))
            assert kept(request.entries(0)) == set(range(300))
            assert request.kv_bytes() == reserved
        request.advance(300, 300)
        assert request.kv_bytes()[0] < reserved[0]
        assert kept(request.entries(1)) == set(range(16)) | set(range(256, 300))
        assert request.slots(np.array([100, 290], np.int32), table=1)[0].tolist() == [-1, -1]
        request.append(prompt(30, 1))
        assert kept(request.entries(1)) >= set(range(300 - 31, 330))
    cache.check()
    assert cache.stats()["held"] == 0


def test_reused_pieces_are_copied_when_their_blocks_have_memory() -> None:
    cache, segment = cache_of(), prompt(96)
    with cache.admit(segment) as request:
        request.commit(96, 96)
    moved = np.concatenate((prompt(5, 1), segment, prompt(3, 2)))
    with cache.admit(moved, segments=[(5, 101, "")], chunk_tokens=16) as request:
        assert request.plan.reused_segment == 96
        copied = request.take_copies(0)[:, 4].sum()
        assert copied == 96
        first = settle(request)
        assert 0 < first < 96
        later = 0
        for start in range(0, 104, 16):
            request.advance(start, min(104, start + 16))
            assert len(request.take_copies(0)) == 0
            later += settle(request)
        assert first + later == 96
        request.advance(104, 104)
    cache.check()


def test_a_prefix_is_as_long_as_every_group_still_has_it() -> None:
    for commits, shorter in ((False, 16), (True, 100)):
        cache, tokens = cache_of(), prompt(160)
        with cache.admit(tokens, chunk_tokens=32) as request:
            prefill(request, 32, commits)
            request.commit(160, 160)
        assert cache.match_prefix(tokens) == 160
        assert cache.match_prefix(tokens[:100]) == shorter
        with cache.admit(np.concatenate((tokens, prompt(20, 1)))) as request:
            assert request.plan.reused_prefix == 160
            assert kept(request.entries(1)) == set(range(16)) | set(range(128, 180))
        cache.check()


def test_a_head_is_promoted_for_one_request() -> None:
    cache = cache_of()
    pages = torch.from_dlpack(cache.arena)
    request = cache.admit(prompt(40), reserve_tokens=10)
    rank = int(cache.head_rows(1)[2, 1])
    for block, *_, position, _ in request.entries(1).tolist():
        pages[block + rank] = position
    own, shared = request.kv_bytes()
    copies = request.promote(1, 2)
    assert (copies[:, 5] == 0).all()
    for source, _, target, *_ in copies.tolist():
        pages[target] = pages[source]
    assert request.promoted == [(1, 2)]
    assert request.tables == 3
    assert request.head_rows(1)[2].tolist() == [2, 0, 0, 0]
    assert request.kv_bytes() == (own + 4 * SHAPE.page_bytes, shared)
    assert [int(pages[block, 0, 0, 0]) for block, *_ in request.entries(2).tolist()] == [0, 16, 32]
    assert request.slots(np.array([39], np.int32), 2)[0, 1] == 7
    with pytest.raises(InvalidArgument, match="a request without promoted heads, got 1"):
        request.fork()
    with pytest.raises(InvalidArgument, match="got one that is full"):
        request.promote(1, 2)
    with pytest.raises(InvalidArgument, match="layer < 2 and head < 4"):
        request.promote(1, 4)
    request.append(prompt(60, 1))
    request.append(prompt(1, 2))
    with pytest.raises(InvalidArgument, match="a part let go of"):
        request.promote(1, 3)
    assert kept(request.entries(2)) == set(range(request.length))
    request.release()
    cache.check()
    assert cache.stats()["held"] == 0


def test_a_full_arena_refuses_a_promotion_and_the_request_goes_on() -> None:
    cache = KvCache(SHAPE, blocks=8, heads=head_map())
    request = cache.admit(prompt(40))
    others = until_full(lambda: cache.admit(prompt(16)))
    heads = [(layer, head) for layer in range(2) for head in range(1, 4)]
    promoted = until_full(lambda: request.promote(*heads[len(request.promoted)]))
    assert len(promoted) == len(request.promoted) < len(heads)
    before = request.kv_bytes(), request.tables, cache.stats()
    with pytest.raises(PoolFull, match="blocks to be available"):
        request.promote(*heads[-1])
    assert (request.kv_bytes(), request.tables, cache.stats()) == before
    request.append(prompt(1, 1))
    cache.check()
    del others


def test_one_group_is_made_writable() -> None:
    cache, segment = cache_of(), prompt(64)
    with cache.admit(segment) as request:
        request.commit(64, 64)
    moved = np.concatenate((prompt(16, 1), segment, prompt(1, 2)))
    with cache.admit(moved, segments=[(16, 80, "")], mode="share") as request:
        row = np.array([20], np.int32)
        request.make_writable(row, group=0)
        assert len(request.take_copies(0)) == 1
        assert len(request.take_copies(1)) == 0
        assert request.slots(row).shape == (1, 2)
        with pytest.raises(InvalidArgument, match="read from a donor"):
            request.slots(row, 1)
        request.make_writable(row)
        assert len(request.take_copies(1)) == 1
        for group in (2, -1):
            with pytest.raises(InvalidArgument, match="expected"):
                request.make_writable(row, group)


def test_a_cache_without_memory_decides_all_the_same() -> None:
    shape = KvShape(64, 8, 128, P, "bf16")
    blocks = 8 * 1024 // P
    dense = KvCache(shape, blocks=blocks, memory=False)
    grouped = KvCache(shape, blocks=blocks, heads=head_map(shape, 16, 256), memory=False)
    with pytest.raises(InvalidArgument, match="arena: expected a cache with memory"):
        _ = grouped.arena
    with pytest.raises(InvalidArgument, match="memory: expected True with an external tensor"):
        KvCache(SHAPE, external=torch.zeros(64, 2, P, 8), memory=False)

    def admitted(cache: KvCache) -> kvweave.KvRequest:
        request = cache.admit(prompt(4096), reuse="none", chunk_tokens=512)
        prefill(request, 512)
        return request

    held = [until_full(lambda cache=cache: admitted(cache)) for cache in (dense, grouped)]
    assert len(held[0]) == 2
    assert len(held[1]) >= 8
    one = held[1][0]
    assert one.kv_bytes()[0] * 4 < held[0][0].kv_bytes()[0]
    assert one.entries(1)[-1, 3] == 4080
    for cache in (dense, grouped):
        cache.check()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.advance(31, 64), "advance: expected 32 <= start <= end <= 100"),
        (lambda r: r.advance(64, 63), r"got \[64, 63\)"),
        (lambda r: r.advance(64, 101), r"got \[64, 101\)"),
        (lambda r: r.advance(-1, 3), "start: expected at least 0, got -1"),
        (lambda r: r.entries(2), "table < 2, got 2"),
        (lambda r: r.entries(-1), "table: expected at least 0"),
        (lambda r: r.slots(np.array([0], np.int32), 7), "table < 2, got 7"),
        (lambda r: r.take_copies(300), "table < 2"),
        (lambda r: r.head_rows(2), "layer < 2, got 2"),
        (lambda r: r.promote(0, -1), "head: expected at least 0"),
        (lambda r: r.promote(0, 1), "got a part let go of"),
        (lambda r: r.fork(), "a prompt whose chunks are all computed"),
        (lambda r: r.freeze("x", 0, 32), "a prompt whose chunks are all computed"),
    ],
)
def test_a_request_in_chunks_refuses(call, words) -> None:
    cache = cache_of()
    with cache.admit(prompt(100), chunk_tokens=32) as request:
        request.advance(0, 32)
        request.commit(32, 32)
        request.advance(32, 64)
        request.advance(32, 64)
        before = request.entries(1), cache.stats()
        if "let go" in words:
            request.advance(64, 96)
            before = request.entries(1), cache.stats()
        with pytest.raises(InvalidArgument, match=words):
            call(request)
        assert (request.entries(1) == before[0]).all()
        assert cache.stats() == before[1]
    cache.check()


def test_maps_that_do_not_suit_a_cache() -> None:
    good = json.loads(head_map().to_json())
    with pytest.raises(CorruptHeadMap, match="at least a page, 16 tokens, got 15"):
        KvCache(SHAPE, blocks=8, heads=head_map(recent=15))
    with pytest.raises(CorruptHeadMap, match="expected 3 layers of 4"):
        KvCache(KvShape(3, 4, 8, P), blocks=8, heads=head_map())
    with pytest.raises(CorruptHeadMap, match='a map of model "other"'):
        KvCache(SHAPE, blocks=8, heads=head_map(), fingerprint="other")
    for broken in (good | {"schema_version": 2}, good | {"heads": good["heads"][1:]}):
        with pytest.raises(CorruptHeadMap, match="expected"):
            HeadClassMap.from_json(json.dumps(broken))


@settings(max_examples=40)
@given(data=st.data())
def test_any_flow_of_windows_keeps_the_books(data) -> None:
    """Admissions in chunks, advances, commits, promotions, forks and releases: law 1."""
    full = data.draw(st.integers(0, 2))
    heads = head_map(full=full, sink=data.draw(st.sampled_from([0, 4, 40])))
    cache = KvCache(SHAPE, blocks=data.draw(st.integers(6, 40)), heads=heads)
    groups = len(cache.groups)
    live: list[kvweave.KvRequest] = []
    refusals: list[kvweave.KvweaveError] = []
    actions = ["admit", "advance", "commit", "append", "promote", "fork", "drop"]
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(actions))
        try:
            if action == "admit":
                tokens = prompt(200, 3)[: data.draw(st.integers(1, 200))]
                chunk = data.draw(st.sampled_from([0, 16, 50]))
                mode = data.draw(st.sampled_from(["materialise", "share"]))
                live.append(cache.admit(tokens, chunk_tokens=chunk, mode=mode, discover=True))
                settle(live[-1])
            elif live:
                request = live[data.draw(st.integers(0, len(live) - 1))]
                if action == "advance":
                    request.advance(request.length, request.length)
                elif action == "commit":
                    request.commit(request.length, data.draw(st.integers(0, request.length)))
                elif action == "append":
                    request.append(prompt(data.draw(st.integers(1, 40)), 5))
                elif action == "promote":
                    request.promote(data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3)))
                elif action == "fork":
                    live.append(request.fork())
                else:
                    live.remove(request)
                    request.release()
        except kvweave.KvweaveError as refusal:
            refusals.append(refusal)
        for request in live:
            settle(request)
            tables = [kept(request.entries(table)) for table in range(request.tables)]
            assert all(table <= set(range(request.length)) for table in tables)
            assert all(table == set(range(request.length)) for table in tables[groups:])
        cache.check()
    assert all(refusal.expected and refusal.got for refusal in refusals)
    for request in live:
        request.release()
    assert cache.stats()["held"] == 0
    cache.check()

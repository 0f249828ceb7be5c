"""The cache through Python: admission, commits, hits, knowledge bases, forks, bad input."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from kvweave import InvalidArgument, KvCache, KvShape

P = 16


def cache_of(blocks: int = 64, **more: object) -> KvCache:
    return KvCache(KvShape(2, 2, 8, P), blocks=blocks, **more)


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)


def served(cache: KvCache, tokens: np.ndarray, **more: object) -> None:
    """Leaves a prompt's blocks in the cache."""
    with cache.admit(tokens, **more) as request:
        request.take_copies()
        request.finish_copies()
        request.commit(len(tokens), len(tokens))


def covered(entries: np.ndarray, length: int) -> None:
    """Entries are sorted and gap-free over [0, length)."""
    count = entries[:, 2] - entries[:, 1]
    assert (count > 0).all()
    assert entries[0, 3] == 0
    assert (entries[1:, 3] == entries[:-1, 3] + count[:-1]).all()
    assert entries[-1, 3] + count[-1] == length


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_a_prefix_is_found_again(dtype) -> None:
    cache, tokens = cache_of(), prompt(100).astype(dtype)
    served(cache, tokens)
    assert cache.match_prefix(tokens) == 100
    assert cache.match_prefix(torch.from_numpy(tokens.astype(np.int64))) == 100
    assert cache.match_prefix(tokens[:50]) == 50
    assert cache.match_prefix(tokens, "other") == 0
    assert cache.match_prefix(tokens, regime=1) == 0
    with cache.admit(tokens) as request:
        plan = request.plan
        assert plan.reused_prefix == 99
        assert plan.spans[-1].reason == "last-token"
        assert plan.rows().tolist() == [99]
        covered(request.entries(), 100)
    cache.check()


def test_a_long_prompt() -> None:
    tokens = prompt(128 * 1024)
    for name in ("xxh3-128", "sha256"):
        cache = KvCache(KvShape(1, 1, 8, P), blocks=len(tokens) // P + 8, hash=name)
        served(cache, tokens)
        assert cache.match_prefix(tokens) == len(tokens)
        changed = tokens.copy()
        changed[5003] += 1
        assert cache.match_prefix(changed) == 5003
        with cache.admit(tokens) as request:
            assert request.entries().shape == (len(tokens) // P, 5)
        cache.check()


def test_a_segment_moves_and_the_plan_says_how() -> None:
    cache, segment = cache_of(), prompt(48)
    served(cache, segment)
    moved = np.concatenate((prompt(21, 1), segment, prompt(3, 2)))
    request = cache.admit(moved, segments=[(21, 69, "")])
    plan = request.plan
    assert plan.tokens == 72
    assert plan.reused_segment == 48
    assert plan.recomputed == 24
    span = plan.spans[1]
    assert (span.start, span.end, span.kind, span.delta) == (21, 69, "segment", 21)
    assert (span.source, span.exact, span.reason) == ("request", True, None)
    assert (span.own, plan.spans[0].own) == (True, None)
    assert plan.spans[0].reason == "fresh"
    assert "fresh text" in plan.spans[0].explanation
    made = plan.to_dict()
    assert (made["spans"][1]["delta"], made["spans"][1]["own"]) == (21, True)
    assert sum(s["end"] - s["start"] for s in made["spans"]) == 72
    assert "48 by segment" in str(plan)
    copies = request.take_copies()
    assert copies.dtype == np.int32
    assert copies[:, 4].sum() == 48
    assert (copies[:, 5] == 21).all()
    request.finish_copies()
    covered(request.entries(), 72)
    assert (request.entries()[:, 4] == 0).all()
    request.release()
    cache.check()


def test_share_reads_in_place_and_writes_apart() -> None:
    cache, segment = cache_of(), prompt(48)
    served(cache, segment)
    moved = np.concatenate((prompt(21, 1), segment, prompt(3, 2)))
    request = cache.admit(moved, segments=[(21, 69, "")], mode="share")
    assert len(request.take_copies()) == 0
    entries = request.entries()
    covered(entries, 72)
    assert set(entries[:, 4].tolist()) == {0, 21}
    with pytest.raises(InvalidArgument, match="position 30: expected .* got a position read from"):
        request.slots(np.array([30], np.int32))
    request.make_writable(np.array([30], np.int32))
    copies = request.take_copies()
    assert copies[:, 4].sum() > 0
    request.finish_copies()
    assert request.slots(np.array([30], np.int32)).shape == (1, 2)
    covered(request.entries(), 72)
    request.release()
    cache.check()


def test_a_replaced_entry_is_read_as_it_is_now() -> None:
    """A block's KV saw the text before it: what follows a changed line has KV of its own."""
    cache, body = cache_of(), prompt(64)
    old, new = (np.concatenate((prompt(16, seed), body)) for seed in (1, 2))
    asked = np.concatenate((prompt(5, 3), new, prompt(5, 4)))

    def insert(document: np.ndarray) -> list[int]:
        with cache.admit(document, reuse="none") as request:
            request.commit(80, 80)
            request.freeze("book", 0, 80)
            return request.entries()[:, 0].tolist()

    def reused() -> tuple[list[tuple[str, bool]], list[int]]:
        with cache.admit(asked, segments=[(5, 85, "")], mode="share") as request:
            spans = [s for s in request.plan.spans if s.kind == "segment"]
            read = [int(block) for block, *_, delta in request.entries() if delta]
            return [(s.source, s.own) for s in spans], read

    first = insert(old)
    assert reused() == ([("book", False)], first[1:])
    second = insert(new)
    assert reused() == ([("book", True)], second)
    cache.delete("book")
    assert reused() == ([("request", True)], second)
    cache.check()


def test_a_knowledge_base_is_listed_and_deleted() -> None:
    cache, tokens = cache_of(), prompt(40)
    with cache.admit(tokens, namespace="a") as request:
        request.commit(40, 40)
        request.freeze("book", 0, 40)
    (segment,) = cache.frozen()
    assert (segment.name, segment.namespace, segment.tokens) == ("book", "a", 40)
    assert segment.blocks == segment.resident_blocks == 3
    assert cache.frozen("b") == []
    assert cache.stats()["frozen"] == 3
    again = np.concatenate((prompt(5, 1), tokens, prompt(5, 2)))
    with cache.admit(again, segments=[(5, 45, "a")]) as request:
        assert request.plan.spans[1].source == "book"
    with pytest.raises(kvweave.UnknownSegment, match="expected a frozen segment of namespace"):
        cache.delete("book", "b")
    with pytest.raises(KeyError):
        cache.delete("page", "a")
    cache.delete("book", "a")
    assert cache.frozen() == []
    cache.rebalance()
    cache.check()


def test_a_fork_shares_until_one_side_writes() -> None:
    cache, tokens = cache_of(), prompt(40)
    first = cache.admit(tokens, reserve_tokens=8)
    first.commit(40, 40)
    second = first.fork()
    assert (first.entries() == second.entries()).all()
    held = cache.stats()["held"]
    second.append(np.array([1], np.int32))
    copies = second.take_copies()
    second.finish_copies()
    assert cache.stats()["held"] == held + 1
    assert copies[:, 4].sum() == 8
    assert second.length == 41
    assert first.length == 40
    assert first.entries()[-1, 0] != second.entries()[-1, 0]
    first.release()
    covered(second.entries(), 41)
    second.release()
    cache.check()


def test_release_returns_everything_and_is_safe_twice() -> None:
    cache = cache_of()
    total = cache.stats()["free"] + cache.stats()["claimable"]
    request = cache.admit(prompt(100), reserve_tokens=50)
    assert cache.stats()["held"] == 10
    request.release()
    request.release()
    assert request.released
    assert cache.stats()["free"] + cache.stats()["claimable"] == total
    with pytest.raises(InvalidArgument, match="request: expected a live request, got a released"):
        request.entries()
    held = cache.admit(prompt(100))
    assert cache.stats()["held"] > 0
    del held
    assert cache.stats()["held"] == 0


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    cache = cache_of(blocks=8)
    first = cache.admit(prompt(64))
    before = cache.stats()
    with pytest.raises(kvweave.PoolFull, match="expected 5 blocks to be available, got 4") as told:
        cache.admit(prompt(80, 1))
    assert told.value.expected == "5 blocks to be available"
    assert told.value.got == "4"
    with pytest.raises(kvweave.PoolFull):
        first.append(prompt(100))
    assert first.length == 64
    assert cache.stats() == before
    cache.check()


BAD_ADMISSIONS = [
    ({"tokens": prompt(0)}, InvalidArgument, "expected at least one token, got 0"),
    ({"segments": [(0, 16)]}, InvalidArgument, r"segment 0: expected \(start.* got \(0, 16\)"),
    ({"segments": [(0, 8, ""), 7]}, InvalidArgument, r"segment 1: expected .* got 7"),
    ({"segments": [(0.5, 8, "")]}, InvalidArgument, r"segment 0: expected .* got \(0.5, 8, ''\)"),
    ({"segments": [(0, True, "")]}, InvalidArgument, r"segment 0: expected .* got \(0, True, ''\)"),
    ({"segments": [(0, 1 << 70, "")]}, InvalidArgument, r"expected a .* range inside \[0, 40\)"),
    ({"segments": 5}, InvalidArgument, r"segments: expected a sequence of \(start.*, got 5"),
    ({"segments": iter(())}, InvalidArgument, "segments: expected a sequence of"),
    ({"tokens": prompt(8).astype(np.float32)}, InvalidArgument, "int64 or uint32, got float32"),
    ({"tokens": np.array([1, -1], np.int32)}, InvalidArgument, "ids from 0 to .* got -1"),
    ({"tokens": np.array([1, 2**33])}, InvalidArgument, "ids from 0 to .* got 8589934592"),
    ({"tokens": prompt(8).reshape(2, 4)}, InvalidArgument, r"shape \[T\], got \[2, 4\]"),
    ({"tokens": prompt(16)[::2]}, InvalidArgument, "C-contiguous strides"),
    ({"tokens": [1, 2, 3]}, InvalidArgument, "expected a tensor, got an object of type list"),
    ({"segments": [(0, 41, "")]}, InvalidArgument, "expected .* got"),
    ({"segments": [(8, 8, "")]}, InvalidArgument, "expected .* got"),
    ({"segments": [(-1, 8, "")]}, InvalidArgument, "segment start: expected at least 0, got -1"),
    ({"segments": [(0, 20, ""), (10, 30, "")]}, InvalidArgument, "expected segments that do not"),
    ({"segments": [(0, 20, "a"), (0, 20, "b")]}, kvweave.NamespaceConflict, "expected .* got"),
    ({"reuse": "some"}, InvalidArgument, 'reuse: expected none, prefix or segments, got "some"'),
    ({"mode": "borrow"}, InvalidArgument, "mode: expected materialise or share"),
    ({"reserve_tokens": -1}, InvalidArgument, "reserve_tokens: expected at least 0"),
    ({"reserve_tokens": 10**12}, kvweave.KvweaveError, "expected .* got"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD_ADMISSIONS)
def test_admission_refuses(call, error, words) -> None:
    cache = cache_of()
    served(cache, prompt(40))
    before = cache.stats()
    with pytest.raises(error, match=words) as told:
        cache.admit(**{"tokens": prompt(40), **call})
    assert told.value.expected
    assert told.value.got
    assert cache.stats() == before
    cache.check()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({}, "arena: expected arena_bytes, blocks or external, got none of them"),
        ({"blocks": 4, "arena_bytes": 4096}, "got both"),
        ({"blocks": -1}, "blocks: expected at least 0, got -1"),
        ({"blocks": 0}, "expected .* got"),
        ({"blocks": 2**40}, "arena: expected at most"),
        ({"arena_bytes": 64}, "expected .* got"),
        ({"blocks": 8, "hash": "md5"}, 'hash: expected xxh3-128 or sha256, got "md5"'),
        ({"blocks": 8, "frozen_share": 1.5}, "frozen_share: expected a share from 0 to 1"),
        ({"blocks": 8, "watermark": float("nan")}, "watermark: expected a share from 0 to 1"),
    ],
)
def test_a_cache_refuses(call, words) -> None:
    with pytest.raises(InvalidArgument, match=words):
        KvCache(KvShape(2, 2, 8, P), **call)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 1, 8), "expected .* got"),
        ((1, -1, 8), "kv_heads: expected .* got -1"),
        ((1, 1, 8, 0), "expected .* got"),
        ((1, 1, 8, 16, "f64"), 'dtype: expected f32, bf16.* got "f64"'),
        ((1, 1, 8, 16, torch.int8), "dtype: expected"),
    ],
)
def test_a_shape_refuses(sizes, words) -> None:
    with pytest.raises(InvalidArgument, match=words):
        KvShape(*sizes)


def test_shapes_know_their_sizes() -> None:
    shape = KvShape(30, 3, 64, dtype=torch.bfloat16)
    assert (shape.page_tokens, shape.dtype) == (16, "bf16")
    assert shape.token_bytes == 2 * 30 * 3 * 64 * 2
    assert shape.page_bytes == 2 * 16 * 64 * 2
    assert shape.blocks_for_tokens(17) == 2
    assert shape == KvShape(30, 3, 64, 16, "bfloat16")


def test_head_maps_come_and_go_as_json() -> None:
    shape = KvShape(2, 2, 8, P)
    whole = kvweave.HeadClassMap.full(shape, "model")
    assert kvweave.HeadClassMap.from_json(whole.to_json()) == whole
    cache = KvCache(shape, blocks=8, heads=whole, fingerprint="model")
    served(cache, prompt(40))
    assert cache.match_prefix(prompt(40)) == 40
    for text in ("", "{}", whole.to_json().replace('"schema_version": 1', '"schema_version": 9')):
        with pytest.raises(kvweave.CorruptHeadMap, match="expected .* got"):
            kvweave.HeadClassMap.from_json(text)
    with pytest.raises(kvweave.CorruptHeadMap, match='expected JSON text, got .* a file: "maps/h'):
        kvweave.HeadClassMap.from_json("maps/heads.json")
    with pytest.raises(kvweave.CorruptHeadMap, match='expected a map of model "other"'):
        KvCache(shape, blocks=8, heads=whole, fingerprint="other")
    with pytest.raises(kvweave.CorruptHeadMap, match="expected 3 layers"):
        KvCache(KvShape(3, 2, 8, P), blocks=8, heads=whole)


def test_many_threads_use_one_cache() -> None:
    cache = cache_of(blocks=256)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(30):
                served(cache, prompt(60, (seed + step) % 7))
                cache.match_prefix(prompt(60, step % 7))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.stats()["held"] == 0
    cache.check()


@settings(max_examples=80)
@given(data=st.data())
def test_any_flow_keeps_the_books(data) -> None:
    """Admissions of overlapping texts, commits, freezes, forks, refusals: law 1 and law 2."""
    cache = cache_of(blocks=data.draw(st.integers(4, 24)))
    live: list[kvweave.KvRequest] = []
    refusals: list[kvweave.KvweaveError] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["admit", "commit", "append", "fork", "drop", "freeze"]))
        try:
            if action == "admit":
                size, skip = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 20))
                tokens = np.concatenate((prompt(skip, 9), prompt(70, 3)[:size]))
                marks = [(skip, len(tokens), "")] if data.draw(st.booleans()) else []
                mode = data.draw(st.sampled_from(["materialise", "share"]))
                live.append(cache.admit(tokens, segments=marks, mode=mode))
                plan = live[-1].plan
                assert plan.reused_prefix + plan.reused_segment + plan.recomputed == len(tokens)
                assert len(plan.rows()) == plan.recomputed >= 1
                live[-1].take_copies()
                live[-1].finish_copies()
            elif live:
                request = live[data.draw(st.integers(0, len(live) - 1))]
                if action == "commit":
                    request.commit(request.length, data.draw(st.integers(0, request.length)))
                elif action == "append":
                    request.append(prompt(data.draw(st.integers(1, 20)), 5))
                    request.take_copies()
                    request.finish_copies()
                elif action == "fork":
                    live.append(request.fork())
                elif action == "freeze":
                    request.freeze("x", 0, data.draw(st.integers(1, request.length)))
                else:
                    live.remove(request)
                    request.release()
        except kvweave.KvweaveError as refusal:
            refusals.append(refusal)
        for request in live:
            covered(request.entries(), request.length)
        cache.check()
    assert all(refusal.expected and refusal.got for refusal in refusals)
    for request in live:
        request.release()
    assert cache.stats()["held"] == cache.stats()["frozen"]
    cache.check()

"""Which documents of a store routers are told of, with a real cache and no vLLM."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave import KvCache, KvShape
from kvweave.adapters.vllm.segments.known_documents import KnownDocuments, document_hash

P = 16


def cache_of(blocks: int) -> KvCache:
    return KvCache(KvShape(1, 1, 8, P), blocks=blocks)


def tokens_of(seed: int, length: int = 3 * P) -> list[int]:
    return np.random.default_rng(seed).integers(1, 999, length).tolist()


def computed(cache: KvCache, tokens: list[int], namespace: str = "") -> None:
    request = cache.admit(np.asarray(tokens, np.int32), namespace=namespace)
    request.commit(len(tokens), len(tokens))
    request.release()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 10
        return self.now


def test_a_document_is_told_once_and_again_when_it_has_gone() -> None:
    cache = cache_of(8)
    known = KnownDocuments(cache, Clock())
    document, name = tokens_of(1), document_hash(tokens_of(1), "acme")
    known.expect(document, "acme")
    assert known.taken() == []
    computed(cache, document, "acme")
    known.expect(document, "acme")
    assert known.taken() == [("stored", name, len(document))]
    known.expect(document, "acme")
    assert known.taken() == []
    for seed in range(2, 8):
        computed(cache, tokens_of(seed))
    assert known.taken() == [("removed", name, len(document))]
    assert known.taken() == []
    computed(cache, document, "acme")
    known.expect(document, "acme")
    assert known.taken() == [("stored", name, len(document))]
    # As when caches are reset.
    cache.forget(None)
    assert known.taken() == [("removed", name, len(document))]


def test_another_namespace_has_another_document() -> None:
    cache = cache_of(8)
    known = KnownDocuments(cache, Clock())
    computed(cache, tokens_of(1), "acme")
    known.expect(tokens_of(1), "other")
    assert known.taken() == []
    assert cache.match_segment(np.asarray(tokens_of(1), np.int32), "other") == 0


def test_evictions_are_looked_for_once_in_a_while() -> None:
    cache, times = cache_of(4), iter([0.0, 0.5, 1.5])
    known = KnownDocuments(cache, lambda: next(times))
    computed(cache, tokens_of(1))
    known.expect(tokens_of(1), "")
    assert len(known.taken()) == 1
    computed(cache, tokens_of(2))
    # The first look was at 0.0, when nothing had gone; the time of one that finds nothing to do
    # does not count.
    assert [kind for kind, _, _ in known.taken()] == ["removed"]
    computed(cache, tokens_of(3))
    assert known.taken() == []


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.text(max_size=5))
def test_the_hash_is_what_its_description_says(tokens: list[int], namespace: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in namespace):
        return
    named = namespace.encode()
    parts = struct.pack("<I", len(named)), named, struct.pack(f"<{len(tokens)}I", *tokens)
    assert document_hash(tokens, namespace) == hashlib.sha256(b"".join(parts)).digest()


@pytest.mark.parametrize("start", [0, 5, P, 3 * P + 1])
def test_a_segment_is_found_wherever_it_stood(start: int) -> None:
    """As a prompt that marks it finds it, which holds what it finds."""
    cache, document = cache_of(64), tokens_of(1, 5 * P)
    whole = np.asarray([*tokens_of(2, start), *document, *tokens_of(3, 20)], np.int32)
    end = start + len(document)
    request = cache.admit(whole, segments=[(start, end, "")])
    request.commit(len(whole), start)
    request.release()
    found = cache.match_segment(np.asarray(document, np.int32))
    before = cache.stats()
    again = np.asarray([*tokens_of(4, 7), *document, *tokens_of(5, 9)], np.int32)
    with cache.admit(again, segments=[(7, 7 + len(document), "")]) as asked:
        reused = asked.plan.reused_segment
    assert 4 * P - P < found == reused <= len(document)
    assert before["requests"] == 1
    assert cache.match_segment(np.asarray([], np.int32)) == 0
    assert cache.match_segment(np.asarray(document, np.int32), "never used") == 0
    assert 0 < cache.match_segment(np.asarray(document[: 2 * P], np.int32)) <= 2 * P

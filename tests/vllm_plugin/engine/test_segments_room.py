"""Room for a document of a knowledge base, asked before anything of it is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave import PoolFull
from kvweave.adapters.vllm.segments.packed_store import PackedSegmentStore
from kvweave.adapters.vllm.segments.store import PAGE_TOKENS, Geometry, SegmentStore
from kvweave.policies import Naive

BLOCKS = 24
GEOMETRY = Geometry(1, 1, 8, torch.float32, torch.device("cpu"), np.ones(4))
PAGE_BYTES = 2 * PAGE_TOKENS * 8 * 4
PACKED = Geometry(1, 1, 64, torch.float32, torch.device("cpu"), np.ones(32))


def store_of(share: float) -> SegmentStore:
    return SegmentStore(GEOMETRY, BLOCKS * PAGE_BYTES, share, "a model")


def packed_store_of(share: float) -> PackedSegmentStore:
    """As many blocks, or nearly so, in pages of INT4."""
    return PackedSegmentStore(PACKED, 1 << 18, share, "a model", "int4", 64)


def text(store: SegmentStore, seed: int, blocks: float) -> list[int]:
    """Texts of one seed begin alike, and those of all seeds with one block and a half."""
    size = store.page_tokens
    tokens = np.random.default_rng(seed).integers(1, 999, int(blocks * size))
    alike = min(3 * size // 2, len(tokens))
    tokens[:alike] = np.arange(1, alike + 1)
    found: list[int] = tokens.tolist()
    return found


def froze(store: SegmentStore, name: str, tokens: list[int], namespace: str) -> bool:
    """Whether the store itself takes a document; it says so before that is computed."""
    try:
        admitted = store.admit_document(name, tokens, namespace)
    except PoolFull:
        return False
    try:
        _computed(store, admitted)
        # What was admitted can be frozen.
        admitted.request.freeze(name, 0, len(tokens))
    finally:
        admitted.release()
    return True


def leave(store: SegmentStore, tokens: list[int], namespace: str) -> Any:
    """What a prompt that only begins like others leaves, still held."""
    try:
        admitted = store.admit(tokens, [], namespace, Naive(), discover=False)
    except PoolFull:
        return None
    _computed(store, admitted)
    return admitted


def _computed(store: SegmentStore, admitted: Any) -> None:
    if isinstance(store, PackedSegmentStore):
        admitted.request.finish_copies()
    store.commit(admitted, admitted.tokens)


spaces, seeds = st.sampled_from("xy"), st.integers(0, 3)
blocks = st.sampled_from([0.25, 1.0, 1.25, 2.0, 4.5, 7.0, 8.75, 11.0])
steps = st.one_of(
    st.tuples(st.just("insert"), st.sampled_from("ab"), spaces, seeds, blocks),
    st.tuples(st.just("insert"), st.sampled_from("ab"), spaces, seeds, blocks),
    st.tuples(st.just("prompt"), st.just(""), spaces, seeds, blocks),
    st.tuples(st.just("hold"), st.just(""), spaces, seeds, blocks),
    st.tuples(st.just("release"), st.just(""), spaces, seeds, blocks),
    st.tuples(st.just("delete"), st.sampled_from("ab"), spaces, seeds, blocks),
)
shares = st.sampled_from([0.0, 0.125, 0.5, 0.8, 1.0])


@pytest.mark.parametrize("made", [store_of, packed_store_of])
@given(st.lists(steps, max_size=14), shares)
def test_what_is_said_is_what_freezing_says(made: Any, taken: Any, share: float) -> None:
    """It never refuses what fits, nor passes what fails, but for what admission still says.

    That is asked for as well before anything is computed; it differs only where frozen blocks
    gave way to others.
    """
    store, held = made(share), list[Any]()
    for what, name, namespace, seed, size in taken:
        tokens = text(store, seed, size)
        if what == "insert":
            _insert(store, name, tokens, namespace)
        elif what == "delete":
            names = [entry.name for entry in store.frozen(namespace)]
            if name in names:
                store.cache.delete(name, namespace)
        elif what == "release" and held:
            held.pop().release()
        elif what in ("prompt", "hold"):
            left = leave(store, tokens, namespace)
            if left is not None and what == "prompt":
                left.release()
            elif left is not None:
                held.append(left)
        store.cache.check()
    for one in held:
        one.release()


def _insert(store: SegmentStore, name: str, tokens: list[int], namespace: str) -> None:
    before = store.counts()
    try:
        store.require_room(name, tokens, namespace)
        asked = True
    except PoolFull:
        asked = False
    assert store.counts() == before
    found = froze(store, name, tokens, namespace)
    assert asked or not found
    if before["frozen_absent"] == store.counts()["frozen_absent"] == 0:
        assert asked == found


@pytest.mark.parametrize("made", [store_of, packed_store_of])
def test_text_that_a_prompt_left_needs_room_as_any_other(made: Any) -> None:
    store = made(0.5)
    most = int(store.cache.stats()["total"]) // 2
    assert froze(store, "a", text(store, 0, most), "")
    other = text(store, 1, 5)
    # One block of it is the other document's.
    for _ in range(2):
        with pytest.raises(PoolFull, match="expected 4 blocks to be available, got 0"):
            store.require_room("b", other, "")
        leave(store, other, "").release()
        assert store.cache.match_prefix(np.asarray(other, np.int32), regime=store.regime)


@pytest.mark.parametrize("made", [store_of, packed_store_of])
def test_a_longer_text_in_the_place_of_its_beginning_is_counted_once(made: Any) -> None:
    store = made(0.5)
    most = int(store.cache.stats()["total"]) // 2
    assert froze(store, "a", text(store, 0, most - 4), "")
    for size in (most + 1, 2 * most):
        with pytest.raises(PoolFull):
            store.require_room("a", text(store, 0, size), "")
    store.require_room("a", text(store, 0, most), "")
    assert froze(store, "a", text(store, 0, most), "")
    # What another entry shares with it does not go with it.
    assert froze(store, "b", text(store, 0, most), "")
    with pytest.raises(PoolFull):
        store.require_room("a", text(store, 1, 3), "")


def test_documents_that_go_make_room() -> None:
    """As those of a folder do; what another entry has of them stays."""
    store = store_of(0.5)
    assert froze(store, "a", text(store, 0, 6), "x")
    assert froze(store, "b", text(store, 0, 11), "x")
    other = text(store, 1, 7)
    for going in ([], [("x", "a")], [("y", "b")], [("x", "b")]):
        with pytest.raises(PoolFull):
            store.require_room("c", other, "x", going)
    store.require_room("c", text(store, 1, 6), "x", [("x", "b")])
    store.require_room("c", other, "x", [("x", "a"), ("x", "b")])


def test_a_document_beyond_the_share_is_refused() -> None:
    store = store_of(0.5)
    room = int(store.cache.stats()["total"]) // 2
    most = list(range(1, room * PAGE_TOKENS + 1))
    store.require_room("a", most, "")
    with pytest.raises(PoolFull, match=f"expected {room + 1} blocks to be available, got {room}"):
        store.require_room("a", [*most, 1], "")
    assert froze(store, "a", most, "")
    with pytest.raises(PoolFull, match="got 0"):
        store.require_room("b", [999] * PAGE_TOKENS, "")
    # What has the name is replaced, and the same text needs no room of its own.
    store.require_room("a", [999] * PAGE_TOKENS, "")
    store.require_room("b", most, "")
    with pytest.raises(PoolFull):
        store.require_room("b", most, "another")

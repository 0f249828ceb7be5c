"""Room for a document of a knowledge base, asked before anything of it is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave import PoolFull
from kvweave.adapters.vllm.segments.store import PAGE_TOKENS, Geometry, SegmentStore
from kvweave.policies import Full

BLOCKS = 24
GEOMETRY = Geometry(1, 1, 8, torch.float32, torch.device("cpu"), np.ones(4))
PAGE_BYTES = 2 * PAGE_TOKENS * 8 * 4


def store_of(share: float) -> SegmentStore:
    return SegmentStore(GEOMETRY, BLOCKS * PAGE_BYTES, share, "a model")


def froze(store: SegmentStore, name: str, tokens: list[int], namespace: str) -> bool:
    """Whether the store itself takes a document."""
    try:
        admitted = store.admit(tokens, [], namespace, Full(), discover=False)
    except PoolFull:
        return False
    try:
        store.commit(admitted, len(tokens))
        admitted.request.freeze(name, 0, len(tokens))
    except PoolFull:
        return False
    finally:
        admitted.release()
    return True


documents = st.tuples(
    st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 3), st.integers(1, 9 * PAGE_TOKENS)
)


@given(st.lists(documents, max_size=12), st.sampled_from([0.0, 0.125, 0.5, 1.0]))
def test_what_is_refused_could_not_be_frozen(given_documents: Any, share: float) -> None:
    store = store_of(share)
    for name, namespace, seed, length in given_documents:
        tokens = np.random.default_rng(seed).integers(1, 999, length).tolist()
        try:
            store.require_room(name, tokens, namespace)
        except PoolFull:
            assert not froze(store, name, tokens, namespace)
        else:
            froze(store, name, tokens, namespace)


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

"""Tokens that are appended before they are known, named later, and taken back: the binding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvweave
from kvweave._native import DecodeRows
from kvweave.cache import KvCache, KvShape

P = 4


@pytest.fixture
def cache() -> KvCache:
    return KvCache(KvShape(2, 2, 8, P, "f32"), blocks=20)


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def test_a_round_of_two_requests(cache) -> None:
    one, other = (cache.admit(ids(*range(n)), reuse="none") for n in (6, 3))
    rows = DecodeRows(cache)
    numbers = ids(rows.join(), rows.join())
    step = rows.step([one, other], numbers, ids(7, 0, 0, 8, 0), ids(3, 2))
    assert step.positions.tolist() == [6, 7, 8, 3, 4]
    assert step.slots.shape == (1, 5, 2)
    assert step.slots[0, :, 1].tolist() == [2, 3, 0, 3, 0]
    assert step.spans.shape == (2, 1, 2)
    one.set_tokens(7, ids(9))
    one.truncate(8)
    assert one.tokens.tolist() == [*range(6), 7, 9]
    other.truncate(4)
    held = cache.stats()["held"]
    step = rows.step([one, other], numbers, ids(5, 5))
    assert step.positions.tolist() == [8, 4]
    # Nothing else is listed anew: each begins a block.
    assert len(step.places) == 2
    assert cache.stats()["held"] == held + 2
    cache.check()


@pytest.mark.parametrize("length", [-1, 5, 12, 2**62, 1.5, "8", None])
def test_lengths_that_are_none(cache, length) -> None:
    request = cache.admit(ids(*range(6)), reuse="none")
    request.append(ids(1, 2, 3))
    wrong: Any = length
    with pytest.raises((kvweave.KvweaveError, TypeError)):
        request.truncate(wrong)
    assert request.length == 9
    request.truncate(6)
    assert request.length == 6
    cache.check()


@pytest.mark.parametrize(
    ("start", "tokens"), [(5, [1]), (8, [1, 2]), (-1, [1]), (6, [-1]), (2**62, [1]), (6, [1.5])]
)
def test_names_of_tokens_that_are_not_there(cache, start, tokens) -> None:
    request = cache.admit(ids(*range(6)), reuse="none")
    request.append(ids(1, 2, 3))
    with pytest.raises(kvweave.KvweaveError):
        request.set_tokens(start, np.asarray(tokens))
    assert request.tokens.tolist() == [*range(6), 1, 2, 3]


@pytest.mark.parametrize("counts", [[0], [2], [-1], [1, 1], [2**31 - 1], []])
def test_counts_that_are_none(cache, counts) -> None:
    request = cache.admit(ids(*range(6)), reuse="none")
    rows = DecodeRows(cache)
    numbers = ids(rows.join())
    with pytest.raises(kvweave.KvweaveError):
        rows.step([request], numbers, ids(7), ids(*counts))
    assert request.length == 6
    cache.check()


def test_what_was_released_or_committed_stays(cache) -> None:
    request = cache.admit(ids(*range(6)), reuse="none")
    request.append(ids(1, 2, 3))
    request.commit(9, 9)
    with pytest.raises(kvweave.InvalidArgument, match="truncate: expected tokens behind the 9"):
        request.truncate(8)
    with pytest.raises(kvweave.InvalidArgument, match="tokens: expected tokens behind the 9"):
        request.set_tokens(8, ids(4))
    assert cache.match_prefix(ids(*range(6), 1, 2, 3)) == 9
    request.release()
    with pytest.raises(kvweave.InvalidArgument, match="released"):
        request.truncate(9)

"""Tokens on their way between the store and vLLM's pages, as runs of `ops.copy_rerotate`."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvweave.adapters.vllm.segments.store import PAGE_TOKENS, runs_of


@given(
    count=st.integers(0, 80),
    size=st.sampled_from([1, 8, 16, 32]),
    seed=st.integers(0, 2**32 - 1),
)
def test_runs_are_the_tokens(count, size, seed) -> None:
    """Every token once, in its page and slot of either side; no run crosses a page."""
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(200) < count / 80).astype(np.int32)
    first = rng.integers(0, 1000)
    at = first + positions + np.cumsum(rng.random(len(positions)) < 0.1)
    delta = np.cumsum(rng.random(len(positions)) < 0.1)
    places = np.column_stack((at // PAGE_TOKENS, at % PAGE_TOKENS, delta)).astype(np.int32)
    runs = runs_of(positions, places, size)
    assert runs.dtype == np.int32
    tokens = [
        (page * size + slot + i, block, start + i, turn)
        for block, start, page, slot, length, turn in runs.tolist()
        for i in range(length)
    ]
    assert tokens == [
        (p, *place) for p, place in zip(positions.tolist(), places.tolist(), strict=True)
    ]
    ends = runs[:, [1, 3]] + runs[:, 4:5]
    assert (ends <= [PAGE_TOKENS, size]).all()
    assert (runs[:, 4] > 0).all()
    # What lies side by side on both sides, in one page of each, is one run.
    goes_on = np.diff(positions) == 1
    goes_on &= (np.diff(places, axis=0) == (0, 1, 0)).all(1) & (positions[1:] % size > 0)
    assert len(runs) == len(positions) - int(goes_on.sum())

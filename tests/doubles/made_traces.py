"""Traces that tests make up: prompts with chained numbers of blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from benchmarks.replay.traces import Blocks, Trace, Turn, sessions_of

FORKS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(1, 5)), min_size=2, max_size=30
)
"""Of each prompt: which it goes on with, how many of that one's blocks it has, how many more."""


def prompts_of(forks: Sequence[tuple[int, int, int]]) -> list[Blocks]:
    """Prompts with chained numbers: each has so many blocks of an earlier one, and some more."""
    prompts: list[Blocks] = []
    fresh = 0
    for before, shared, more in forks:
        own = np.arange(fresh, fresh + more, dtype=np.int32)
        fresh += more
        head = prompts[before % len(prompts)][:shared] if prompts else own[:0]
        prompts.append(np.concatenate((head, own)))
    return prompts


def trace_of(prompts: Sequence[Blocks]) -> Trace:
    turns = [
        Turn(float(at), session, blocks, 512 * len(blocks))
        for at, (blocks, session) in enumerate(zip(prompts, sessions_of(prompts), strict=True))
    ]
    return Trace("made", turns)


def mooncake_lines(prompts: Sequence[Sequence[int]]) -> str:
    lines = [
        {"timestamp": 1000 * at, "input_length": 512 * len(p) - 7, "hash_ids": list(p)}
        for at, p in enumerate(prompts)
    ]
    return "\n".join(json.dumps(line) for line in lines) + "\n"

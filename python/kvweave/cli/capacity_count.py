"""How many sessions fit, found by admitting them: the real allocator, without bytes behind it.

Every session is a prompt of its own, nothing reused. It is admitted, prefilled in chunks (in which
the cache lets go of what its windows have left behind) and kept, until the next one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvweave.cache import HeadClassMap, KvCache, KvRequest, KvShape
from kvweave.cli.capacity_plan import ModelShape, capacity_of
from kvweave.errors import InvalidArgument, PoolFull

MOST_BLOCKS = 1 << 24
"""Blocks that sessions may hold together: their books take about 130 bytes each."""

MOST_TOKENS = 1 << 24
"""Tokens of a session: their ids are made and admitted."""


@dataclass(frozen=True)
class Sessions:
    """Sessions that were held at once, and bytes of the blocks of one of them."""

    fit: int
    session_bytes: int


def count_sessions(
    shape: ModelShape,
    length: int,
    page_tokens: int,
    memory_bytes: int,
    heads: HeadClassMap | None = None,
    chunk_tokens: int = 512,
) -> Sessions:
    """Admits sessions of `length` tokens into `memory_bytes` until one is refused.

    With `heads` they are prefilled `chunk_tokens` at a time, which the one that is being prefilled
    must have room for besides its windows.

    # Errors
    `InvalidArgument` for sizes that no cache has, or memory for more than `MOST_BLOCKS` blocks.
    """
    if chunk_tokens < 1:
        raise InvalidArgument(f"chunk_tokens: expected >= 1, got {chunk_tokens}")
    if length > MOST_TOKENS:
        raise InvalidArgument(f"length: expected at most {MOST_TOKENS} tokens, got {length}")
    reckoned = capacity_of(shape, length, page_tokens, memory_bytes, heads)
    if reckoned.requests * reckoned.request_blocks > MOST_BLOCKS:
        raise InvalidArgument(
            f"memory: expected room for at most {MOST_BLOCKS} blocks to count sessions in, "
            f"got {reckoned.requests} sessions of {reckoned.request_blocks} blocks"
        )
    geometry = KvShape(shape.layers, shape.kv_heads, shape.head_dim, page_tokens, shape.dtype)
    cache = KvCache(geometry, arena_bytes=memory_bytes, heads=heads, memory=False)
    prompt = np.zeros(length, np.int32)
    held: list[KvRequest] = []
    while session := _admitted(cache, prompt, chunk_tokens if heads is not None else 0):
        held.append(session)
    return Sessions(len(held), held[-1].kv_bytes()[0] if held else 0)


def _admitted(cache: KvCache, prompt: np.ndarray, chunk: int) -> KvRequest | None:
    """A session that has been prefilled; None where it does not fit."""
    try:
        session = cache.admit(prompt, reuse="none", chunk_tokens=chunk)
    except PoolFull:
        return None
    if chunk:
        for start in range(chunk, len(prompt), chunk):
            session.advance(start, min(start + chunk, len(prompt)))
        session.advance(len(prompt), len(prompt))
    return session

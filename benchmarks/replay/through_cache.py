"""One trace through one cache: what its turns find there."""

from __future__ import annotations

import numpy as np

from benchmarks.replay.told import Teller, Told
from benchmarks.replay.traces import Trace
from kvweave.cache import KvCache, KvShape

OTHER = np.int32(2**31 - 1)
"""A token of no trace: the last token of a prompt is always computed."""


def cache_of(room: int, eviction: str) -> KvCache:
    """A cache of `room` blocks, in which a page stands for a block, and a token for its content."""
    return KvCache(KvShape(1, 1, 8, 1, "f32"), blocks=room, eviction=eviction, memory=False)


def found_in_cache(trace: Trace, room: int, eviction: str, told: Told | None = None) -> list[int]:
    """Blocks that each turn finds, from its first on, in a cache of `room` blocks.

    The content of a block is its number. Turns come one after the other; each is admitted,
    committed and let go of, as `Runner.generate` does.
    """
    cache = cache_of(room, eviction)
    teller = None if told is None else Teller(told, trace)
    found = []
    for at, turn in enumerate(trace.turns):
        if teller is not None:
            teller.before(at, cache)
        with cache.admit(np.append(turn.blocks, OTHER)) as request:
            found.append(int(request.plan.reused_prefix))
            request.commit(len(turn.blocks), len(turn.blocks))
            if teller is not None:
                teller.after(at, request, cache)
    cache.check()
    return found

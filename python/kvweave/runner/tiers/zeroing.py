"""`Zeroing`: pages of blocks that went back are overwritten before anybody else is given them.

Each cache of a runner says which of its pages were freed, in every call that takes blocks before it
returns. What only frees is caught up with when the runner stops computing, so that nothing that was
let go of outlives the call that did.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from kvweave.cache import KvCache
from kvweave.ops import RowPages
from kvweave.runner.kv.carry_pages import carry_pages
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.tables import Int32, send, send_index
from kvweave.runner.tiers.host_tier import HostTier

_RUNS = 8
"""Up to so many runs of pages on a GPU are filled one by one; more take one index of all pages."""


class Zeroing:
    """Zeroes what was in freed blocks of a runner's arena and of its host memory.

    `pages` [pages, 2, P, D] are the arena of `cache`.
    """

    def __init__(
        self,
        cache: KvCache,
        pages: torch.Tensor,
        pools: Iterable[HostPool],
        documents: HostTier | None,
    ) -> None:
        cache.zero_freed_by(partial(zero_pages, pages))
        self._caches = [cache]
        for pool in pools:
            pool.cache.zero_freed_by(partial(_zero_pool, pool))
            self._caches.append(pool.cache)
        if documents is not None:
            known = pages, documents.pages
            documents.cache.zero_freed_by(partial(zero_host, *known, pinned=documents.pinned))
            self._caches.append(documents.cache)

    def zero(self) -> None:
        """Zeroes what was freed by now. For whoever computes, or while nobody does."""
        for cache in self._caches:
            cache.zero_freed()


def zero_pages(pages: torch.Tensor, runs: Int32) -> None:
    """Zeroes runs [N, 2] of pages, each a first one and how many; on a GPU by its stream."""
    if pages.is_cuda and len(runs) > _RUNS:
        # Bytes: there is no filling of fp8 by an index.
        index = send_index(pages.device, _numbers(runs)).long()
        pages.view(torch.uint8).index_fill_(0, index, 0)
        return
    for first, count in runs.tolist():
        pages[first : first + count].zero_()


def zero_host(
    arena: torch.Tensor,
    memory: torch.Tensor,
    runs: Int32,
    *,
    pinned: bool,
    scales: torch.Tensor | None = None,
) -> None:
    """Zeroes runs [N, 2] of pages of the host's memory, behind all that a GPU still reads of it.

    With their `scales` where they are kept as fp8: see `RowPages`.

    A GPU that reads memory where it lies writes there too: the zeros of the null block of its own
    `arena`.
    """
    if not (pinned and arena.is_cuda):
        zero_pages(memory, runs)
        if scales is not None:
            zero_pages(scales, runs)
        return
    numbers = _numbers(runs)
    moves = np.zeros((len(numbers), 3), np.int32)
    moves[:, 1] = np.arange(len(numbers))
    count, null = np.asarray([len(numbers)], np.int32), np.zeros((1, 1), np.int32)
    sent = send(arena.device, moves, count, null, numbers[None])
    zeros, freed = RowPages(arena, sent[2]), RowPages(memory, sent[3], 1, scales)
    carry_pages(sent[0], sent[1], zeros, freed, "spill", pinned=pinned)


def _zero_pool(pool: HostPool, runs: Int32) -> None:
    # A copy that nobody wants any more may be on its way there.
    pool.aside.abandoned.wait()
    known = pool.arena, pool.pages, runs
    zero_host(*known, pinned=pool.pinned, scales=pool.scales)


def _numbers(runs: Int32) -> Int32:
    """The pages of runs [N, 2] one by one, i32 [pages]."""
    return np.concatenate([np.arange(first, first + count) for first, count in runs]).astype("i4")

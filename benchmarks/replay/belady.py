"""What a cache could find that knew the future: of two blocks the one goes that is needed later.

Belady's order (1966), which also leaves out what is never needed again. No cache here can reach it:
a prompt's blocks are held while it is computed, whether they are needed again or not.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.replay.traces import Blocks


def next_uses(prompts: Sequence[Blocks]) -> list[npt.NDArray[np.int64]]:
    """Of each block of each prompt the next prompt that names it; their number where none does."""
    lengths = [len(blocks) for blocks in prompts]
    every = np.concatenate(prompts)
    at = np.repeat(np.arange(len(prompts)), lengths)
    order = np.lexsort((at, every))
    alike = every[order][1:] == every[order][:-1]
    after = np.full(len(every), len(prompts), np.int64)
    after[order[:-1][alike]] = at[order[1:][alike]]
    return np.split(after, np.cumsum(lengths)[:-1])


def found_by_belady(prompts: Sequence[Blocks], room: int) -> list[int]:
    """Blocks that each prompt finds, from its first on, where `room` blocks are kept."""
    never = len(prompts)
    # Of each block that is kept, who needs it next; -1 of the others.
    needed = np.full(1 + max(int(blocks.max()) for blocks in prompts), -1, np.int64)
    waiting = np.zeros(never, np.int64)
    # Prompts for which something is kept, the last one first.
    latest: list[int] = []
    found, kept = [], 0
    for blocks, after in zip(prompts, next_uses(prompts), strict=True):
        here = needed[blocks] >= 0
        found.append(len(blocks) if here.all() else int(here.argmin()))
        again = after < never
        needed[blocks] = np.where(again, after, -1)
        kept += int(again.sum()) - int(here.sum())
        for prompt, count in zip(*np.unique(after[again], return_counts=True), strict=True):
            if not waiting[prompt]:
                heapq.heappush(latest, -int(prompt))
            waiting[prompt] += count
        while kept > room:
            prompt = -latest[0]
            theirs = prompts[prompt][needed[prompts[prompt]] == prompt]
            # Its last blocks are of no use without those before them.
            gone = theirs[max(0, len(theirs) - (kept - room)) :]
            needed[gone] = -1
            waiting[prompt] -= len(gone)
            kept -= len(gone)
            if not waiting[prompt]:
                heapq.heappop(latest)
    return found

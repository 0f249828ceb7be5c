"""Where single tokens lie, and the entries and copies that say so in runs.

Ops are told of runs, of tokens that follow one another in a block. Which tokens a request reads in
one place and which in another is decided token by token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave.plan import Rows
from kvweave.runner.kv.tables import Int32, send, within_runs

Places = Int32
"""Of each token its block, slot and delta, i32 [T, 3]; block −1 where it lies nowhere."""


def no_places(tokens: int) -> Places:
    """Places of so many tokens that lie nowhere."""
    return np.tile(np.asarray([-1, 0, 0], np.int32), (tokens, 1))


def entries_in_place(places: Places, first: int, end: int) -> Int32:
    """Entries of the held tokens of places [T, 3] from `first` on, as few as rows may read.

    Those before `end` are seen by all rows, so they are listed as they lie, one position after the
    other.
    """
    held = first + np.flatnonzero(places[first:, 0] >= 0).astype(np.int32)
    far = np.searchsorted(held, end, side="right")
    together = places[held[:far]]
    together = together[np.lexsort((together[:, 1], together[:, 0]))]
    listed = entries_at(first + np.arange(far, dtype=np.int32), together)
    near = held[far:]
    return np.concatenate((listed, entries_at(near, places[near])))


def places_of(entries: Int32, tokens: int) -> Places:
    """Where the first tokens lie, by entries i32 [N, 5], of which no two list the same one."""
    block, begin, end, position, delta = entries.T
    lengths = end - begin
    within = within_runs(lengths)
    known = np.stack([np.repeat(of, lengths) for of in (block, begin, delta)], 1)
    known[:, 1] += within
    at = np.repeat(position, lengths) + within
    places = no_places(tokens)
    places[at[at < tokens]] = known[at < tokens]
    return places


def entries_at(positions: Rows, places: Places) -> Int32:
    """Entries i32 [N, 5] of tokens at sorted positions [n] that lie at places [n, 3]."""
    block, slot, delta = places.T
    first, last = _runs((block, delta), (slot, positions))
    columns = block[first], slot[first], slot[last] + 1, positions[first], delta[first]
    return np.stack(columns, 1).astype(np.int32)


def copies_between(source: Places, to: Int32) -> Int32:
    """Copies i32 [C, 6] from places [n, 3] to blocks and slots [n, 2], as `ops.copy_rerotate`."""
    (block, slot, delta), (into, at) = source.T, to.T
    first, last = _runs((block, delta, into), (slot, at))
    columns = block[first], slot[first], into[first], at[first], last - first + 1, delta[first]
    return np.stack(columns, 1).astype(np.int32)


def pages_at(
    pages: torch.Tensor, layer: int, heads: int, places: Places
) -> tuple[torch.Tensor, torch.Tensor]:
    """The page [n, G] and the slot [n, 1] of a layer's keys and values at places [n, 3]."""
    block, slot, _ = places.T
    page = (block + layer * heads)[:, None] + np.arange(heads, dtype=np.int32)
    sent = send(pages.device, page, slot[:, None].copy())
    at, of = (torch.as_tensor(table).long() for table in sent)
    return at, of


def _runs(
    same: tuple[Int32, ...], counting: tuple[Int32, ...]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and last of each run: some columns stay the same in it, and others count on."""
    count = len(same[0])
    breaks = np.ones(count, bool)
    for steps, columns in ((0, same), (1, counting)):
        for column in columns:
            breaks[1:] &= column[1:] == column[:-1] + steps
    breaks[1:] = ~breaks[1:]
    first = np.flatnonzero(breaks)
    return first, np.append(first[1:], count)[: len(first)] - 1

"""Sets of rows as sorted i32 arrays: unions, neighbourhoods, the highest scores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave.plan import Rows


def union(*sets: Rows) -> Rows:
    """The union of some sets of rows, each of them sorted."""
    # A stable sort merges sorted runs; np.unique would hash them first, which takes longer.
    rows = np.sort(np.concatenate(sets), kind="stable")
    new = np.ones(len(rows), bool)
    np.not_equal(rows[1:], rows[:-1], out=new[1:])
    merged: Rows = rows[new].astype(np.int32, copy=False)
    return merged


def intervals(rows: Rows) -> list[tuple[int, int]]:
    """The maximal runs of consecutive rows, half-open."""
    if len(rows) == 0:
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = rows[np.concatenate(([0], breaks))]
    ends = rows[np.concatenate((breaks - 1, [len(rows) - 1]))] + 1
    return [(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]


def overflow(edges: list[tuple[int, int]], reused: Rows, tokens: int) -> Rows:
    """The reused rows within `tokens` of some half-open intervals, on both sides.

    An empty interval (a, a) stands for a bare edge: it has neighbours, but no inside.
    """
    spans = [np.searchsorted(reused, (start - tokens, end + tokens)) for start, end in edges]
    return union(np.zeros(0, np.int32), *(reused[first:last] for first, last in spans))


def scores_of(scores: torch.Tensor, index: npt.NDArray[np.integer]) -> torch.Tensor:
    """The scores at some indices, left where they are."""
    chosen = torch.from_numpy(index.astype(np.int64, copy=False))
    return scores.index_select(0, chosen.to(scores.device, non_blocking=True))


def highest(scores: torch.Tensor, rows: Rows, count: int) -> Rows:
    """The `count` rows of highest score, sorted by position; scores f32 [len(rows)].

    A score that is not a number counts as lowest, and equal scores go to the earlier row, so the
    same input gives the same plan. The choice is made where the scores are; only the chosen
    indices come to the host, in one transfer.
    """
    if count <= 0 or len(rows) == 0:
        return np.zeros(0, np.int32)
    values = torch.nan_to_num(scores, nan=-torch.inf)
    order = torch.sort(values, descending=True, stable=True).indices[:count]
    chosen: Rows = rows[np.sort(order.cpu().numpy())].astype(np.int32)
    return chosen

"""Sets of rows as sorted i32 arrays: unions, neighbourhoods, the highest scores, the most mass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave.device_memory import sent
from kvweave.plan import PromptView, Rows

Floats = npt.NDArray[np.float32]

TAIL = 64
"""Rows that ask beside the fresh ones when the prompt ends in reused text, as in SparseX §3.2."""


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


def seams(prompt: PromptView) -> list[tuple[int, int]]:
    """The fresh intervals, and the bare edges (a, a) between two segments that touch.

    SparseX §3.3 names the fresh intervals alone. Where two segments touch there is no fresh text
    between them, yet the same seam between two contexts, so it counts as an empty interval.
    """
    pairs = zip(prompt.segments, prompt.segments[1:], strict=False)
    return intervals(prompt.fresh) + [(a[1], a[1]) for a, b in pairs if a[1] == b[0]]


def tail(prompt: PromptView, tokens: int) -> Rows:
    """The last tokens of the final reused segment, when nothing fresh stands behind it.

    The last prompt token is always computed (its logits are wanted), so it does not count.
    """
    if not prompt.segments or prompt.segments[-1][1] < prompt.tokens - 1:
        return np.zeros(0, np.int32)
    start, end = prompt.segments[-1]
    return np.arange(max(start, end - tokens), end, dtype=np.int32)


def question(prompt: PromptView) -> Rows:
    """The fresh rows behind the last segment: the last prompt token, with what stands before it."""
    behind = prompt.segments[-1][1] if prompt.segments else 0
    return prompt.fresh[np.searchsorted(prompt.fresh, behind) :]


def openings(prompt: PromptView, tokens: int) -> Rows:
    """The first tokens of every reused segment, but for settled ones."""
    firsts = [np.arange(a, min(b, a + tokens), dtype=np.int32) for a, b in prompt.segments]
    rows = union(np.zeros(0, np.int32), *firsts)
    return np.setdiff1d(rows, prompt.settled, assume_unique=True)


def index_at(device: torch.device, index: npt.NDArray[np.integer]) -> torch.Tensor:
    """Indices for `index_select` on a device."""
    return sent(index.astype(np.int64, copy=False), device)


def scores_of(scores: torch.Tensor, index: npt.NDArray[np.integer]) -> torch.Tensor:
    """The scores at some indices, left where they are."""
    return scores.index_select(0, index_at(scores.device, index))


def averaged(scores: torch.Tensor, near: int) -> torch.Tensor:
    """Each score as the mean over the `near` tokens around it, fewer at the ends; f32 [T].

    `near` is odd. What is not finite counts as 0, so that it does not spread.
    """
    if near == 1:
        return scores
    finite = torch.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0)
    around = torch.nn.functional.avg_pool1d(
        finite[None, None], near, 1, near // 2, count_include_pad=False
    )
    return around[0, 0]


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


def heaviest(
    mass: torch.Tensor, rows: Rows, share: float, at_most: int, beside: torch.Tensor
) -> tuple[Rows, Floats]:
    """The fewest rows that hold a share of the rows' mass, sorted, and `beside` on the host.

    mass f32 [len(rows)], beside f32 of any length. Never more than `at_most` rows; these are all
    taken when the share is 1, or when there is no mass to go by. What is not finite weighs nothing,
    and equal masses go to the earlier row. Rows are ranked where the masses are; the candidates
    come to the host in one transfer, and are summed there in order: on a GPU cumulative sums may
    differ from run to run.
    """
    count = min(at_most, len(rows))
    values = torch.nan_to_num(mass.float(), nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0)
    total = values.sum(dtype=torch.float64).reshape(1)
    ranked = torch.sort(values, descending=True, stable=True)
    parts = (total, ranked.values[:count], beside.float().to(values.device))
    order = ranked.indices[:count].to(torch.int32)
    host = torch.cat([*(part.view(torch.int32) for part in parts), order]).cpu().numpy()
    weight = float(host[:2].view(np.float64)[0])
    floats, first = host[2 : len(host) - count].view(np.float32), host[len(host) - count :]
    taken = count
    if share < 1.0 and weight > 0.0:
        held = np.cumsum(floats[:count], dtype=np.float64)
        taken = min(count, int(np.searchsorted(held, share * weight)) + 1)
    return rows[np.sort(first[:taken])].astype(np.int32, copy=False), floats[count:]

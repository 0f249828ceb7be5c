"""Bases of packed pages by torch on any device: of moments of keys, values and queries.

`kvweave.ops.Moments` makes the same on the host; tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

LOST = {0: 1.0, 2: 0.1188, 4: 0.01154, 8: 1.0e-4}
"""Of a normal number's square, the share that a code of so many bits loses."""
STEP = {2: 0.9957, 4: 0.3352, 8: 0.0308}
"""The step that loses it, in standard deviations (Max 1960, table II; of 8 bits our own)."""
TOGETHER = 4
"""Channels that have the same bits."""
FLOOR = 1e-2
"""Of the queries' mean square, what every direction has at least."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over keys and values f64 [2, N, …], and over the queries that read these [N, D, D]."""

    tokens: int
    sums: torch.Tensor
    products: torch.Tensor
    rows: int
    queries: torch.Tensor

    @staticmethod
    def of(kv: torch.Tensor, queries: torch.Tensor, rows: int) -> Moments:
        """Of keys and values [2, N, T, D] and Σ q qᵀ over `rows` of queries of each page."""
        wide = kv.double()
        return Moments(kv.shape[2], wide.sum(2), wide.mT @ wide, rows, queries.double())

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.tokens + other.tokens,
            self.sums + other.sums,
            self.products + other.products,
            self.rows + other.rows,
            self.queries + other.queries,
        )

    def mean(self) -> torch.Tensor:
        """[2, N, D]."""
        return self.sums / self.tokens

    def spread(self, *, centred: bool = True) -> torch.Tensor:
        """Covariances [2, N, D, D], or second moments."""
        mean = self.mean() * centred
        return self.products / self.tokens - mean[..., :, None] * mean[..., None, :]


def descending(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues [..., D] of symmetric matrices and their eigenvectors as rows, largest first."""
    # On the host, as many small matrices are slow on a device.
    values, vectors = torch.linalg.eigh(matrices.cpu())
    values, vectors = values.to(matrices.device), vectors.to(matrices.device)
    return values.flip(-1).clamp_min(0.0), vectors.mT.flip(-2)


@lru_cache(maxsize=4)
def rotated(moments: Moments, *, centred: bool = True) -> torch.Tensor:
    """Bases of top-r pages [2, N, D + 1, D]: the mean and the directions of most spread."""
    mean = moments.mean() * centred
    directions = descending(moments.spread(centred=centred))[1]
    return torch.cat((mean[..., None, :], directions), -2).float()


def in_planes(moments: Moments, token_bytes: int, *, weighted: bool = True) -> torch.Tensor:
    """Bases of planes [2, N, 2D + 2, D] whose codes have `token_bytes` a token's key and value.

    An error e of a key moves scores by q·e, so keys are decorrelated, and their bits shared out, in
    the metric E[q qᵀ]. What that costs the output is E[(q·e)²] / D times the spread of values; an
    error of a value costs its own square. So one budget is for both.
    """
    sides = _sides(moments, weighted)
    count, dim = sides[0][0].shape
    total = [values.sum(-1, keepdim=True) for values, *_ in sides]
    factors = (total[1] / dim, 1.0) if weighted else [1 / some.clamp_min(1e-300) for some in total]
    weights = [values * factor for (values, *_), factor in zip(sides, factors, strict=True)]
    bits = bits_of(*(some.cpu().numpy() for some in weights), token_bytes)
    bases = torch.zeros(2, count, 2 * dim + 2, dim, dtype=torch.float64, device=moments.sums.device)
    bases[:, :, 0] = moments.mean()
    for side, (values, measures, directions) in enumerate(sides):
        of = torch.from_numpy(bits[side]).to(bases.device)
        unit = torch.zeros(9, dtype=torch.float64, device=moments.sums.device)
        unit[list(STEP)] = torch.tensor(
            list(STEP.values()), dtype=torch.float64, device=unit.device
        )
        step = unit[of] * values.sqrt()
        bases[side, :, 1] = of
        bases[side, :, 2 : dim + 2] = directions * step[..., None]
        inverse = torch.where(step > 0, 1 / step.clamp_min(1e-300), 0.0)
        bases[side, :, dim + 2 :] = measures * inverse[..., None]
    return bases.float()


@lru_cache(maxsize=4)
def _sides(moments: Moments, weighted: bool) -> list[tuple[torch.Tensor, ...]]:
    """Of keys and of values: the spread along each direction [N, D], what measures it and what it
    adds to a vector [N, D, D]."""
    spread = moments.spread()
    metric, back = _roots(moments) if weighted else _no_metric(spread[0])
    sides = []
    for part, forth, undo in (
        (metric @ spread[0] @ metric, metric, back),
        (spread[1], *_no_metric(spread[1])),
    ):
        values, rows = descending(part)
        sides.append((values, rows @ forth, rows @ undo))
    return sides


def _roots(moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    """The root of E[q qᵀ], kept away from 0, and its inverse."""
    queries = moments.queries / moments.rows
    size = torch.diagonal(queries, dim1=-2, dim2=-1).mean(-1)
    queries = queries + FLOOR * torch.diag_embed(size[:, None].expand(queries.shape[:2]))
    values, vectors = descending(queries)
    root = values.sqrt()
    return (
        vectors.mT @ (root[..., None] * vectors),
        vectors.mT @ (vectors / root[..., None]),
    )


def _no_metric(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)
    return one, one


@lru_cache(maxsize=4)
def _shares(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """All ways to share out bits: groups that have 8, 4 and 2 [M, 3], and the bytes of each way."""
    most = dim // TOGETHER
    ways = [(a, b, c) for a in range(most + 1) for b in range(most + 1 - a)
            for c in range(most + 1 - a - b)]  # fmt: skip
    shares = np.array(ways)
    return shares, shares @ np.array([8, 4, 2]) * TOGETHER // 8


def bits_of(keys: np.ndarray, values: np.ndarray, token_bytes: int) -> np.ndarray:
    """Bits of each channel i64 [2, N, D] that lose least of weights [N, D], the largest first."""
    shares, sizes = _shares(keys.shape[1])
    shares, sizes = shares[sizes <= token_bytes], sizes[sizes <= token_bytes]
    order = np.argsort(sizes, kind="stable")
    shares, sizes = shares[order], sizes[order]
    starts = np.searchsorted(sizes, np.arange(token_bytes + 1))
    bits = np.zeros((2, *keys.shape), np.int64)
    for page in range(len(keys)):
        best = [_best(weights[page], shares, starts) for weights in (keys, values)]
        (cost_k, share_k), (cost_v, share_v) = best
        of_keys = int(np.argmin(cost_k + cost_v[::-1]))
        for side, share in enumerate((share_k[of_keys], share_v[token_bytes - of_keys])):
            left = keys.shape[1] // TOGETHER - share.sum()
            bits[side, page] = np.repeat([8, 4, 2, 0], TOGETHER * np.append(share, left))
    return bits


def _best(
    weights: np.ndarray, shares: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each number of bytes the least loss within it, and the share of bits that has it."""
    sums = np.concatenate(([0.0], np.cumsum(weights)))
    ends = TOGETHER * np.cumsum(shares, 1)
    first, second, third = (sums[end] for end in ends.T)
    cost = (LOST[8] * first + LOST[4] * (second - first) + LOST[2] * (third - second)
            + sums[-1] - third)  # fmt: skip
    least, at = np.inf, 0
    costs, chosen = np.empty(len(starts)), np.empty((len(starts), 3), np.int64)
    ends_of = np.append(starts[1:], len(shares))
    for size, (start, end) in enumerate(zip(starts, ends_of, strict=True)):
        if end > start:
            here = start + int(np.argmin(cost[start:end]))
            if cost[here] < least:
                least, at = cost[here], here
        costs[size], chosen[size] = least, shares[at]
    return costs, chosen

"""Whether the pages a head finds important stay the same from row to row (FlexiCache, §2.2)."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvweave.lab.profile.scores import Scores
from kvweave.plan import Rows

STEPS = 16
"""Consecutive rows compared: FlexiCache ranks a stable head's pages every 16 steps."""

SHARE = 8
"""One page in so many is important."""


def page_overlap(
    q: torch.Tensor,
    rows: Rows,
    keys: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    page_tokens: int,
) -> Scores:
    """How much of the most attended pages two rows share, beyond chance: f64 [G], from 0 to 1.

    q [W, H, D] are consecutive rows (i32 [W]), keys [T, G, D] all keys up to the last one, both
    rotated. A page's weight is its softmax mass summed over the KV head's query heads; K of the N
    pages are important, K = N/8. The mean over all pairs of rows of max(0, (o − K/N) / (1 − K/N)),
    o being the share of K that both have: FlexiCache's random-corrected overlap.
    """
    tokens, kv_heads, dim = keys.shape
    grouped = q.float().view(len(q), kv_heads, -1, dim)
    score = torch.einsum("wghd,tgd->wght", grouped, keys.float()) * scale
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    back = torch.from_numpy(rows).to(q.device)[:, None] - torch.arange(tokens, device=q.device)
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    mass = score.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).sum(2)
    pages = -(-tokens // page_tokens)
    padded = torch.nn.functional.pad(mass, (0, pages * page_tokens - tokens))
    weight = padded.view(len(q), kv_heads, pages, page_tokens).sum(-1)
    count = max(1, pages // SHARE)
    chosen = torch.zeros_like(weight).scatter(-1, weight.topk(count).indices, 1.0)
    both = torch.einsum("wgn,vgn->gwv", chosen, chosen).cpu().double().numpy() / count
    one, other = np.triu_indices(len(q), 1)
    chance = count / pages
    if not len(one) or math.isclose(chance, 1.0):
        return np.zeros(kv_heads)
    pairs = (both[:, one, other] - chance) / (1.0 - chance)
    return np.asarray(np.maximum(pairs, 0.0).mean(-1), np.float64)

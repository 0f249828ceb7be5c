"""Pages a KV head chooses by their bounds, and how alike two choices are (FlexiCache, §2.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave.lab.profile.scores import Scores
from kvweave.plan import Rows

Chosen = npt.NDArray[np.bool_]


def chosen_pages(
    q: torch.Tensor,
    rows: Rows,
    keys: torch.Tensor,
    *,
    window: int | None,
    page_tokens: int,
    budget: int,
) -> Chosen:
    """The pages that each row would read, bool [R, G, N]: at most `budget` of those it sees.

    q [R, H, D] of rows (i32 [R]), keys [T, G, D] of all tokens, both rotated. A page's score is the
    most that a key within its bounds could score, `Σ max(q · min, q · max)` (section 3.2), the
    highest of the KV head's query heads; of equal scores the earlier page is chosen. The bounds of
    the page that a row lies in are those of its keys up to the row.
    """
    tokens, kv_heads, dim = keys.shape
    pages = -(-tokens // page_tokens)
    grouped = q.float().view(len(q), kv_heads, -1, dim)
    spare = pages * page_tokens - tokens
    paged = [
        torch.nn.functional.pad(keys.float(), (0, 0, 0, 0, 0, spare), value=fill)
        .view(pages, page_tokens, kv_heads, dim)
        .permute(2, 0, 1, 3)
        for fill in (torch.inf, -torch.inf)
    ]
    least, most = paged[0].amin(2), paged[1].amax(2)
    chosen = np.zeros((len(q), kv_heads, pages), bool)
    for number, row in enumerate(rows.tolist()):
        last = row // page_tokens
        so_far = keys[last * page_tokens : row + 1].float()
        first = 0 if window is None else max(0, row + 1 - window) // page_tokens
        low, high = least[:, first : last + 1].clone(), most[:, first : last + 1].clone()
        low[:, -1], high[:, -1] = so_far.amin(0), so_far.amax(0)
        of_row = grouped[number][:, :, None]
        score = torch.maximum(of_row * low[:, None], of_row * high[:, None]).sum(-1).amax(1)
        order = score.argsort(dim=1, descending=True, stable=True)[:, :budget].cpu().numpy()
        np.put_along_axis(chosen[number], first + order, True, axis=1)
    return chosen


def overlap(chosen: Chosen, pages: npt.NDArray[np.int64], budget: int, window: int) -> Scores:
    """Random-corrected overlap of each row's choice with those of the rows behind: f64 [S, G, W].

    chosen bool [R, G, N] of consecutive rows, of which each sees `pages` i64 [R]. Of each of the
    S = R - W rows that have `window` W rows behind them, with each of these:
    `max(0, (o - K/N) / (1 - K/N))`, o being the share of K pages that both have and N what the
    later row sees. 0 is what chance gives, 1 the same pages; where a row sees no more than K, 1.
    """
    starts = len(chosen) - window
    found = np.ones((starts, chosen.shape[1], window))
    for after in range(1, window + 1):
        both = (chosen[:starts] & chosen[after : after + starts]).sum(-1) / budget
        chance = (budget / pages[after : after + starts].astype(np.float64))[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            above = np.maximum(0.0, (both - chance) / (1.0 - chance))
        found[:, :, after - 1] = np.where(chance < 1.0, above, 1.0)
    return found

"""How many pages the heads of a group read in a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from kvweave.cache import KvCache


@dataclass(frozen=True)
class PageBudget:
    """What the heads of a top-K group read.

    `group`: its number. `pages` are read by each head in a decode step, ranked anew `every` so many
    steps by the `score` that `ops.BoundedPages` has by that name. `heads`: how many the group has
    in all layers. `estimate`: the means of other pages enter attention as one term each. `fp8`:
    bounds are kept in e4m3.
    """

    group: int
    pages: int
    every: int
    heads: int
    score: Literal["min-max", "mean"] = "min-max"
    estimate: bool = False
    fp8: bool = False


def budgets_of(cache: KvCache, *, fp8: bool = False) -> list[PageBudget]:
    """Those of the groups of a cache whose heads choose pages."""
    return [
        PageBudget(
            number,
            group.read,
            group.rerank_every,
            group.pages,
            cast(Literal["min-max", "mean"], group.score),
            group.estimate,
            fp8,
        )
        for number, group in enumerate(cache.groups)
        if group.kind == "top_k"
    ]

"""Pages and the bounds of their keys, by which decode steps choose among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvweave._native import Reach, RopeTable


@dataclass(frozen=True)
class BoundedPages:
    """Bounds of pages, and how rows of one layer score them: the same for all calls.

    `bounds` f32 [pages, 3, D], contiguous: least, greatest and mean key of each page, as
    `PageBounds` has them. On CUDA "min-max" also takes [pages, 2, D] of the dtype of queries of 16
    bits, least and greatest key alone: of keys of that dtype they are exact. With `scales` uint8
    [pages] they are float8_e4m3fn, rounded as `PageBounds` says, of what `score` is made of alone:
    [pages, 2, D] for "min-max", [pages, 1, D] for "mean". The row of an entry and KV head g is its
    block + `layer` · G + g or, with a `reach`, its block + the head's rank. Pages have
    `page_tokens` slots. `scale`, `rope` and `softcap` as in `PagedKv`; an entry with delta ≠ 0 is
    scored by the query turned back by delta.

    `score`: "min-max" is Σ_d max(q_d · min_d, q_d · max_d), which no key of the page scores above
    (FlexiCache, section 3.2, after Quest); "mean" is what the mean key scores (MosaicKV, section
    5.1). `shared`: of the query heads of a KV head the "highest" score counts, or their "sum".
    """

    bounds: torch.Tensor
    page_tokens: int
    layer: int
    kv_heads: int
    scale: float
    rope: RopeTable
    softcap: float | None = None
    reach: Reach | None = None
    score: Literal["min-max", "mean"] = "min-max"
    shared: Literal["highest", "sum"] = "highest"
    scales: torch.Tensor | None = None

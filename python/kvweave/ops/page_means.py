"""The means of pages, which stand for the tokens of those that a decode step does not read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave._native import Reach, RopeTable
from kvweave.ops.dispatch import Table


@dataclass(frozen=True)
class PageMeans:
    """Mean keys and values of pages, and how rows of one layer attend to them.

    `means` [pages, 2, D], contiguous: the mean key of each page's tokens, as keys are stored, then
    their mean value. On the host f32; on CUDA the dtype of queries, and they begin on a boundary of
    16 bytes. The row of an entry and KV head g is its block + `layer` · G + g or, with a `reach`,
    its block + the head's rank. Pages have `page_tokens` slots. `scale`, `rope` and `softcap` as in
    `PagedKv`; an entry with delta ≠ 0 is met by the query turned back by delta.
    """

    means: torch.Tensor
    page_tokens: int
    layer: int
    kv_heads: int
    scale: float
    rope: RopeTable
    softcap: float | None = None
    reach: Reach | None = None


@dataclass(frozen=True)
class ReadEntries:
    """What heads have read already, by entries i32 [M, 5] of which only the positions count.

    `offsets` i32 [B + 1], or [B · tables + 1] with a `reach`, of which only the tables count: what
    `attend_decode` was called with.
    """

    entries: Table
    offsets: Table
    reach: Reach | None = None

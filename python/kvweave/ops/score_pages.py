"""Scores of pages by their bounds."""

from __future__ import annotations

import numpy as np
import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.bounded_pages import BoundedPages
from kvweave.ops.dispatch import (
    Backend,
    Table,
    counted,
    cuda_device,
    expect_tensors,
    invalid,
    numbers_of,
    on_device,
    stream_of,
)


@needs_memory("score_pages")
def score_pages(
    q: torch.Tensor,
    entries: Table,
    pages: BoundedPages,
    *,
    entry_offsets: Table,
    width: int | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the pages that each of B requests lists, for one row of each.

    q [B, H, D] f32, bf16 or f16, entry_offsets i32 [B + 1], or [B · tables + 1] with a `reach`.
    Returns scores f32 [B, G, S] and counts i32 [B, G]: entry i of a head's table has its score at
    i, and what lies behind the count is −∞. S is `width` or else the most entries of a table that
    a head reads; it has to be said where offsets lie on a CUDA device, as nothing waits to look
    there. The bounds of an entry that lists a part of a page are those of the whole of it. A NaN
    in the query or in a bound makes the score NaN.

    On CUDA bounds begin on a boundary of 16 bytes. In tables there, entries whose page has no
    bounds score −∞, and those beyond S do not count.
    """
    expect_tensors(q=q)
    if not isinstance(pages, BoundedPages):
        raise invalid("pages", "a BoundedPages", type(pages).__name__)
    expect_tensors(bounds=pages.bounds)
    device = cuda_device("q", q, backend)
    heads = (q.shape[0] if q.ndim else 0, counted("kv_heads", pages.kv_heads))
    widest = widest_table(entry_offsets, pages) if width is None else counted("width", width)
    counts = q.new_empty(heads, dtype=torch.int32)
    if device is None:
        scores = q.new_full((*heads, widest), -torch.inf, dtype=torch.float32)
        reference = backend == "reference"
        _native.score_pages(q, entries, pages, entry_offsets, (scores, counts), reference)
        return scores, counts
    scores = q.new_empty((*heads, widest), dtype=torch.float32)
    tables = on_device(device, entries=entries, entry_offsets=entry_offsets)
    listed, spans = tables["entries"], tables["entry_offsets"]
    _native.score_pages_cuda(q, listed, pages, spans, (scores, counts), stream_of(device))
    return scores, counts


def widest_table(offsets: Table, pages: BoundedPages) -> int:
    """The most entries of a table that is read; what lies between tables does not count."""
    if isinstance(offsets, torch.Tensor) and offsets.is_cuda:
        raise invalid("width", "the most entries of a table, as offsets lie on cuda", "None")
    reach = pages.reach
    ends = numbers_of("entry_offsets", offsets)
    tables = 1 if reach is None else reach.tables
    sizes = np.diff(ends)[: len(ends) // tables * tables]
    if len(sizes) % tables:
        return 0
    read = [0] if reach is None else np.unique(reach.heads[:, 0])
    return max(0, int(sizes.reshape(-1, tables)[:, read].max(initial=0)))

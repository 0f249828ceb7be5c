"""Which pages a decode step reads: scored by their bounds, the best selected, and listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvweave import _native
from kvweave._native import Reach, RopeTable
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import (
    Backend,
    Table,
    cuda_device,
    expect_tensors,
    invalid,
    on_device,
    stream_of,
)


@dataclass(frozen=True)
class BoundedPages:
    """Bounds of pages, and how rows of one layer score them: the same for all calls.

    `bounds` f32 [pages, 3, D], contiguous: least, greatest and mean key of each page, as
    `PageBounds` has them. On CUDA "min-max" also takes [pages, 2, D] of the dtype of queries of 16
    bits, least and greatest key alone: of keys of that dtype they are exact. The row of an entry
    and KV head g is its block + `layer` · G + g or, with a `reach`, its block + the head's rank.
    Pages have `page_tokens` slots. `scale`, `rope` and `softcap` as in `PagedKv`; an entry with
    delta ≠ 0 is scored by the query turned back by delta.

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
    heads = (q.shape[0] if q.ndim else 0, _counted("kv_heads", pages.kv_heads))
    widest = _widest(entry_offsets, pages) if width is None else _counted("width", width)
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


@needs_memory("select_pages")
def select_pages(
    scores: torch.Tensor,
    counts: Table,
    budgets: Table,
    *,
    sink: int = 0,
    recent: int = 0,
    most: int | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the pages that each row lists, those that a decode step reads.

    scores f32 [R, S], of which the first counts i32 [R] are a row's; budgets i32 [R]: how many it
    selects at most, from `sink` + `recent` on. The first `sink` and the last `recent` are always
    selected, then the best by score (FlexiCache, section 3.2, after Quest). A higher score goes
    first, of equal ones the lower index, and NaN before all, so that a page with NaN keys is read
    and not passed over in silence. A row's answer depends on that row alone. A row with no more
    pages than its budget selects all.

    Returns pages i32 [R, K], ascending with −1 behind them, K being `most` or else the largest
    budget, and selected i32 [R]: how many. K has to be said where budgets lie on a CUDA device, as
    nothing waits to look there. In tables there, a count beyond S is S, and pages that K leaves no
    room for are left out.
    """
    expect_tensors(scores=scores)
    device = cuda_device("scores", scores, backend)
    widest = _largest(budgets) if most is None else _counted("most", most)
    rows = scores.shape[:1] if scores.ndim else (0,)
    pages = scores.new_empty((*rows, widest), dtype=torch.int32)
    selected = scores.new_empty(rows, dtype=torch.int32)
    always, results = (sink, recent), (pages, selected)
    if device is None:
        _native.select_pages(scores, counts, budgets, always, results, backend == "reference")
        return pages, selected
    tables = on_device(device, counts=counts, budgets=budgets)
    listed, limits = tables["counts"], tables["budgets"]
    _native.select_pages_cuda(scores, listed, limits, always, results, stream_of(device))
    return pages, selected


@needs_memory("gather_entries")
def gather_entries(
    pages: torch.Tensor,
    selected: torch.Tensor,
    entries: Table,
    *,
    entry_offsets: Table,
    reach: Reach | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that B requests selected for each of G heads, as entry tables of their own.

    pages i32 [B, G, K] and selected i32 [B, G] are `select_pages`' results: indices in the tables
    that `entries`, `entry_offsets` and `reach` say as for `score_pages`. Returns entries i32
    [B · G · K, 5] and offsets i32 [2 · B · G + 1] by which `attend_decode` reads what is selected.
    Each request has two tables a head: its entries, and the room behind them, which no head reads.
    A head's row of that `Reach` is (2 · head, its page in a block, 0, 0), of 2 · G tables.

    Nothing is waited for on CUDA: so a step can score, select, gather and attend in one captured
    graph. There an index outside its table is no entry.
    """
    expect_tensors(pages=pages, selected=selected)
    device = cuda_device("pages", pages, backend)
    rows, most = (pages.shape[:2].numel(), pages.shape[2]) if pages.ndim == 3 else (0, 0)
    gathered = pages.new_empty((rows * most, 5), dtype=torch.int32)
    offsets = pages.new_empty(2 * rows + 1, dtype=torch.int32)
    chosen, results = (pages, selected), (gathered, offsets)
    if device is None:
        # Each entry is copied once: the definition is as fast as any.
        _native.gather_entries(chosen, entries, entry_offsets, reach, results)
        return gathered, offsets
    if not rows:
        offsets.zero_()
    tables = on_device(device, entries=entries, entry_offsets=entry_offsets)
    listed, spans = tables["entries"], tables["entry_offsets"]
    _native.gather_entries_cuda(chosen, listed, spans, reach, results, stream_of(device))
    return gathered, offsets


def _counted(what: str, number: Any) -> int:
    if not isinstance(number, int | np.integer) or not 0 <= number < 2**31:
        raise invalid(what, "a number from 0 to 2^31 − 1", repr(number)[:40])
    return int(number)


def _list(what: str, table: Any) -> npt.NDArray[np.int64]:
    """The numbers of a table, whatever the op itself will say of it."""
    if not isinstance(table, np.ndarray | torch.Tensor):
        raise invalid(what, "a tensor", f"an object of type {type(table).__name__}")
    return np.asarray(table).reshape(-1).astype(np.int64)


def _largest(budgets: Table) -> int:
    """The largest budget; no less than 0, whatever the op itself will say of it."""
    if isinstance(budgets, torch.Tensor) and budgets.is_cuda:
        raise invalid("most", "the largest budget, as budgets lie on cuda", "None")
    return max(0, int(_list("budgets", budgets).max(initial=0)))


def _widest(offsets: Table, pages: BoundedPages) -> int:
    """The most entries of a table that is read; what lies between tables does not count."""
    if isinstance(offsets, torch.Tensor) and offsets.is_cuda:
        raise invalid("width", "the most entries of a table, as offsets lie on cuda", "None")
    reach = pages.reach
    ends = _list("entry_offsets", offsets)
    tables = 1 if reach is None else reach.tables
    sizes = np.diff(ends)[: len(ends) // tables * tables]
    if len(sizes) % tables:
        return 0
    read = [0] if reach is None else np.unique(reach.heads[:, 0])
    return max(0, int(sizes.reshape(-1, tables)[:, read].max(initial=0)))

"""Entry tables of the pages that were selected."""

from __future__ import annotations

import torch

from kvweave import _native
from kvweave._native import Reach
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Backend, Table, cuda_device, expect_tensors, on_device, stream_of


@needs_memory("gather_entries")
def gather_entries(
    pages: torch.Tensor,
    selected: torch.Tensor,
    entries: Table,
    *,
    entry_offsets: Table,
    reach: Reach | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that B requests selected for each of G heads, as entry tables of their own.

    pages i32 [B, G, K] and selected i32 [B, G] are `select_pages`' results: indices in the tables
    that `entries`, `entry_offsets` and `reach` say as for `score_pages`. Returns entries i32
    [B · G · K, 5] and offsets i32 [2 · B · G + 1] by which `attend_decode` reads what is selected.
    Each request has two tables a head: its entries, and the room behind them, which no head reads.
    A head's row of that `Reach` is (2 · head, its page in a block, 0, 0), of 2 · G tables. The
    entries go to `out`, if it is given: offsets count from its first row.

    Nothing is waited for on CUDA: so a step can score, select, gather and attend in one captured
    graph. There an index outside its table is no entry.
    """
    expect_tensors(pages=pages, selected=selected, **({} if out is None else {"out": out}))
    device = cuda_device("pages", pages, backend)
    rows, most = (pages.shape[:2].numel(), pages.shape[2]) if pages.ndim == 3 else (0, 0)
    gathered = pages.new_empty((rows * most, 5), dtype=torch.int32) if out is None else out
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

"""Entry tables of the pages that were selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave import _native
from kvweave._native import Reach
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Backend, Table, cuda_device, expect_tensors, on_device, stream_of


@dataclass(frozen=True)
class KeptPages:
    """What requests selected before, where some of them go on with that.

    `pages` i32 [N, G, K], −1 behind what was selected; `rows` i32 [B]: whose each request's are;
    `again` bool [B]: requests that go on with them. The others leave there what they selected;
    where several have one row that is any one's.
    """

    pages: torch.Tensor
    rows: torch.Tensor
    again: torch.Tensor

    def taken(
        self, pages: torch.Tensor, selected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages and how many that count, everything being kept."""
        rows, again = self.rows.long(), self.again[:, None, None]
        numbers = torch.arange(pages.shape[2], dtype=torch.int32, device=pages.device)
        own = torch.where(numbers < selected[..., None], pages, -1)
        pages = torch.where(again, self.pages.index_select(0, rows), own)
        self.pages.index_copy_(0, rows, pages)
        return pages, (pages >= 0).sum(-1, dtype=torch.int32)


@needs_memory("gather_entries")
def gather_entries(
    pages: torch.Tensor,
    selected: torch.Tensor,
    entries: Table,
    *,
    entry_offsets: Table,
    reach: Reach | None = None,
    out: torch.Tensor | None = None,
    kept: KeptPages | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that B requests selected for each of G heads, as entry tables of their own.

    pages i32 [B, G, K] and selected i32 [B, G] are `select_pages`' results: indices in the tables
    that `entries`, `entry_offsets` and `reach` say as for `score_pages`. Returns entries i32
    [B · G · K, 5] and offsets i32 [2 · B · G + 1] by which `attend_decode` reads what is selected.
    Each request has two tables a head: its entries, and the room behind them, which no head reads.
    A head's row of that `Reach` is (2 · head, its page in a block, 0, 0), of 2 · G tables. The
    entries go to `out`, if it is given: offsets count from its first row. Requests that `kept` says
    so of have their entries of what they selected before, in place of what they have now.

    Nothing is waited for on CUDA: so a step can score, select, gather and attend in one captured
    graph. There an index outside its table is no entry, and nothing is kept of a row that is none.
    """
    expect_tensors(pages=pages, selected=selected, **({} if out is None else {"out": out}))
    device = cuda_device("pages", pages, backend)
    rows, most = (pages.shape[:2].numel(), pages.shape[2]) if pages.ndim == 3 else (0, 0)
    gathered = pages.new_empty((rows * most, 5), dtype=torch.int32) if out is None else out
    offsets = pages.new_empty(2 * rows + 1, dtype=torch.int32)
    results = (gathered, offsets)
    if device is None:
        chosen = (pages, selected) if kept is None else kept.taken(pages, selected)
        # Each entry is copied once: the definition is as fast as any.
        _native.gather_entries(chosen, entries, entry_offsets, reach, results)
        return gathered, offsets
    if not rows:
        offsets.zero_()
    tables = on_device(device, entries=entries, entry_offsets=entry_offsets)
    held = None if kept is None else (kept.pages, kept.rows, kept.again.view(torch.uint8))
    _native.gather_entries_cuda(
        (pages, selected),
        (tables["entries"], tables["entry_offsets"]),
        reach,
        results,
        held,
        stream_of(device),
    )
    return gathered, offsets

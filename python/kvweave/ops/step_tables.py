"""An engine's description of a batch as tables of the other ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Backend, cuda_device, stream_of


class StepTables(NamedTuple):
    """Tables of a step of B requests and R rows, all i32 and contiguous, on one device.

    positions [R]. slots [R, 2] (block, slot), or [tables, R, 2] where requests have tables through
    `places`. entries [N, 5] (block, begin, end, position, delta), of which those below
    `offsets[-1]` count. offsets [B · tables + 1].
    """

    positions: torch.Tensor
    slots: torch.Tensor
    entries: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    @needs_memory("StepTables.empty")
    def empty(
        cls, device: torch.device, *, requests: int, rows: int, entries: int, tables: int | None
    ) -> StepTables:
        """Room for so many, with any numbers; `tables` of a request, None where there is one."""
        of_rows = (rows, 2) if tables is None else (tables, rows, 2)
        ends = requests * (tables or 1) + 1
        shapes = ((rows,), of_rows, (entries, 5), (ends,))
        return cls(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))


def step_tables(
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    page_tokens: int,
    spans: Sequence[tuple[int, int, int]],
    block_pages: int = 1,
    places: torch.Tensor | None = None,
    out: StepTables,
    backend: Backend = None,
) -> StepTables:
    """Positions, slots and entries of a step, from what vLLM's scheduler says of its batch.

    Of B requests, R rows and pages of P = `page_tokens`: `blocks` i32 [B, M] are the numbers of
    each request's pages (`block_table`, rows may be strided), `lengths` i32 [B] its tokens, the
    step's rows among them (`seq_lens`), `query_start` i32 [B + 1] where its rows begin
    (`query_start_loc`), `slot_mapping` i64 [R] the page · P + slot of each row.

    A page b is our block b · `block_pages`, which is how many pages of ours it holds; or, with
    `places` i32 [tables, V], the block `places[t, b]` in a request's table t. What is nowhere, as
    `places` say with 0 or by having no such page, is block 0 in an entry and block −1 in a slot.
    So is a row whose slot is below 0, which pads a batch. Rows behind the last request's pad it
    too, and get its following positions.

    `spans` say, a (window, sink, columns) a table, what its entries list: the pages of the first
    `sink` keys and those from the window of a request's first row on (window 0: all), at most
    `columns` of them. Without `places` there is one span.

    Results go to `out`, whose entries have room for B · Σ columns; it is returned. Entries beyond
    the last offset stay as they were. On CUDA this is one launch that waits for nothing, allocates
    nothing and may be captured. All tensors lie on one device, and what they hold is looked at on a
    host only: there, `query_start` must ascend from 0 to at most R.
    """
    device = cuda_device("blocks", blocks, backend)
    batch = (blocks, lengths, query_start, slot_mapping, places)
    sizes = (page_tokens, block_pages)
    if device is None:
        # Whole numbers, each computed once: the definition is as fast as any.
        _native.step_tables(batch, out, sizes, spans)
    else:
        _native.step_tables_cuda(batch, out, sizes, spans, stream_of(device))
    return out

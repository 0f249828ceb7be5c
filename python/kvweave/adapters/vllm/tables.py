"""vLLM's block tables as tables of our ops, made where the tensors lie and without waiting.

B requests, M columns of a block table, P tokens a page, G KV heads. A block of vLLM holds the
pages of all G heads of one layer, one after another, so its block b is our pages from b·G on.
All results are i32 and contiguous. No size depends on what tensors hold: on a device nothing is
waited for, and the same calls may be captured in a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Entries(NamedTuple):
    """Entries [N, 5] and offsets [B + 1]; rows from `offsets[B]` on hold nothing of use."""

    rows: torch.Tensor
    offsets: torch.Tensor


class Span(NamedTuple):
    """What the rows of a layer see: the latest `window` keys (None: all) and the first `sink`."""

    window: int | None = None
    sink: int = 0

    def columns(self, page_tokens: int, longest: int, most_rows: int) -> int:
        """Most blocks that a request of up to `longest` tokens and `most_rows` new ones reads."""
        blocks = -(-longest // page_tokens)
        if self.window is None:
            return blocks
        # The window of the first row and the rows after it, which may start inside a block.
        seen = self.window + most_rows + page_tokens
        return min(blocks, -(-self.sink // page_tokens) + -(-seen // page_tokens))


def positions_of(query_start: torch.Tensor, lengths: torch.Tensor, rows: int) -> torch.Tensor:
    """Position of each row [rows]: the last row of a request stands at its length − 1.

    query_start [B + 1] and lengths [B] are vLLM's `query_start_loc` and `seq_lens`. Rows behind
    the last request, which pad a graph, get its following positions.
    """
    numbers = torch.arange(rows, dtype=torch.int32, device=lengths.device)
    ends = query_start[1:]
    request = torch.searchsorted(ends, numbers, right=True, out_int32=True)
    request = request.clamp_(max=len(lengths) - 1)
    position = numbers + lengths[request] - ends[request]
    return position.clamp_(min=0).to(torch.int32)


def slots_of(slot_mapping: torch.Tensor, page_tokens: int, heads: int) -> torch.Tensor:
    """(block, slot) [rows, 2] from vLLM's `slot_mapping` [rows]; −1, for padding, stays outside."""
    block = slot_mapping.div(page_tokens, rounding_mode="floor")
    slot = slot_mapping - block * page_tokens
    return torch.stack((block * heads, slot), dim=1).to(torch.int32)


def entries_of(
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor,
    *,
    page_tokens: int,
    heads: int,
    columns: int,
    span: Span,
) -> Entries:
    """Entries of the blocks that a request's rows see: N = B · `columns`.

    blocks [B, M] and lengths [B] are vLLM's block table and sequence lengths, `first` [B] the
    position of each request's first row, `columns` what `Span.columns` says.
    """
    number, listed = seen_blocks(
        lengths, first, page_tokens=page_tokens, columns=columns, span=span
    )
    table = blocks.gather(1, number.clamp(max=blocks.shape[1] - 1).long())
    return packed(number, listed, listed.sum(1), table * heads, lengths, page_tokens)


def seen_blocks(
    lengths: torch.Tensor, first: torch.Tensor, *, page_tokens: int, columns: int, span: Span
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks of a request its rows see: numbers in its table, and which of these count.

    Both [B, `columns`], numbers ascending; arguments as `entries_of` has them.
    """
    requests, device = len(lengths), lengths.device
    column = torch.arange(columns, dtype=torch.int32, device=device)
    sinks = 0 if span.window is None else min(columns, -(-span.sink // page_tokens))
    number = column.expand(requests, columns)
    if span.window is not None:
        lowest = (first - (span.window - 1)).clamp(min=0)
        lowest = lowest.div(page_tokens, rounding_mode="floor").clamp(min=sinks)
        number = torch.where(column < sinks, column, column - sinks + lowest[:, None])
    held = (lengths + (page_tokens - 1)).div(page_tokens, rounding_mode="floor")
    return number, number < held[:, None]


def packed(
    number: torch.Tensor,
    listed: torch.Tensor,
    counts: torch.Tensor,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    page_tokens: int,
) -> Entries:
    """Entries of the blocks that are listed, those of a request in the order of its columns.

    number, listed and blocks [B, C]; counts [n], how many are listed, table by table.
    """
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=number.device)
    torch.cumsum(counts.flatten(), 0, dtype=torch.int32, out=offsets[1:])
    # Each listed block goes behind those before it; the others meet in one row too many.
    place = listed.flatten().cumsum(0) - 1
    place = torch.where(listed.flatten(), place, listed.numel())
    position = number * page_tokens
    end = (lengths[:, None] - position).clamp(max=page_tokens)
    zero = torch.zeros_like(position)
    fields = (blocks, zero, end, position, zero)
    values = torch.stack([field.to(torch.int32) for field in fields], dim=2)
    rows = torch.zeros((listed.numel() + 1, 5), dtype=torch.int32, device=number.device)
    rows[place] = values.reshape(-1, 5)
    return Entries(rows[:-1], offsets)

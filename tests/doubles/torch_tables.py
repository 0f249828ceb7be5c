"""What `ops.step_tables` makes, by torch's tensor operations: computed without it, to compare with.

B requests, M columns of a block table, P tokens a page. Entries of a table fill places up to its
number of columns before they are packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvweave import ops

SpanRow = tuple[int, int, int]


def step_tables(
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    page_tokens: int,
    spans: Sequence[SpanRow],
    block_pages: int = 1,
    places: torch.Tensor | None = None,
) -> ops.StepTables:
    """As the op, but entries end with the last offset."""
    first = lengths - query_start.diff()
    numbers, listed = zip(
        *(seen_pages(lengths, first, page_tokens=page_tokens, span=span) for span in spans),
        strict=True,
    )
    counts = torch.stack([part.sum(1) for part in listed], dim=1)
    tables = torch.cat([torch.full_like(part, t) for t, part in enumerate(numbers)], dim=1)
    number, listed = torch.cat(numbers, dim=1), torch.cat(listed, dim=1)
    page = blocks.gather(1, number.clamp(max=blocks.shape[1] - 1).long())
    block = page * block_pages if places is None else places[tables.long(), page.long()]
    end = (lengths[:, None] - number * page_tokens).clamp(max=page_tokens)
    zero = torch.zeros_like(number)
    fields = (block, zero, end, number * page_tokens, zero)
    entries = torch.stack([field.int() for field in fields], dim=2)[listed]
    offsets = torch.cat((torch.zeros(1), counts.flatten().cumsum(0))).int()
    positions = positions_of(query_start, lengths, len(slot_mapping))
    slots = slots_of(slot_mapping, page_tokens, block_pages, places)
    return ops.StepTables(positions, slots, entries, offsets)


def seen_pages(
    lengths: torch.Tensor, first: torch.Tensor, *, page_tokens: int, span: SpanRow
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which pages of a request its rows see: numbers in its table, and which of these count."""
    window, sink, columns = span
    column = torch.arange(columns, dtype=torch.int64)
    number = column.expand(len(lengths), columns)
    if window:
        sinks = -(-sink // page_tokens)
        lowest = (first.long() - (window - 1)).clamp(min=0)
        lowest = lowest.div(page_tokens, rounding_mode="floor").clamp(min=sinks)
        number = torch.where(column < sinks, column, column - sinks + lowest[:, None])
    held = (lengths.long() + page_tokens - 1).div(page_tokens, rounding_mode="floor")
    return number, number < held[:, None]


def positions_of(query_start: torch.Tensor, lengths: torch.Tensor, rows: int) -> torch.Tensor:
    """Position of each row [rows]: the last row of a request stands at its length − 1."""
    numbers = torch.arange(rows, dtype=torch.int32)
    ends = query_start[1:]
    request = torch.searchsorted(ends, numbers, right=True).clamp(max=len(lengths) - 1)
    return (numbers + lengths[request].long() - ends[request]).clamp(0, 2**31 - 1).int()


def slots_of(
    slot_mapping: torch.Tensor, page_tokens: int, block_pages: int, places: torch.Tensor | None
) -> torch.Tensor:
    """(block, slot) of each row, (−1, −1) where it is written nowhere."""
    page = slot_mapping.div(page_tokens, rounding_mode="floor")
    slot = slot_mapping - page * page_tokens
    if places is None:
        block = page * block_pages
        nowhere = page < 0
    else:
        block = places[:, page.clamp(min=0)].long()
        nowhere = (page < 0) | (block == 0)
    pair = torch.stack((block, slot.expand_as(block)), dim=-1)
    return torch.where(nowhere[..., None], -1, pair).int()

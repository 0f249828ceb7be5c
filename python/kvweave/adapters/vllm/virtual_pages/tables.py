"""A step's tables through virtual pages: entries and slots for each table of each request.

Until a layer runs they name a virtual page by its place in the tables, flat: table · V + page. The
changes of a step reach a worker after its metadata is built, so only then is it looked up.
"""

from __future__ import annotations

import torch

from kvweave.adapters.vllm.tables import Entries, packed, seen_blocks
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout


def entries_of(
    layout: PageLayout,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor,
    *,
    virtual_pages: int,
    longest: int,
    most_rows: int,
) -> Entries:
    """Entries of what the rows see in each table: offsets [B · tables + 1], pages by flat place.

    blocks [B, M], lengths [B] and first [B] as `tables.entries_of` has them; requests have up to
    `longest` tokens, `most_rows` of them new.
    """
    seen = []
    for span in layout.spans:
        columns = span.columns(layout.page_tokens, longest, most_rows)
        tokens = layout.page_tokens
        seen.append(seen_blocks(lengths, first, page_tokens=tokens, columns=columns, span=span))
    numbers = [seen[number][0] for number in layout.tables]
    listed = [seen[number][1] for number in layout.tables]
    counts = torch.stack([part.sum(1) for part in listed], dim=1)
    offsets = [torch.full_like(part, table * virtual_pages) for table, part in enumerate(numbers)]
    number = torch.cat(numbers, dim=1)
    page = blocks.gather(1, number.clamp(max=blocks.shape[1] - 1).long())
    flat = page + torch.cat(offsets, dim=1)
    return packed(number, torch.cat(listed, dim=1), counts, flat, lengths, layout.page_tokens)


def slots_of(layout: PageLayout, slot_mapping: torch.Tensor, *, virtual_pages: int) -> torch.Tensor:
    """(flat place, slot) of each row in each table [tables, rows, 2]; −1, for padding, outside."""
    page = slot_mapping.div(layout.page_tokens, rounding_mode="floor")
    slot = (slot_mapping - page * layout.page_tokens).expand(len(layout.tables), -1)
    starts = torch.arange(len(layout.tables), device=page.device)[:, None] * virtual_pages
    flat = torch.where(page < 0, page, page + starts)
    return torch.stack((flat, slot), dim=2).to(torch.int32)


def look_up(rows: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Rows whose first number was a flat place, now with the block that lies there, or 0."""
    found = tables.view(-1)[rows[..., 0].long()]
    return torch.cat((found[..., None], rows[..., 1:]), dim=-1)


def look_up_slots(slots: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """The same for slots: −1, which is written nowhere, for padding and where nothing lies."""
    found = look_up(slots.clamp(min=0), tables)
    void = (slots[..., :1] < 0) | (found[..., :1] == 0)
    return torch.where(void, -1, found)

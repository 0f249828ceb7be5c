"""A layer of a chunk in vLLM's pages as a question's rows read it: see `kvweave.question`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tensor_model_parallel_world_size

from kvweave import ops
from kvweave.adapters.vllm.backend.step_tables import Entries
from kvweave.adapters.vllm.segments.attention_layers import HeadPart
from kvweave.adapters.vllm.segments.ranks import over_ranks
from kvweave.device_memory import sent
from kvweave.plan import Rows


class SentRows:
    """Rows where pages are, sent once for all layers that ask for the same: nobody changes them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[tuple[Rows, ...], torch.Tensor]] = {}

    def on(self, device: torch.device, rows: Rows) -> torch.Tensor:
        """Rows on a device."""
        return self._once(device, (rows,), lambda: rows)

    def places(self, device: torch.device, some: Rows, rows: Rows) -> torch.Tensor:
        """Where some of sorted rows stand among them, i64, on a device."""
        return self._once(device, (some, rows), lambda: np.searchsorted(rows, some))

    def _once(
        self, device: torch.device, of: tuple[Rows, ...], made: Callable[[], npt.NDArray[Any]]
    ) -> torch.Tensor:
        # The arrays are kept, so no others have their numbers meanwhile.
        key = tuple(map(id, of))
        if key not in self._known:
            self._known[key] = of, sent(made(), device)
        return self._known[key][1]


@dataclass(frozen=True)
class ChunkKv:
    """The KV of one request in the `parts` of one layer up to `tokens`.

    `entries` of each class of heads: one a page, of all that the rows that ask see; `sent` are
    positions that went to the pages' device.
    """

    parts: list[HeadPart]
    entries: list[Entries]
    tokens: int
    sent: SentRows = field(default_factory=SentRows)

    @property
    def kv_heads(self) -> int:
        """KV heads of this rank."""
        return sum(part.kv_heads for part in self.parts)

    @property
    def query_heads(self) -> int:
        """Query heads of all ranks."""
        here = sum(part.attends.num_heads for part in self.parts)
        return here * int(get_tensor_model_parallel_world_size())

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.parts[0].pages.device

    def table(self, positions: Rows) -> torch.Tensor:
        """Positions where the pages are."""
        return self.sent.on(self.device, positions)

    def mass(self, q: torch.Tensor, positions: ops.Table, head: int | None = None) -> torch.Tensor:
        """Mass of every token, f32 [T]; see `LayerKv`."""
        if head is not None:
            part = self._part_of(head)
            paged = part.attends.paged_head(part.pages, head - part.first_head)
            return self._mass(part, q, positions, paged)
        first, *others = (
            self._mass(part, q[:, part.query_heads], positions, part.attends.paged(part.pages))
            for part in self.parts
        )
        for mass in others:
            first += mass
        return first

    def value_norms(self, head: int) -> torch.Tensor:
        """The norm of each token's value in one KV head, f32 [T]; 0 where nothing is kept."""
        part = self._part_of(head)
        entries = self.entries[part.number].rows
        page = entries[:, 0].long() + (head - part.first_head)
        size = part.page_tokens
        at = entries[:, 3, None].long() + torch.arange(size, device=self.device)
        norms = torch.zeros(self.tokens + size, device=self.device)
        norms.index_copy_(0, at.flatten(), part.pages[page, 1].float().norm(dim=-1).flatten())
        return norms[: self.tokens]

    def moved(
        self, k: torch.Tensor, v: torch.Tensor, positions: Rows, blocks: list[torch.Tensor]
    ) -> torch.Tensor:
        """Squared distance of fresh K, V [R, G, D] of rows from those in the pages, f32 [R].

        `blocks` of each class: the first head's page of each page of the request.
        """
        apart = torch.zeros(len(k), device=k.device)
        at = self.table(positions).long()
        for part in self.parts:
            size = part.page_tokens
            page = blocks[part.number].long().index_select(0, at // size)
            heads = torch.arange(part.kv_heads, device=page.device)
            page, own = page[:, None] + heads, slice(part.first_head, None)
            for which, fresh in enumerate((k, v)):
                kept = part.pages[page, which, (at % size)[:, None]]
                mine = fresh[:, own][:, : part.kv_heads]
                apart += (mine.float() - kept.float()).square().sum((1, 2))
        return over_ranks(apart)

    def over_ranks(self, found: torch.Tensor) -> torch.Tensor:
        """What was measured over the heads here, summed over all ranks."""
        return over_ranks(found)

    def _part_of(self, head: int) -> HeadPart:
        return next(p for p in self.parts if p.first_head <= head < p.first_head + p.kv_heads)

    def _mass(
        self, part: HeadPart, q: torch.Tensor, positions: ops.Table, paged: ops.PagedKv
    ) -> torch.Tensor:
        entries, offsets = self.entries[part.number]
        spans = None if paged.reach is None else offsets
        return ops.score_tokens(
            q, positions, entries, paged, entry_offsets=spans, tokens=self.tokens
        )

"""A worker's side of virtual pages: the arena, and the tables as the scheduler last left them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvweave.adapters.vllm.top_k.bounds import bounds_of
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout
from kvweave.errors import Unsupported


class PageMemory:
    """`arena` [pages, 2, P, D] of all that vLLM allocated; `tables` i32 [tables, virtual pages].

    A table says with which page of the arena the block of a virtual page begins, 0: with none.
    Where heads choose pages, one more says where the bounds of a virtual page begin, behind the
    arena: `bounds` [rows, vectors, D]. Where pages may leave the device, tables have columns behind
    those of vLLM's pages, so many for each of so many `seats` of requests and one that is nobody's.
    """

    def __init__(
        self, layout: PageLayout, kv_caches: Mapping[str, torch.Tensor], seats: int = 0
    ) -> None:
        """`kv_caches`: what vLLM allocated for each layer, [virtual pages, slots, P, 2·D].

        Errors: `Unsupported` when layers do not lie one after another in one allocation.
        """
        self.layout = layout
        parts = list(kv_caches.values())
        first = min(parts, key=lambda part: part.data_ptr())
        size = sum(part.numel() for part in parts)
        storages = {part.untyped_storage().data_ptr() for part in parts}
        whole = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
        if len(storages) != 1 or len(parts) != layout.layers or whole < size:
            expected = f"{layout.layers} layers in one allocation of {size} numbers"
            got = f"{len(parts)} in {len(storages)}, {whole} numbers"
            text = f"kv_caches: expected {expected}, got {got}"
            raise Unsupported(text, expected=expected, got=got)
        pages, _, page_tokens, width = first.shape
        self.pages = pages
        arena = (layout.arena_pages(pages), 2, page_tokens, width // 2)
        count = math.prod(arena)
        numbers = first.as_strided((size,), (1,))
        self.arena = numbers[:count].view(arena)
        columns = pages + (seats + 1) * layout.slots
        shape = (layout.step_tables, columns)
        # What tables say, on the host: a device that sleeps forgets them.
        self._known = np.zeros(shape, np.int32)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=first.device)
        if layout.choosing:
            rows = pages * layout.bound_rows
            vectors, dtype = bounds_of(first.dtype, first.device)
            kept = numbers[count:].view(torch.uint8)
            needed = rows * vectors * (width // 2) * dtype.itemsize
            self.bounds = kept[:needed].view(dtype).view(rows, vectors, width // 2)
            self._known[-1, :pages] = np.arange(pages) * layout.bound_rows
            self.restore()

    def apply(self, changes: npt.NDArray[np.int32]) -> None:
        """Brings the tables up to date: rows of table, virtual page, arena page."""
        if not len(changes):
            return
        at = changes[:, 0].astype(np.int64) * self._known.shape[1] + changes[:, 1]
        self._known.ravel()[at] = changes[:, 2]
        # Places and what lies there in one tensor: one copy to the device.
        sent = torch.from_numpy(np.stack((at, changes[:, 2]))).to(self.tables.device)
        self.tables.view(-1).index_copy_(0, sent[0], sent[1].int())

    def restore(self) -> None:
        """Has tables say what they said before the device slept, at the same addresses."""
        self.tables.copy_(torch.from_numpy(self._known))

    def blocks_in_use(self) -> list[int]:
        """Blocks that each table names now; waits for the device."""
        tables = self.tables[: len(self.layout.tables), : self.pages]
        return [int(count) for count in (tables > 0).sum(1).tolist()]

    def slots_of(self, table: int) -> torch.Tensor:
        """Where slots of seats begin in the arena, i32 [seats + 1, slots]; 0 of nobody's."""
        return self.tables[table, self.pages :].view(-1, self.layout.slots)

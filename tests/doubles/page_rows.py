"""Rows that select pages and have slots, and in plain words what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class PageRows:
    """pages i32 [R, K], selected i32 [R], slots i32 [R, S] and pinned bool [R, S] of rows."""

    pages: np.ndarray
    selected: np.ndarray
    slots: np.ndarray
    pinned: np.ndarray
    limit: int

    @classmethod
    def drawn(
        cls,
        generator: np.random.Generator,
        rows: int,
        most: int,
        width: int,
        limit: int,
        kept: float | None = None,
        pins: float = 0.2,
    ) -> PageRows:
        """Rows that fit. `kept` of what is selected lies in slots before, None: any share."""
        pages = np.full((rows, most), -1, np.int32)
        slots = np.full((rows, width), -1, np.int32)
        pinned = generator.random((rows, width)) < pins
        selected = np.zeros(rows, np.int32)
        for row in range(rows):
            free = int((~pinned[row]).sum())
            most_here = min(most, free, limit)
            count = most_here if kept is not None else int(generator.integers(0, most_here + 1))
            order = generator.permutation(limit)
            chosen, others = order[:count], order[count:]
            share = generator.random() if kept is None else kept
            stay = generator.permutation(chosen)[: round(share * count)]
            held = np.full(width, -1, np.int32)
            held[: len(stay)] = stay
            more = others[: int(generator.integers(0, width - len(stay) + 1))]
            held[len(stay) : len(stay) + len(more)] = more
            # Slots of any place, so that pinned ones hold what is selected, too.
            slots[row] = generator.permutation(held)
            pages[row, :count] = np.sort(chosen)
            selected[row] = count
        return cls(pages, selected, slots, pinned, limit)

    def by_hand(self) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
        """Slots and places as they have to be afterwards, and the moves."""
        slots, places = self.slots.copy(), np.full(self.pages.shape, -1, np.int32)
        moves = []
        for row, count in enumerate(self.selected.tolist()):
            chosen = self.pages[row, :count].tolist()
            where = {page: slot for slot, page in enumerate(slots[row].tolist())}
            wanted = set(chosen)
            left = iter(
                [
                    slot
                    for slot, page in enumerate(slots[row].tolist())
                    if page not in wanted and not self.pinned[row, slot]
                ]
            )
            for at, page in enumerate(chosen):
                if page not in where:
                    slot = next(left)
                    slots[row, slot] = page
                    moves.append((row, page, slot))
                    places[row, at] = slot
                else:
                    places[row, at] = where[page]
        return slots, places, moves

    def on(self, device: str) -> tuple[torch.Tensor, ...]:
        """pages, selected, slots and pinned there."""
        tables = (self.pages, self.selected, self.slots, self.pinned)
        return tuple(torch.from_numpy(table.copy()).to(device) for table in tables)

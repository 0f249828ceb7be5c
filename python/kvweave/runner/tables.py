"""What the ops must know of a request, where its pages are: sent over when it changes, and once.

On the CPU the tables are numpy arrays as the cache gives them. On a GPU they are int32 tensors:
the ops use such tables as they are, so a layer neither uploads anything nor waits for anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave.cache import KvRequest
from kvweave.ops import Table
from kvweave.plan import Rows
from kvweave.runner.rope import PositionTable, Turns

Int32 = npt.NDArray[np.int32]


def send(device: torch.device, *arrays: Int32) -> tuple[Table, ...]:
    """The arrays as tables on a device: one copy that nothing waits for, or none on the CPU."""
    if device.type == "cpu":
        return arrays
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    sent = flat.pin_memory().to(device, non_blocking=True)
    parts = torch.split(sent, [array.size for array in arrays])
    return tuple(part.view(array.shape) for part, array in zip(parts, arrays, strict=True))


def send_index(device: torch.device, index: npt.NDArray[np.integer]) -> torch.Tensor:
    """An index for `index_select` on a device."""
    (table,) = send(device, index.astype(np.int32, copy=False))
    return torch.as_tensor(table)


@dataclass(frozen=True)
class KvTable:
    """Where the KV of one request lies: entries i32 [N, 5], and their offsets [0, N]."""

    on_host: Int32
    entries: Table
    offsets: Table

    @staticmethod
    def of(request: KvRequest, device: torch.device) -> KvTable:
        """The request's entries as they are now."""
        entries = request.entries()
        return KvTable(entries, *send(device, entries, np.asarray([0, len(entries)], np.int32)))


@dataclass(frozen=True)
class RowTable:
    """Rows of one request, i32 [R]: where their K, V go (slots i32 [R, 2]), and their turns."""

    rows: Rows
    positions: Table
    slots: Table
    offsets: Table
    turns: Turns

    @staticmethod
    def of(request: KvRequest, rows: Rows, table: PositionTable, device: torch.device) -> RowTable:
        """The tables of rows that the request may write.

        # Errors
        `InvalidArgument` for a position that others may read.
        """
        ends = np.asarray([0, len(rows)], np.int32)
        positions, slots, offsets = send(device, rows, request.slots(rows), ends)
        turns = table.turns(torch.as_tensor(positions))
        return RowTable(rows, positions, slots, offsets, turns)

    def since(self, row: int) -> RowTable:
        """The tables from one of the rows on."""
        rows = self.rows[row:]
        device = torch.device("cpu") if isinstance(self.slots, np.ndarray) else self.slots.device
        (offsets,) = send(device, np.asarray([0, len(rows)], np.int32))
        turns = {key: (cos[row:], sin[row:]) for key, (cos, sin) in self.turns.items()}
        return RowTable(rows, self.positions[row:], self.slots[row:], offsets, turns)

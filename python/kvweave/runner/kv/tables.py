"""What the ops must know of a request, where its pages are: sent over when it changes, and once.

On the CPU the tables are numpy arrays as the cache gives them. On a GPU they are int32 tensors:
the ops use such tables as they are, so a layer neither uploads anything nor waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvweave.cache import KvRequest
from kvweave.device_memory import sent
from kvweave.ops import Table
from kvweave.plan import Rows
from kvweave.runner.model.rope import PositionTable, Turns

Int32 = npt.NDArray[np.int32]
T = TypeVar("T")
_Whole = TypeVar("_Whole", np.int32, np.int64)


def send(device: torch.device, *arrays: Int32) -> tuple[Table, ...]:
    """The arrays as tables on a device: one copy that nothing waits for, or none on the CPU."""
    if device.type == "cpu":
        return arrays
    flat = sent(np.concatenate([array.reshape(-1) for array in arrays]), device)
    parts = torch.split(flat, [array.size for array in arrays])
    return tuple(part.view(array.shape) for part, array in zip(parts, arrays, strict=True))


def send_index(device: torch.device, index: npt.NDArray[np.integer]) -> torch.Tensor:
    """An index for `index_select` on a device."""
    return sent(index.astype(np.int32, copy=False), device)


def within_runs(lengths: npt.NDArray[_Whole]) -> npt.NDArray[_Whole]:
    """The numbers from 0 on in each of some runs [N] of these lengths, behind one another."""
    kind = lengths.dtype
    before = np.cumsum(lengths, dtype=kind) - lengths
    numbers: npt.NDArray[_Whole] = np.arange(int(lengths.sum()), dtype=kind)
    return numbers - np.repeat(before, lengths)


def same_rows(one: Rows, other: Rows) -> bool:
    """Whether two sets of rows are equal; layers mostly plan the very same array."""
    return one is other or (len(one) == len(other) and np.array_equal(one, other))


class RowMemo(Generic[T]):
    """What was made of the latest few sets of rows: layers mostly plan the very same.

    Sets are compared by content, for an array may have been filled anew.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: list[tuple[Rows, T]] = []

    def get(self, rows: Rows, make: Callable[[Rows], T]) -> T:
        """What `make` gave for these rows, or gives now."""
        at = next((i for i, (one, _) in enumerate(self._made) if np.array_equal(one, rows)), None)
        if at is None:
            kept = rows.copy()
            made = kept, make(kept)
        else:
            made = self._made.pop(at)
        self._made = [*self._made, made][-self._most :]
        return made[1]


@dataclass(frozen=True)
class KvTable:
    """Where the KV of one request lies: entries i32 [N, 5] of all its tables, and their offsets.

    Offsets are i32 [tables + 1]. `turns`: how often keys of one entry are moved and those of the
    next one not, or elsewhere.
    """

    entries: Table
    offsets: Table
    turns: int = 0

    @staticmethod
    def of(request: KvRequest, device: torch.device) -> KvTable:
        """The request's tables as they are now."""
        parts = [request.entries(table) for table in range(request.tables)]
        entries = parts[0] if len(parts) == 1 else np.concatenate(parts)
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        turns = int(np.count_nonzero(np.diff(entries[:, 4])))
        listed, ends = send(device, entries, offsets)
        return KvTable(listed, ends, turns)


@dataclass(frozen=True)
class RowTable:
    """Rows of one request, i32 [R]: where their K, V go, and their turns.

    slots i32 [R, 2], or [tables, R, 2] where heads have tables of their own. `written`: the rows
    whose K, V of window heads go into pages, None: all.
    """

    rows: Rows
    written: Rows | None
    positions: Table
    slots: Table
    offsets: Table
    turns: Turns

    @staticmethod
    def of(
        slots: Int32, rows: Rows, written: Rows | None, table: PositionTable, device: torch.device
    ) -> RowTable:
        """The tables of rows with these slots."""
        ends = np.asarray([0, len(rows)], np.int32)
        positions, places, offsets = send(device, rows, slots, ends)
        turns = table.turns(torch.as_tensor(positions))
        return RowTable(rows, written, positions, places, offsets, turns)

    def same(self, rows: Rows, written: Rows | None) -> bool:
        """Whether it is the table of these very rows."""
        if not same_rows(self.rows, rows):
            return False
        if self.written is None or written is None:
            return self.written is written
        return same_rows(self.written, written)

    def since(self, row: int) -> RowTable:
        """The tables from one of the rows on, to read by: their K, V are written."""
        rows = self.rows[row:]
        device = torch.device("cpu") if isinstance(self.slots, np.ndarray) else self.slots.device
        (offsets,) = send(device, np.asarray([0, len(rows)], np.int32))
        turns = {key: (cos[row:], sin[row:]) for key, (cos, sin) in self.turns.items()}
        slots = self.slots[..., row:, :]
        return RowTable(rows, self.written, self.positions[row:], slots, offsets, turns)

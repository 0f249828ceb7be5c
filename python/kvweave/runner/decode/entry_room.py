"""`EntryRoom`: where the entries of a batch lie on the device, and stay while there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave.power_of_two import power_of_two
from kvweave.runner.kv.packed_heads import PackedHeads
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.tables import Int32, send


@dataclass(frozen=True)
class EntryRoom:
    """Where the entries of a batch lie: i32 [N, 5], with room for more behind them.

    offsets i32 [M · tables + 1], as `heads` has those of requests: ones beyond the batch have no
    entries.
    """

    entries: torch.Tensor
    offsets: torch.Tensor
    heads: PackedHeads

    @staticmethod
    def of(entries: int, requests: int, pool: PackedPool) -> EntryRoom:
        """Room for so many entries of so many requests, or somewhat more."""
        n, m = map(power_of_two, (entries, requests))
        device, heads = pool.device, pool.heads
        made = torch.zeros((n, 5), dtype=torch.int32, device=device)
        offsets = torch.zeros(m * heads.tables + 1, dtype=torch.int32, device=device)
        return EntryRoom(made, offsets, heads)

    @property
    def requests(self) -> int:
        """How many requests have room."""
        return (len(self.offsets) - 1) // self.heads.tables

    def fits(self, entries: int, requests: int) -> bool:
        """Whether so many have room."""
        return entries <= len(self.entries) and requests <= self.requests

    def of_batch(self, requests: int) -> torch.Tensor:
        """The offsets of so many requests."""
        return self.offsets[: requests * self.heads.tables + 1]

    def write(self, parts: Sequence[Int32]) -> int:
        """Writes the entries of requests, one behind the other: how many there are of all."""
        offsets = self.heads.offsets(np.cumsum([0, *map(len, parts)], dtype=np.int32))
        count = int(offsets[-1])
        ends_at = np.full(len(self.offsets), count, np.int32)
        ends_at[: len(offsets)] = offsets
        entries, spans = send(self.entries.device, np.concatenate(parts), ends_at)
        self.entries[:count].copy_(torch.as_tensor(entries))
        self.offsets.copy_(torch.as_tensor(spans))
        return count

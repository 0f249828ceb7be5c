"""What decode steps read of packed pages: each row all that lies behind what it reads exactly.

A row at position i reads the sink and the newest tokens exactly, by the window that the exact pool
keeps for it. Packed pages are asked for the rest as if by the row `RECENT_TOKENS` earlier, so that
a step changes no entry: those of a request change when a page of it has been packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvweave import ops
from kvweave.errors import PoolFull
from kvweave.ops import RopeTable, Table, Workspace
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.kv.packed_pool import PAGE_TOKENS, RECENT_TOKENS, SINK_TOKENS, PackedPool
from kvweave.runner.kv.packed_prefix import PackedPrefix, States
from kvweave.runner.kv.tables import Int32, send


@dataclass(frozen=True)
class PackedStep:
    """Packed entries i32 [N, 5] of B requests and their offsets i32 [B + 1]; positions i32 [B]."""

    pool: PackedPool
    positions: torch.Tensor
    entries: torch.Tensor
    offsets: torch.Tensor

    def merged(
        self,
        layer: int,
        q: torch.Tensor,
        rope: RopeTable,
        exact: States,
        workspace: Workspace | None,
    ) -> torch.Tensor:
        """Attention of queries q [B, H, D] over all, where `exact` is that over exact pages."""
        kv = self.pool.read(layer, self.pool.spec.layers[layer], rope)
        out, lse = ops.attend_packed(
            q,
            self.positions,
            self.entries,
            kv,
            entry_offsets=self.offsets,
            workspace=workspace,
        )
        outs, lses = torch.stack((exact[0], out)), torch.stack((exact[1], lse))
        return ops.merge_states(outs, lses)[0]


@dataclass(frozen=True)
class PackedRoom:
    """Where the packed entries of a batch lie: i32 [N, 5], with room for more behind them.

    offsets i32 [M + 1]: requests beyond the batch have no entries.
    """

    pool: PackedPool
    entries: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def of(pool: PackedPool, entries: int, requests: int) -> PackedRoom:
        """Room for so many entries of so many requests, or somewhat more."""
        n, m = (1 << max(0, number - 1).bit_length() for number in (entries, requests))
        device = pool.spec.device
        made = torch.zeros((n, 5), dtype=torch.int32, device=device)
        return PackedRoom(pool, made, torch.zeros(m + 1, dtype=torch.int32, device=device))

    def fits(self, entries: int, requests: int) -> bool:
        """Whether so many have room."""
        return entries <= len(self.entries) and requests < len(self.offsets)

    def step(self, positions: Table) -> PackedStep:
        """What rows at positions i32 [B] read behind what they read exactly."""
        asked = (torch.as_tensor(positions) - RECENT_TOKENS).clamp_(min=0)
        return PackedStep(self.pool, asked, self.entries, self.offsets[: len(asked) + 1])


class PackedReads:
    """The packed pages of a batch that decodes together.

    Their entries stay where they are while there is room, so that a step can be captured.
    """

    def __init__(self, pool: PackedPool) -> None:
        self.pool = pool
        self._batch: Sequence[Decoding] = ()
        # Steps until a page of any of them is full.
        self._rests = 0
        self._room = PackedRoom.of(pool, 1, 1)
        # Entries of the batch, and whether they lie in the room.
        self._listed, self._is_listed = 0, False

    def seat(self, batch: Sequence[Decoding]) -> None:
        """Makes these the batch of the next step, or says that something of theirs has changed."""
        self._batch, self._rests, self._is_listed = batch, 0, False

    def pack(self) -> None:
        """Packs what pages the batch has filled, before its next step.

        # Errors
        `PoolFull` without room, whose `request` says for which of them.
        """
        if self._rests > 0:
            self._rests -= 1
            return
        lacks = []
        for row, sequence in enumerate(self._batch):
            packed, length = _packed(sequence), sequence.request.length
            before = packed.tokens
            try:
                packed.pack(sequence.request, length)
            except PoolFull as error:
                error.request = row
                raise
            finally:
                if packed.tokens != before:
                    self._is_listed = False
            lacks.append(packed.full_at - length)
        self._rests = min(lacks) - 1

    def are_read(self, positions: Int32) -> bool:
        """Whether any row at positions i32 [B] reads anything packed."""
        return bool(len(positions)) and int(positions.max()) - RECENT_TOKENS >= SINK_TOKENS

    def step(self, positions: Table) -> PackedStep:
        """What the batch's rows at positions i32 [B] read."""
        room = self.room(len(self._batch))
        return replace(room, entries=room.entries[: self._listed]).step(positions)

    def room(self, requests: int) -> PackedRoom:
        """Where the batch's entries lie, brought up to date, with offsets of so many requests."""
        if self._is_listed and requests < len(self._room.offsets):
            return self._room
        parts = [_packed(sequence).entries() for sequence in self._batch]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        count = self._listed = int(offsets[-1])
        if not self._room.fits(count, requests):
            # So much that nothing moves before all of the batch are done.
            ends = (s.request.length + s.remaining for s in self._batch)
            most = sum(-(-end // PAGE_TOKENS) for end in ends)
            most = max(most, count, len(self._room.entries))
            most_requests = max(requests, len(self._room.offsets) - 1)
            self._room = PackedRoom.of(self.pool, most, most_requests)
        room = self._room
        ends_at = np.full(len(room.offsets), count, np.int32)
        ends_at[: len(offsets)] = offsets
        entries, spans = send(self.pool.spec.device, np.concatenate(parts), ends_at)
        room.entries[:count].copy_(torch.as_tensor(entries))
        room.offsets.copy_(torch.as_tensor(spans))
        self._is_listed = True
        return room


def _packed(sequence: Decoding) -> PackedPrefix:
    assert sequence.packed is not None
    return sequence.packed

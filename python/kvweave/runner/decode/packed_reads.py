"""What decode steps read of packed pages: each row all that lies behind what it reads exactly.

A row at position i reads the sink and the newest tokens exactly, by the window that the exact pool
keeps for it. Packed pages are asked for the rest as if by the row `RECENT_TOKENS` earlier, so that
a step changes no entry: those of a request change when a page of it has been packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.errors import PoolFull
from kvweave.ops import RopeTable, Table, Workspace
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.kv.packed_pool import RECENT_TOKENS, SINK_TOKENS, PackedPool
from kvweave.runner.kv.packed_prefix import PackedPrefix, States
from kvweave.runner.kv.tables import Int32, send


@dataclass(frozen=True)
class PackedStep:
    """Packed entries i32 [N, 5] of B requests and their offsets i32 [B + 1]; positions i32 [B]."""

    pool: PackedPool
    positions: Table
    entries: Table
    offsets: Table

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


class PackedReads:
    """The packed pages of a batch that decodes together."""

    def __init__(self, pool: PackedPool) -> None:
        self._pool = pool
        self._batch: Sequence[Decoding] = ()
        # Steps until a page of any of them is full.
        self._rests = 0
        self._tables: tuple[Table, Table] | None = None

    def seat(self, batch: Sequence[Decoding]) -> None:
        """Makes these the batch of the next step, or says that something of theirs has changed."""
        self._batch, self._rests, self._tables = batch, 0, None

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
                    self._tables = None
            lacks.append(packed.full_at - length)
        self._rests = min(lacks) - 1

    def step(self, positions: Int32) -> PackedStep | None:
        """What the rows at positions i32 [B] read; None where none reads anything packed."""
        asked = np.maximum(positions - RECENT_TOKENS, 0).astype(np.int32)
        if not len(asked) or asked.max() < SINK_TOKENS:
            return None
        if self._tables is None:
            parts = [_packed(sequence).entries() for sequence in self._batch]
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
            entries, spans = send(self._pool.spec.device, np.concatenate(parts), offsets)
            self._tables = entries, spans
        (places,) = send(self._pool.spec.device, asked)
        return PackedStep(self._pool, places, *self._tables)


def _packed(sequence: Decoding) -> PackedPrefix:
    assert sequence.packed is not None
    return sequence.packed

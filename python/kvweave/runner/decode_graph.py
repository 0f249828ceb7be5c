"""Decode steps on a GPU: tables at fixed addresses, patched between steps, and one graph a size.

A step changes little: each request has a new token, position and slot, and its last entry grows
by one or a new one begins. So a step sends one small patch over, and what it launches is always
the same: it is captured once for each size of batch and then replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvweave.device_memory import is_shortage
from kvweave.ops import Reach, RopeTable, Workspace
from kvweave.runner.decode_step import StepTables, forward, newest, query_room, slots_of
from kvweave.runner.decoding import Decoding
from kvweave.runner.entry_tails import NO_ENTRY, EntryTails
from kvweave.runner.heads import HeadReads, Promoted
from kvweave.runner.rope import PositionTable, Rotary
from kvweave.runner.tables import Int32

_log = logging.getLogger(__name__)

_FEWEST_ENTRIES = 256
_MOST_SIZES = 32

# Columns of a patch: token id, position, then for each table block and slot, and for each move of
# its entries a row and the entry.
_ID, _POSITION, _TABLES = 0, 1, slice(2, None)
_SLOT, _MOVES = slice(0, 2), slice(2, None)


def rows_for(requests: int) -> int:
    """Rows of the smallest graph that serves so many requests."""
    return 1 << (requests - 1).bit_length() if requests <= 8 else -(-requests // 8) * 8


def entries_for(entries: int) -> int:
    """Entries of the smallest table that is kept for so many."""
    return max(_FEWEST_ENTRIES, 1 << (entries - 1).bit_length())


class _Size:
    """Tables of one size at fixed addresses, and the graph that reads them.

    `tables` of each request, `moves` of entries of each in a step.
    """

    def __init__(
        self, device: torch.device, rows: int, entries: int, tables: int, moves: int
    ) -> None:
        self.rows = rows
        self.shape = (tables, 2 + 6 * moves)
        width = 2 + tables * (2 + 6 * moves)
        self.patch = torch.zeros(rows, width, dtype=torch.int32, device=device)
        # What moves nothing patches rows of its own behind the table.
        self.spare = np.arange(entries, entries + rows * tables * moves, dtype=np.int32)
        count = entries + len(self.spare)
        self.entries = torch.empty(count, 5, dtype=torch.int32, device=device)
        self.offsets = torch.empty(rows * tables + 1, dtype=torch.int32, device=device)
        self.sent = torch.empty(rows, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.tails: EntryTails | None = None
        self.positions: PositionTable | None = None
        self.reaches: list[Reach] | None = None
        self.queries: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None
        self.tried = False

    def load(self, tails: EntryTails) -> None:
        """Sends the tables of a batch that was not here in the step before."""
        offsets = np.full(len(self.offsets), tails.offsets[-1], np.int32)
        offsets[: len(tails.offsets)] = tails.offsets
        for kept, sent in ((self.entries, tails.table(len(self.entries))), (self.offsets, offsets)):
            host = torch.from_numpy(sent)
            kept.copy_(host.pin_memory() if kept.is_cuda else host, non_blocking=True)
        self.tails = tails

    def write(self, batch: Sequence[Decoding], positions: Int32, slots: Int32) -> None:
        """Sends the patch of one step. The step before must have ended: it read the same memory.

        slots i32 [tables, B, 2].
        """
        assert self.tails is not None
        count, sent = len(batch), self.sent.numpy()
        sent[:count, _ID] = [s.tokens[-1] for s in batch]
        sent[:count, _POSITION] = positions
        sent[count:, [_ID, _POSITION]] = 0
        tables = sent[:, _TABLES].reshape(self.rows, *self.shape)
        tables[:count, :, _SLOT] = slots.transpose(1, 0, 2)
        tables[count:, :, _SLOT] = -1
        moves = tables[:, :, _MOVES].reshape(self.rows, self.shape[0], -1, 6)
        moves[:count] = self.tails.patch()
        moves[count:] = (-1, *NO_ENTRY)
        rows = moves[..., 0]
        moves[..., 0] = np.where(rows < 0, self.spare.reshape(rows.shape), rows)
        tables[:, :, _MOVES] = moves.reshape(self.rows, self.shape[0], -1)
        sent[:, _TABLES] = tables.reshape(self.rows, -1)
        self.patch.copy_(self.sent, non_blocking=True)

    def tables(self) -> StepTables:
        """The tables of the step, cut from the patch on the device."""
        assert self.positions is not None
        patch = self.patch[:, _TABLES].view(self.rows, *self.shape)
        moves = patch[..., _MOVES].reshape(-1, 6)
        self.entries.index_copy_(0, moves[:, 0].long(), moves[:, 1:])
        slots = patch[..., _SLOT].transpose(0, 1).contiguous()
        places = self.patch[:, _POSITION].contiguous()
        return StepTables(
            ids=self.patch[:, _ID].long(),
            positions=places,
            slots=slots[0] if self.reaches is None else slots,
            entries=self.entries,
            offsets=self.offsets,
            turns=self.positions.turns(places),
            reaches=self.reaches,
        )


class StepGraphs:
    """Decode steps of one model over one arena on a GPU; the frequencies of RoPE are fixed."""

    def __init__(
        self, heads: HeadReads, rotary: Rotary, pages: torch.Tensor, workspace: Workspace | None
    ) -> None:
        self.spec = heads.spec
        self.heads = heads
        self.rotary = rotary
        self.pages = pages
        self.workspace = workspace
        self.capturable = True
        self._sizes: dict[tuple[int, int, int, Promoted, bool], _Size] = {}
        self._pool: Any = None
        self._last: _Size | None = None

    def logits(
        self, batch: Sequence[Decoding], watched: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits f32 [B, V] of each request's newest token; they hold until the next step.

        `watched`: so do the queries [L, B, H, D], which come with them.
        """
        positions, slots = newest(batch), slots_of(self.heads, batch)
        slots = slots[None] if self.heads.uniform else slots
        tails = None if self._last is None else self._last.tails
        goes_on = tails is not None and tails.of(batch) and tails.grow(positions, slots)
        size = self._last
        if size is None or not goes_on or watched != (size.queries is not None):
            size = self._described(batch, watched)
        self._last = size
        size.write(batch, positions, slots)
        logits = self._run(size, batch[0].positions.rope)[: len(batch)]
        return logits, None if size.queries is None else size.queries[:, : len(batch)]

    def forget(self) -> None:
        """Lets go of the requests of the last step."""
        if self._last is not None:
            self._last.tails = None
            self._last = None

    def _described(self, batch: Sequence[Decoding], watched: bool) -> _Size:
        """Tables large enough for the batch, with its entries in them."""
        promoted = tuple(batch[0].request.promoted)
        windows = [*self.heads.windows, *(None for _ in promoted)]
        tails = EntryTails(batch, self.pages.shape[2], windows)
        self.forget()
        rows, entries = rows_for(len(batch)), entries_for(int(tails.offsets[-1]))
        key = (rows, entries, batch[0].positions.regime, promoted, watched)
        if key not in self._sizes:
            if len(self._sizes) == _MOST_SIZES:
                del self._sizes[next(iter(self._sizes))]
            self._sizes[key] = _Size(self.spec.device, rows, entries, tails.tables, tails.moves)
            self._sizes[key].reaches = self.heads.reaches(batch[0].request)
            self._sizes[key].queries = query_room(self.spec, rows) if watched else None
        size = self._sizes[key]
        # A longer request than ever moves the table of positions, and a graph knows addresses.
        longest = max(s.request.length + s.remaining for s in batch)
        positions = self.rotary.fixed(longest)
        if size.positions is not positions:
            size.positions, size.graph, size.tried = positions, None, False
        size.load(tails)
        return size

    def _run(self, size: _Size, rope: RopeTable) -> torch.Tensor:
        if not self.capturable:
            return self._forward(size, rope)
        if not size.tried:
            return self._try(size, rope)
        if size.graph is None:
            self._capture(size, rope)
        if size.graph is None or size.logits is None:
            return self._forward(size, rope)
        size.graph.replay()
        return size.logits

    def _forward(self, size: _Size, rope: RopeTable) -> torch.Tensor:
        tables = size.tables()
        return forward(self.spec, self.pages, tables, rope, self.workspace, size.queries)

    def _try(self, size: _Size, rope: RopeTable) -> torch.Tensor:
        """The first step of a size runs launch by launch, and shows whether the model waits.

        It also makes what a capture may not: handles of libraries, uploaded frequencies.
        """
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = self._forward(size, rope)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self._give_up(error)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        if not self.capturable:
            return self._forward(size, rope)
        size.tried = True
        return logits

    def _capture(self, size: _Size, rope: RopeTable) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on allocating meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                size.logits = self._forward(size, rope)
        except RuntimeError as error:
            if is_shortage(error):
                # There may be room another time: once more from a first step on.
                size.tried = False
            else:
                self._give_up(error)
            return
        self._pool = graph.pool()
        size.graph = graph

    def _give_up(self, error: RuntimeError) -> None:
        self.capturable = False
        _log.warning("decode steps are launched one kernel at a time: %s", error)

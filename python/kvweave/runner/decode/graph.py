"""Decode steps on a GPU: what changes from step to step in one patch, and one graph a size.

A step changes little: each request has a new token, position and slot, and the last entries of its
tables grow by one or new ones begin. So a step sends one small patch over, and what it launches is
always the same: it is captured once for each size of batch and then replayed, whoever is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvweave.device_memory import is_shortage
from kvweave.ops import RopeTable, Workspace
from kvweave.power_of_two import power_of_two
from kvweave.runner.decode.capture import captured
from kvweave.runner.decode.chosen_step import NO_ENTRY, ChosenStep
from kvweave.runner.decode.chosen_tables import ChosenTables
from kvweave.runner.decode.packed_reads import PackedTables
from kvweave.runner.decode.reads import StepReach
from kvweave.runner.decode.round_grid import RoundGrid
from kvweave.runner.decode.slots import DecodeSlots, Step
from kvweave.runner.decode.step import DecodeTables, forward, query_room
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.model.rope import PositionTable, Rotary

_log = logging.getLogger(__name__)

_MOST_SIZES = 64


def rows_for(requests: int) -> int:
    """Rows of the smallest graph that serves so many requests."""
    return power_of_two(requests) if requests <= 8 else -(-requests // 8) * 8


def moves_for(rows: int, lanes: int) -> int:
    """Entries that a patch has room for: of each row, two of every table that it keeps up."""
    return 2 * rows * power_of_two(lanes)


class StepSize:
    """The patch of steps of one size at one address, and the graph that reads it.

    `rows` of the step, `moves` of entries; `reach` and `entries` are those that the graph knows,
    and `chosen` the tables of heads that choose pages, by a step's `form`. `width`: rows
    of each request, 1 but in a verification. `packed`: where a step that reads packed pages finds
    what it reads of them.
    """

    def __init__(
        self,
        entries: torch.Tensor,
        reach: StepReach,
        positions: PositionTable,
        rows: int,
        moves: int,
        chosen: ChosenTables | None = None,
        form: tuple[Any, ...] = (),
        width: int = 1,
        packed: PackedTables | None = None,
    ) -> None:
        self.entries, self.reach, self.positions = entries, reach, positions
        self.rows, self.moves, self.width = rows, moves, width
        self.chosen, self.form = chosen, form
        self.packed = packed
        self.idle = [room.nobody(len(entries)) for room in chosen.rooms] if chosen else []
        device, tables = entries.device, reach.tables
        self.offsets = 2 * rows * tables + 1
        # Numbers of 64 bits come first, where they are aligned.
        every = rows * width
        sizes = [2 * every, 2 * moves, every, 2 * tables * every, self.offsets, 5 * moves]
        sizes += [rows * len(row) for row in self.idle]
        self.patch = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.sent = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        ids, places, positions_of, slots, offsets, moved, *plans = torch.split(self.patch, sizes)
        self.plans = [plan.view(rows, -1) for plan in plans]
        self.ids, self.places = ids.view(torch.int64), places.view(torch.int64)
        self.slots = slots.view(tables, every, 2)
        ends = torch.arange(rows + 1, dtype=torch.int32, device=device) * width
        self.row_offsets = ends if width > 1 else None
        self.positions_of, self.splits, self.moved = positions_of, offsets, moved.view(moves, 5)
        parts = np.split(self.sent.numpy(), np.cumsum(sizes)[:-1])
        self._ids, self._places = parts[0].view(np.int64), parts[1].view(np.int64)
        self._positions, self._slots = parts[2], parts[3].reshape(tables, every, 2)
        self._offsets, self._moved = parts[4], parts[5].reshape(moves, 5)
        self._plans = [part.reshape(rows, -1) for part in parts[6:]]
        # Rows and moves of the step before; at first all are to be emptied.
        self._filled = (every + 1, moves + 1)
        self.queries: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None
        self.tried = False

    def reads(self, packed: PackedTables | None) -> None:
        """Has steps from now on read these packed pages; a graph that knows others is let go."""
        if packed is not self.packed:
            self.packed, self.graph, self.logits = packed, None, None
            self.tried = False

    def write(self, slots: DecodeSlots, step: Step) -> None:
        """Sends the patch of one step. The step before must have ended: it read the same memory.

        Rows without a request are at position 0, see nothing and write nowhere. Entries that the
        patch has no room for, as those of requests that have just joined, go over by themselves.
        """
        made, count = step.made, len(step.tokens)
        moved = min(len(made.places), self.moves)
        self._ids[:count], self._positions[:count] = step.tokens, made.positions
        self._slots[:, :count] = made.slots
        self._offsets[: made.spans.size] = made.spans.reshape(-1)
        self._places[:moved], self._moved[:moved] = made.places[:moved], made.moved[:moved]
        for number, idle in enumerate(self.idle):
            assert step.chosen is not None
            self._plans[number][: len(made.spans)] = step.chosen.plans[number]
            self._plans[number][len(made.spans) :] = idle
        before, self._filled = self._filled, (count, moved)
        if count < before[0]:
            self._ids[count:], self._positions[count:], self._slots[:, count:] = 0, 0, -1
            self._offsets[made.spans.size :] = 0
        if moved < before[1]:
            # What moves nothing is written to the last entry, which is nobody's.
            self._places[moved:], self._moved[moved:] = len(self.entries) - 1, NO_ENTRY
        slots.write(made.places[moved:], made.moved[moved:])
        self.patch.copy_(self.sent, non_blocking=True)

    def take(self, all_rows: StepSize, row: int, drafted: torch.Tensor) -> None:
        """Goes on to another row of each request, of a verification's rows, with tokens i64 [B]."""
        width = all_rows.width
        self.ids[: len(drafted)] = drafted
        self.positions_of.copy_(all_rows.positions_of.view(-1, width)[:, row])
        self.slots.copy_(all_rows.slots.view(len(self.slots), -1, width, 2)[:, :, row])

    def tables(self) -> DecodeTables:
        """The tables of the step, views of the patch on the device."""
        self.entries.index_copy_(0, self.places, self.moved)
        if self.chosen is not None:
            spans = self.splits[:-1].view(self.rows, -1)
            self.chosen.begin(spans, self.plans, *self.form)
        return DecodeTables(
            ids=self.ids,
            positions=self.positions_of,
            slots=self.slots,
            entries=self.entries,
            offsets=self.splits,
            turns=self.positions.turns(self.positions_of),
            reach=self.reach,
            chosen=self.chosen,
            packed=None if self.packed is None else self.packed.step(self.positions_of),
            row_offsets=self.row_offsets,
        )

    def knows(self, chosen: ChosenStep | None) -> bool:
        """Whether what top-K heads read lies where the graph reads it."""
        return self.chosen is None or chosen is None or self.chosen.rooms is chosen.rooms


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
        self._sizes: dict[Any, StepSize] = {}
        # Memory that graphs share, and the graph that it was made for: while there is one, others
        # may be captured into it.
        self._pool: Any = None
        self._first: torch.cuda.CUDAGraph | None = None

    def logits(
        self, slots: DecodeSlots, step: Step, watched: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits f32 [B, V] of each request's newest token; they hold until the next step.

        `watched`: so do the queries [L, B, H, D], which come with them.
        """
        count, packed = len(step.tokens), None
        if slots.packed is not None and slots.packed.are_read(step.made.positions):
            packed = slots.packed.tables(step.made.positions, rows_for(count))
        size = self._size_of(slots, step.chosen, watched, packed=packed)
        size.write(slots, step)
        logits = self._run(size, slots.rope)[:count]
        return logits, None if size.queries is None else size.queries[:, :count]

    def round(
        self,
        slots: DecodeSlots,
        step: Step,
        grid: RoundGrid,
        draw: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a round drafts, i64 [B, W − 1], and the logits f32 [B · W, V] of all its rows.

        `draw` takes logits f32 [B, V] and gives tokens i64 [B]. Both hold until the next step.
        """
        verification, ids = self._drafts(slots, step, grid, draw)
        logits = self._run(verification, slots.rope)[: ids.numel()]
        return ids[:, 1:], logits

    def drafts(
        self,
        slots: DecodeSlots,
        step: Step,
        grid: RoundGrid,
        draw: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The tokens of a round that is not verified yet, i64 [B, W]: `draw` as for `round`."""
        return self._drafts(slots, step, grid, draw)[1]

    def _drafts(
        self,
        slots: DecodeSlots,
        step: Step,
        grid: RoundGrid,
        draw: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[StepSize, torch.Tensor]:
        """As `drafts`, and the size of their verification, which has them."""
        assert step.chosen is not None
        count, width = grid.positions.shape
        verification = self._size_of(slots, None, width=width)
        verification.write(slots, grid.all_rows(step))
        ids = verification.ids.view(-1, width)
        size, again = self._size_of(slots, step.chosen), step.chosen.once_more(len(slots.entries))
        size.write(slots, grid.first_rows(step, step.chosen))
        for row in range(width - 1):
            if row == 1 and again is not step.chosen:
                size = self._size_of(slots, again)
                size.write(slots, grid.first_rows(step, again))
            if row:
                size.take(verification, row, ids[:count, row])
            ids[:count, row + 1] = draw(self._run(size, slots.rope)[:count])
        return verification, ids[:count]

    def _size_of(
        self,
        slots: DecodeSlots,
        chosen: ChosenStep | None,
        watched: bool = False,
        width: int = 1,
        packed: PackedTables | None = None,
    ) -> StepSize:
        """The size that serves a batch; made anew where what a graph knows has moved.

        Steps in which requests are ranked, or pages are on their way, have graphs of their own.
        """
        rows = rows_for(len(slots.batch))
        moves = moves_for(rows, slots.lanes)
        regime = slots.batch[0].positions.regime
        form = chosen.form if chosen is not None else ()
        of_packed = None if packed is None else packed.ranked
        key = (id(slots), rows, moves, regime, slots.promoted, watched, width, of_packed, form)
        size = self._sizes.get(key)
        # A longer request than ever moves the table of positions.
        positions, reach = self.rotary.fixed(slots.longest), slots.reach
        same = (
            size is not None
            and size.entries is slots.entries
            and size.positions is positions
            and size.reach is reach
            and size.knows(chosen)
        )
        if size is None or not same:
            self._sizes.pop(key, None)
            self._forget_moved(slots, chosen)
            if len(self._sizes) >= _MOST_SIZES:
                del self._sizes[next(iter(self._sizes))]
            tables = slots.chosen_tables(chosen) if chosen is not None else None
            known = slots.entries, reach, positions, rows, moves
            size = self._sizes[key] = StepSize(*known, tables, form, width, packed)
            size.queries = query_room(self.spec, rows) if watched else None
        size.reads(packed)
        return size

    def _forget_moved(self, slots: DecodeSlots, chosen: ChosenStep | None) -> None:
        """Lets go of graphs that know bounds which lie elsewhere now: these take up much room."""
        for key, size in list(self._sizes.items()):
            if key[0] == id(slots) and not size.knows(chosen):
                del self._sizes[key]

    def _run(self, size: StepSize, rope: RopeTable) -> torch.Tensor:
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

    def _forward(self, size: StepSize, rope: RopeTable) -> torch.Tensor:
        tables = size.tables()
        return forward(self.spec, self.pages, tables, rope, self.workspace, size.queries)

    def _try(self, size: StepSize, rope: RopeTable) -> torch.Tensor:
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

    def _capture(self, size: StepSize, rope: RopeTable) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with captured(graph, pool=self._pool):
                size.logits = self._forward(size, rope)
        except RuntimeError as error:
            if is_shortage(error):
                # There may be room another time: once more from a first step on.
                size.tried = False
            else:
                self._give_up(error)
            return
        self._pool, self._first = graph.pool(), self._first or graph
        size.graph = graph

    def _give_up(self, error: RuntimeError) -> None:
        self.capturable = False
        _log.warning("decode steps are launched one kernel at a time: %s", error)

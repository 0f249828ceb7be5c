"""`RoundGrid`: where the rows of a round lie, as many of each request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvweave.runner.decode.chosen_step import ChosenStep
from kvweave.runner.decode.slots import Step, StepRows
from kvweave.runner.kv.tables import Int32


@dataclass(frozen=True)
class RoundGrid:
    """The rows of a round of B requests, W of each, over T tables.

    tokens i32 [B, W], of which the first are known; positions i32 [B, W]; slots i32 [T, B, W, 2]. A
    request with fewer rows has its last one's position in the others, which are written nowhere.
    """

    tokens: Int32
    positions: Int32
    slots: Int32

    @staticmethod
    def of(step: Step) -> RoundGrid:
        """The rows of a step of several tokens a request."""
        made, counts = step.made, step.counts
        assert counts is not None
        row = np.arange(int(counts.max()))
        at = (np.cumsum(counts) - counts)[:, None] + np.minimum(row, counts[:, None] - 1)
        slots: Int32 = made.slots[:, at]
        slots[:, row >= counts[:, None]] = -1
        return RoundGrid(step.tokens[at], made.positions[at], slots)

    @property
    def width(self) -> int:
        """W: the most rows of a request."""
        return int(self.positions.shape[1])

    def all_rows(self, step: Step) -> Step:
        """The rows of a verification, which moves no entries."""
        made = step.made
        slots = self.slots.reshape(len(self.slots), -1, 2)
        none = made.places[:0], made.moved[:0]
        rows = StepRows(self.positions.reshape(-1), slots, made.spans, *none)
        return Step(self.tokens.reshape(-1), rows)

    def first_rows(self, step: Step, chosen: ChosenStep) -> Step:
        """The first row of each request, and all entries that the step moves."""
        made = step.made
        rows = StepRows(*self.column(0), made.spans, made.places, made.moved)
        return Step(np.ascontiguousarray(self.tokens[:, 0]), rows, chosen)

    def column(self, row: int) -> tuple[Int32, Int32]:
        """Positions i32 [B] and slots i32 [T, B, 2] of one row of each request."""
        some = np.ascontiguousarray(self.slots[:, :, row])
        return np.ascontiguousarray(self.positions[:, row]), some

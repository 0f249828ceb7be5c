"""Hidden states of some rows between two layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvweave.errors import InvalidArgument
from kvweave.plan import Rows
from kvweave.runner.kv.tables import RowMemo, same_rows, send_index
from kvweave.runner.model.layer import RowGrid


@dataclass
class Hidden:
    """Hidden states of `rows` (sorted positions), padded on their grid: [padded, E]."""

    rows: Rows
    grid: RowGrid
    states: torch.Tensor
    _found: RowMemo[torch.Tensor] = field(default_factory=lambda: RowMemo(4), repr=False)

    def index_of(self, rows: Rows) -> torch.Tensor:
        """Where a subset of the rows is among them, for `index_select`.

        # Errors
        `InvalidArgument` when a row has no hidden state here.
        """
        return self._found.get(rows, self._find)

    def _find(self, rows: Rows) -> torch.Tensor:
        index = np.searchsorted(self.rows, rows)
        inside = index < len(self.rows)
        if not inside.all() or not np.array_equal(self.rows[index], rows):
            raise InvalidArgument(
                "layer plan: expected rows that the layer before computed, "
                f"got {int(len(rows) - np.isin(rows, self.rows).sum())} others"
            )
        return send_index(self.states.device, index)

    def narrow(self, rows: Rows, index: torch.Tensor | None = None) -> Hidden:
        """The states of a subset of the rows, packed; `index` where it is known already."""
        if same_rows(rows, self.rows):
            return self
        chosen = self.index_of(rows) if index is None else index
        states = self.grid.real(self.states).index_select(0, chosen)
        return Hidden(rows, RowGrid.packed(len(rows)), states)

    def since(self, position: int) -> Hidden:
        """The rows at or after a position (a view)."""
        first = int(np.searchsorted(self.rows, position))
        cut, grid = self.grid.since(first)
        return Hidden(self.rows[first:], grid, self.states[cut:])

    def merge(self, other: Hidden) -> Hidden:
        """The union of two disjoint sets of rows, in order of position."""
        rows = np.concatenate((self.rows, other.rows))
        order = np.argsort(rows, kind="stable")
        states = torch.cat((self.grid.real(self.states), other.grid.real(other.states)))
        sorted_states = states.index_select(0, send_index(states.device, order))
        return Hidden(rows[order], RowGrid.packed(len(rows)), sorted_states)

"""Which tokens the rows of one forward compute, as a rectangle of ids and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave.adapters.transformers.kv_geometry import KvGeometry
from kvweave.cache import KvRequest
from kvweave.errors import Unsupported
from kvweave.plan import Rows
from kvweave.runner.kv.tables import Int32, send_index

Bools = npt.NDArray[np.bool_]
Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StepRows:
    """The rectangle [B, n] of one forward over B rows.

    Each row's positions stand at its right end in order, so the last column is the last token of
    every row; what is left of them are dummies, whose K, V go nowhere and whose attention is 0.
    `computed`: the positions of each row. `ids` and `positions` i32 [B, n] are what the model is
    given; `real` and `written` bool [B, n]: no dummies, and those whose K, V go into pages.
    """

    computed: list[Rows]
    ids: Int32
    positions: Int32
    real: Bools
    written: Bools

    @staticmethod
    def of(
        requests: Sequence[KvRequest], written: Sequence[Rows], wanted: Sequence[int], columns: int
    ) -> StepRows:
        """Rows whose `written` positions are computed, and the last `wanted` ones of each.

        n is the most that a row computes, or `columns`, whichever is more.
        """
        computed = [
            np.union1d(rows, np.arange(r.length - last, r.length)).astype(np.int32)
            for rows, last, r in zip(written, wanted, requests, strict=True)
        ]
        shape = len(computed), max(columns, *map(len, computed))
        ids = np.zeros(shape, np.int32)
        positions, real, is_written = ids.copy(), ids.astype(bool), ids.astype(bool)
        for number, (rows, request) in enumerate(zip(computed, requests, strict=True)):
            # A dummy is the row's first token, so that no model meets an id that it does not know.
            tokens = request.tokens
            ids[number], start = tokens[0], shape[1] - len(rows)
            ids[number, start:], positions[number, start:] = tokens[rows], rows
            real[number, start:] = True
            is_written[number, start:] = np.isin(rows, written[number], assume_unique=True)
        return StepRows(computed, ids, positions, real, is_written)

    @property
    def ends(self) -> Int32:
        """Where the computed positions of each row end, one row behind the other: [B + 1]."""
        return np.cumsum([0, *map(len, self.computed)], dtype=np.int32)

    @property
    def is_decode(self) -> bool:
        """Whether every row computes one position."""
        return all(len(rows) == 1 for rows in self.computed)


class RowVectors:
    """Which of the vectors that a layer hands over for a rectangle are of real rows, or written."""

    def __init__(self, rows: StepRows, geometry: KvGeometry) -> None:
        self._shape, self._geometry = rows.ids.shape, geometry
        parts = (_index(geometry.device, kept) for kept in (rows.real, rows.written))
        self._real, self._written = parts
        self.writes = bool(rows.written.any())

    def queries(self, vectors: Vectors) -> torch.Tensor:
        """The queries [R, H, D] of the real rows."""
        return _some(_flat(vectors[0]), self._real)

    def new(self, vectors: Vectors) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [W, G, D] of those that are written."""
        _, k, v = vectors
        return _some(_flat(k), self._written), _some(_flat(v), self._written)

    def spread(self, out: torch.Tensor) -> torch.Tensor:
        """Attention [R, H, D] of real rows as that of all [B, n, H, D], 0 for dummies."""
        rows, columns = self._shape
        if self._real is not None:
            none = out.new_zeros((rows * columns, *out.shape[1:]))
            out = none.index_copy_(0, self._real, out)
        return out.view(rows, columns, *out.shape[1:])

    def check(self, layer: int, vectors: Vectors) -> None:
        """Refuses what pages do not hold.

        # Errors
        `Unsupported` for keys or values of another size than the pages', or of a layer too many.
        """
        geometry, (rows, columns) = self._geometry, self._shape
        expected = (rows, geometry.kv_heads, columns, geometry.head_dim)
        for name, given in zip(("keys", "values"), vectors[1:], strict=True):
            if tuple(given.shape) != expected or not 0 <= layer < geometry.layers:
                raise Unsupported(
                    f"layer {layer} of {geometry.layers}: expected {name} {list(expected)}, "
                    f"got {list(given.shape)}"
                )


def _index(device: torch.device, kept: Bools) -> torch.Tensor | None:
    """The true ones of [B, n] counted row by row, i64; None for all."""
    return None if kept.all() else send_index(device, np.flatnonzero(kept)).long()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, n, D] as [B · n, heads, D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _some(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return x if index is None else x.index_select(0, index)

"""One forward of a model over pages: which tokens its rows compute, and the tables of its layers.

A forward is a rectangle [B, n]. Each row's positions stand at its right end in order, so the last
column is the last token of every row; what is left of them are dummies, whose K, V go nowhere and
whose attention is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.transformers.live_rows import LiveRows
from kvweave.adapters.transformers.ranked_rows import RankedRows
from kvweave.errors import Unsupported
from kvweave.plan import Rows
from kvweave.runner.kv.tables import send, send_index
from kvweave.runner.model.sinks import beside_sinks

Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
States = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Attends:
    """The constants of a layer's attention; `sinks` [H] as `beside_sinks` takes them."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class PagedStep:
    """The tables of one forward.

    `ids` and `positions` i64 [B, n] are what the model is given. `written` are the positions of
    each row whose K, V go into pages; of the last `wanted` positions of each row the outputs are
    wanted too, where KV is there already. n is the most that a row computes, or `columns` where all
    are wanted, so that the outputs have the caller's shape. With `ranked`, a step of one token a
    row reads of each layer without a window those pages that its queries rank first.
    """

    def __init__(
        self,
        live: LiveRows,
        written: Sequence[Rows],
        wanted: Sequence[int],
        columns: int,
        ranked: RankedRows | None = None,
    ) -> None:
        self.pool = live.pool
        device = self.pool.geometry.device
        requests = [row.request for row in live.rows]
        computed = [
            np.union1d(rows, np.arange(r.length - last, r.length)).astype(np.int32)
            for rows, last, r in zip(written, wanted, requests, strict=True)
        ]
        self.rows, self.columns = len(computed), max(columns, *map(len, computed))
        ids = np.zeros((self.rows, self.columns), np.int32)
        positions, is_real, is_written = ids.copy(), ids.astype(bool), ids.astype(bool)
        for number, (rows, request) in enumerate(zip(computed, requests, strict=True)):
            # A dummy is the row's first token, so that no model meets an id that it does not know.
            tokens = request.tokens
            ids[number], start = tokens[0], self.columns - len(rows)
            ids[number, start:], positions[number, start:] = tokens[rows], rows
            is_real[number, start:] = True
            is_written[number, start:] = np.isin(rows, written[number], assume_unique=True)
        self._is_decode = all(len(rows) == 1 for rows in computed)
        slots = [r.slots(rows) for r, rows in zip(requests, written, strict=True) if len(rows)]
        entries = [request.entries() for request in requests]
        tables = (
            ids,
            positions,
            np.concatenate(computed),
            np.concatenate([np.zeros((0, 2), np.int32), *slots]),
            np.concatenate(entries),
            np.cumsum([0, *map(len, computed)], dtype=np.int32),
            np.cumsum([0, *map(len, entries)], dtype=np.int32),
        )
        sent = send(device, *tables)
        self.ids, self.positions = (torch.as_tensor(table).long() for table in sent[:2])
        self._places, self._slots, self._entries, self._row_ends, self._entry_ends = sent[2:]
        self._real, self._written = (_index(device, kept) for kept in (is_real, is_written))
        self._ranked = None
        if ranked is not None and self._is_decode:
            placed = self._entries, self._entry_ends
            self._ranked = ranked.rank(live.rows, entries, placed)

    def attend(self, layer: int, vectors: Vectors, how: Attends) -> torch.Tensor:
        """Writes K, V of a layer and attends: q [B, H, n, D], k, v [B, G, n, D] → [B, n, H, D].

        # Errors
        As `states`.
        """
        out = beside_sinks(self.states(layer, vectors, how), how.sinks)
        if self._real is not None:
            none = out.new_zeros((self.rows * self.columns, *out.shape[1:]))
            out = none.index_copy_(0, self._real, out)
        return out.view(self.rows, self.columns, *out.shape[1:])

    def states(self, layer: int, vectors: Vectors, how: Attends) -> States:
        """Writes K, V of a layer: attention [R, H, D] of its R real rows and log-sum-exp [R, H].

        # Errors
        `Unsupported` for keys or values of another size than the pages', or of a layer too many;
        `InvalidArgument` for what ops do not take, such as a tensor whose gradient is wanted.
        """
        geometry = self.pool.geometry
        _, key, value = vectors
        expected = (self.rows, geometry.kv_heads, self.columns, geometry.head_dim)
        for name, given in (("keys", key), ("values", value)):
            if tuple(given.shape) != expected or not 0 <= layer < geometry.layers:
                raise Unsupported(
                    f"layer {layer} of {geometry.layers}: expected {name} {list(expected)}, "
                    f"got {list(given.shape)}"
                )
        q, k, v = (_flat(x) for x in vectors)
        if self._written is None or len(self._written):
            new = _some(k, self._written), _some(v, self._written)
            ops.write_pages(self.pool.pages, layer, *new, self._slots)
        kv = ops.PagedKv(
            self.pool.pages,
            layer,
            geometry.kv_heads,
            how.scale,
            self.pool.rope,
            how.window,
            how.softcap,
        )
        queries, ends, space = _some(q, self._real), self._entry_ends, self.pool.workspace
        read = queries, self._places, self._entries, kv
        if self._is_decode:
            if self._ranked is not None and how.window is None:
                entries, ends, chosen = self._ranked.of(queries, kv)
                read = queries, self._places, entries, chosen
            return ops.attend_decode(*read, entry_offsets=ends, workspace=space)
        rows = self._row_ends
        return ops.attend_prefill(*read, row_offsets=rows, entry_offsets=ends, workspace=space)


def _index(device: torch.device, kept: np.ndarray) -> torch.Tensor | None:
    """The true ones of [B, n] counted row by row, i64; None for all."""
    return None if kept.all() else send_index(device, np.flatnonzero(kept)).long()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, n, D] as [B · n, heads, D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _some(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return x if index is None else x.index_select(0, index)

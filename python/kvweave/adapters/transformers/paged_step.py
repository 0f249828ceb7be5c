"""One forward of a model over pages: what attends for its layers, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.transformers.live_rows import LiveRows
from kvweave.adapters.transformers.ranked_rows import RankedRows
from kvweave.adapters.transformers.step_rows import RowVectors, StepRows, Vectors
from kvweave.plan import Rows
from kvweave.runner.kv.tables import send
from kvweave.runner.model.sinks import beside_sinks

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
        rows = StepRows.of(requests, written, wanted, columns)
        self._vectors, self._is_decode = RowVectors(rows, self.pool.geometry), rows.is_decode
        slots = [r.slots(rows) for r, rows in zip(requests, written, strict=True) if len(rows)]
        entries = [request.entries() for request in requests]
        tables = (
            rows.ids,
            rows.positions,
            np.concatenate(rows.computed),
            np.concatenate([np.zeros((0, 2), np.int32), *slots]),
            np.concatenate(entries),
            rows.ends,
            np.cumsum([0, *map(len, entries)], dtype=np.int32),
        )
        sent = send(device, *tables)
        self.ids, self.positions = (torch.as_tensor(table).long() for table in sent[:2])
        self._places, self._slots, self._entries, self._row_ends, self._entry_ends = sent[2:]
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
        return self._vectors.spread(out)

    def states(self, layer: int, vectors: Vectors, how: Attends) -> States:
        """Writes K, V of a layer: attention [R, H, D] of its R real rows and log-sum-exp [R, H].

        # Errors
        As `RowVectors.check`; `InvalidArgument` for what ops do not take, such as a tensor whose
        gradient is wanted.
        """
        self._vectors.check(layer, vectors)
        if self._vectors.writes:
            new = self._vectors.new(vectors)
            ops.write_pages(self.pool.pages, layer, *new, self._slots)
        kv = ops.PagedKv(
            self.pool.pages,
            layer,
            self.pool.geometry.kv_heads,
            how.scale,
            self.pool.rope,
            how.window,
            how.softcap,
        )
        queries, ends, space = self._vectors.queries(vectors), self._entry_ends, self.pool.workspace
        read = queries, self._places, self._entries, kv
        if self._is_decode:
            if self._ranked is not None and how.window is None:
                entries, ends, chosen = self._ranked.of(queries, kv)
                read = queries, self._places, entries, chosen
            return ops.attend_decode(*read, entry_offsets=ends, workspace=space)
        rows = self._row_ends
        return ops.attend_prefill(*read, row_offsets=rows, entry_offsets=ends, workspace=space)

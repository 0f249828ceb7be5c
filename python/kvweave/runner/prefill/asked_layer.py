"""A layer of a request as a question's rows read it: see `kvweave.question`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from kvweave import ops
from kvweave.plan import Rows
from kvweave.runner.kv.request_kv import LayerLook, RequestKv
from kvweave.runner.kv.tables import Int32, send_index, within_runs
from kvweave.runner.prefill.probes import mass_from


@dataclass(frozen=True)
class AskedLayer:
    """One layer's KV of a request; all heads are here. It is looked at once."""

    kv: RequestKv
    layer: int

    @cached_property
    def _look(self) -> LayerLook:
        return self.kv.look(self.layer)

    @property
    def tokens(self) -> int:
        """T."""
        return self.kv.request.length

    @property
    def kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.kv.spec.kv_heads

    @property
    def query_heads(self) -> int:
        """Query heads of the layer."""
        return self.kv.spec.query_heads

    def table(self, positions: Rows) -> ops.Table:
        """Positions where the ops want them; the latest are kept."""
        return self.kv.probe_positions(positions)

    def mass(self, q: torch.Tensor, positions: ops.Table, head: int | None = None) -> torch.Tensor:
        """Mass of every token, f32 [T]; see `LayerKv`."""
        look = self._look
        if head is not None:
            reach = ops.Reach(self.kv.request.tables, self._head_rows()[head : head + 1])
            paged = replace(look.paged, kv_heads=1, window=None, reach=reach)
            look = replace(look, paged=paged)
        return mass_from(self.kv, look, q, positions)

    def value_norms(self, head: int) -> torch.Tensor:
        """The norm of each token's value in one KV head, f32 [T]; 0 where nothing is kept."""
        table, rank = (int(number) for number in self._head_rows()[head, :2])
        block, begin, end, position, _ = self._look.entries(table).T
        # Slots of an entry are consecutive, and so are the positions that they hold.
        lengths = end - begin
        within = within_runs(lengths)
        places = np.stack([np.repeat(of, lengths) for of in (block + rank, begin, position)])
        places[1:] += within
        pages = self._look.pages
        page, slot, token = send_index(pages.device, places).long()
        kept = pages[page, 1, slot].float().norm(dim=-1)
        return torch.zeros(self.tokens, device=pages.device).index_copy_(0, token, kept)

    def over_ranks(self, found: torch.Tensor) -> torch.Tensor:
        """What was measured itself: there is one rank."""
        return found

    def _head_rows(self) -> Int32:
        """Table, page in a block, window and sink of every KV head, i32 [G, 4]."""
        reach = self.kv.reach(self.layer)
        if reach is not None:
            return reach.heads
        rows: Int32 = self.kv.request.head_rows(self.layer)
        rows[:, 2] = self.kv.spec.layers[self.layer].window or 0
        return rows

"""The KV of a prompt that is computed in parts, whose first pages lie in the host's memory.

Rows of a part read all pages before them. Those of the device they read where they lie; of a layer
those at home are brought into scratch, some at a time, and what the rows see there joins by its
log-sum-exp. So a layer of some pages is all that a prompt has on the device of what has gone home.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvweave import ops
from kvweave.ops import Reach, Table
from kvweave.plan import Rows
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.states import States, merged_states
from kvweave.runner.kv.tables import Int32, KvTable, send

SCRATCH_PAGES = 1024
"""Pages of each of a layer's heads that are brought from the host's memory at once."""


class PartedKv(RequestKv):
    """Tables of a request that reads its own pages alone, some of them at home."""

    def grow(self, tokens: Int32) -> None:
        """Appends the tokens of the next part, and makes room for their KV.

        # Errors
        `PoolFull`; nothing has changed then.
        """
        self.request.append(tokens)
        self._table = self._rows = None
        self.copy()

    def spill(self, computed: int) -> None:
        """Has pages of so many tokens lie at home, but for the newest one's, where there is room.

        All of them have their KV.
        """
        pages = (computed - 1) // self.heads.cache.shape.page_tokens
        for host in self.host.values():
            host.spill(pages)
        self._table = None

    def whole(self) -> RequestKv:
        """The same request as what decodes from it reads it."""
        known = self.heads, self.pages, self.request, self.positions, self.rotates
        return RequestKv(*known, None, self.host)

    @property
    def table(self) -> KvTable:
        """Where what lies on the device does."""
        if self._table is None:
            made = [self.request.entries(table) for table in range(self.request.tables)]
            parts = [entries[entries[:, 0] >= 0] for entries in made]
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
            listed, ends = send(self.spec.device, np.concatenate(parts), offsets)
            self._table = KvTable(listed, ends)
        return self._table

    def own(self, rows: Rows, local_rows: Rows | None) -> None:
        """Nothing: nobody else holds blocks that were appended for rows."""

    def with_packed(self, layer: int, q: torch.Tensor, positions: Table, exact: States) -> States:
        """Attention and lse of rows q [R, H, D] over all; `exact` is that over the device's pages.

        # Errors
        `TransferFailed` for pages that could not be brought.
        """
        of, states = self.spec.layers[layer], exact
        for pages, reach, entries in self._scratch(layer):
            ends = np.asarray([0, len(entries), len(entries)], np.int32)
            listed, offsets = send(self.spec.device, entries, ends)
            heads, rope = self.spec.kv_heads, self.positions.rope
            kv = ops.PagedKv(pages, layer, heads, of.scale, rope, None, of.softcap, reach)
            some = ops.attend_prefill(q, positions, listed, kv, entry_offsets=offsets)
            states = merged_states(states, some)
        return states

    def _scratch(self, layer: int) -> Iterator[tuple[torch.Tensor, Reach, Int32]]:
        """Pages of a layer that lie at home, some at a time: with who reads them, and entries."""
        page_tokens = self.heads.cache.shape.page_tokens
        for budget, heads, ranks in self.heads.ranked(layer):
            host = self.host.get(budget.group)
            if host is None or not host.count:
                continue
            reach = self._reading(heads)
            for start in range(0, host.count, SCRATCH_PAGES):
                pages = _brought(host, slice(start, start + SCRATCH_PAGES), ranks)
                count = len(pages) // len(heads)
                entries = np.zeros((count, 5), np.int32)
                entries[:, 0] = len(heads) * np.arange(count)
                entries[:, 2] = page_tokens
                entries[:, 3] = page_tokens * np.arange(start, start + count)
                yield pages, reach, entries

    def _reading(self, heads: list[int]) -> Reach:
        """The reach over two tables, the second of which is empty: some heads read the first."""
        rows = np.zeros((self.spec.kv_heads, 4), np.int32)
        rows[:, 0] = 1
        rows[heads, 0] = 0
        rows[heads, 1] = np.arange(len(heads))
        return Reach(2, rows)


def _brought(host: HostPages, some: slice, ranks: list[int]) -> torch.Tensor:
    """Some pages at home [n · heads, 2, P, D], of heads that follow each other in a block."""
    return host.pool.contents(host.blocks()[some], range(ranks[0], ranks[-1] + 1))

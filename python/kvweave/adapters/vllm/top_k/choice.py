"""The pages that heads choose in a step, on the device: nothing here waits. Needs no vLLM.

B requests of one row each, L layers of which some heads choose, G KV heads, K the largest budget.
A request has T tables of its own, one where blocks are vLLM's. One that chooses has its choice anew
in each layer, from its own pages and query alone; it is read as an entry table of its own. One with
no more pages than a head reads has that head read its own table, and so do all heads of a request
whose prompt is not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.vllm.top_k.map import ALL, FEWEST, PageBudgets
from kvweave.always_read import RECENT_PAGES, SINK_PAGES

_EVERY_PAGE = 2**31 - 1
# Of a request, as scores are listed: its entries, an empty table, and what lies behind.
_SCORED, _NONE, _TABLES = 0, 1, 3


@dataclass(frozen=True)
class OwnTables:
    """The tables that a request has of its own, T = `count`, and how heads read them.

    Entries of the table `scored` name the bounds of all its pages. `heads` i32 [G, 4] of each of
    the L layers: (table, page in a block, window, sink), as `ops.Reach` has them. `bounds` i32 [G]
    of each: the rank of a head's bounds behind what the scored table names.
    """

    count: int
    scored: int
    heads: Sequence[np.ndarray]
    bounds: Sequence[np.ndarray]

    @staticmethod
    def of_blocks(layers: int, heads: int) -> OwnTables:
        """One table, of blocks that have a page for each head and bounds in the same order."""
        ranks = np.arange(heads, dtype=np.int32)
        rows = np.zeros((heads, 4), np.int32)
        rows[:, 1] = ranks
        return OwnTables(1, 0, [rows] * layers, [ranks] * layers)


class FarPages(Protocol):
    """Choices that are kept from step to step, of pages that may lie elsewhere than tables say."""

    def begin_step(self, chooses: torch.Tensor) -> torch.Tensor:
        """Which of the requests that choose, bool [B], do so anew in this step."""

    def kept(self, layer: int) -> ops.KeptPages | None:
        """What requests chose before, where that is kept."""

    def bring(
        self, layer: int, chosen: torch.Tensor, entries: torch.Tensor, workspace: ops.Workspace
    ) -> None:
        """Brings pages that are chosen, and has entries name where they are then.

        chosen i32 [B, G, K]: numbers of a request's pages, −1 behind them, of those who do not go
        on with what is kept; entries i32 [B, G, K, 5] are of all that is chosen.
        """


class RankedHeads:
    """The heads that choose, as the device knows them: the same in all steps.

    `budgets` i32 [L, G], of heads that read all more than there are pages. For `select_pages`
    there are as many rows as so many `requests` have.
    """

    def __init__(
        self,
        budgets: PageBudgets,
        device: torch.device,
        requests: int,
        own: OwnTables | None = None,
    ) -> None:
        layers = [budgets.of[layer] for layer in budgets.ranked]
        self.most = budgets.most
        self.heads = len(layers[0])
        pages = np.array(layers, np.int32)
        whole = pages == ALL
        every = torch.from_numpy(np.where(whole, np.int32(_EVERY_PAGE), pages)).to(device)
        self.budgets = every
        self.least = every.amin(1)
        selected = np.where(whole, np.int32(FEWEST), pages)
        self._selected = torch.from_numpy(np.tile(selected, (1, requests))).to(device)
        own = own or OwnTables.of_blocks(len(layers), self.heads)
        self.own, self.scored = own.count, own.scored
        self.listed = [
            _reach(_TABLES, np.where(row, _NONE, _SCORED), ranks)
            for row, ranks in zip(whole, own.bounds, strict=True)
        ]
        """Of each layer the tables that its heads score: an empty one, where they read all."""
        self.gathered = [ops.Reach(own.count, rows) for rows in own.heads]
        """Of each layer the tables of its heads' pages."""
        self.read = [_two_each(rows) for rows in own.heads]
        """The tables that heads read: two each, the second being the room behind the first."""
        tables = np.stack([rows[:, 0] for rows in own.heads])
        self.tables = torch.from_numpy(tables.astype(np.int64)).to(device)

    @property
    def layers(self) -> int:
        """L."""
        return len(self.budgets)

    def room(self, requests: int) -> int:
        """Entries that the choices of so many requests take."""
        return requests * self.heads * self.most

    def selected(self, layer: int, requests: int) -> torch.Tensor:
        """Budgets i32 [B · G] of a layer."""
        return self._selected[layer, : requests * self.heads]


def _reach(tables: int, table: np.ndarray, rank: np.ndarray) -> ops.Reach:
    rows = np.zeros((len(rank), 4), np.int32)
    rows[:, 0], rows[:, 1] = table, rank
    return ops.Reach(tables, rows)


def _two_each(heads: np.ndarray) -> ops.Reach:
    rows = heads.copy()
    rows[:, 0] = 2 * np.arange(len(heads))
    return ops.Reach(2 * len(heads), rows)


@dataclass
class StepChoice:
    """What the requests of one step choose among.

    `entries` i32 [N, 5]: from 0 on those of the requests' own tables, which `offsets` i32
    [B · T + 1] split, and from `begin` on room for what is chosen. `chooses` bool [B]: requests
    that may. `width`: the most pages of a request. `far`: pages that are elsewhere, if any may be.
    """

    heads: RankedHeads
    entries: torch.Tensor
    offsets: torch.Tensor
    begin: int
    chooses: torch.Tensor
    width: int
    far: FarPages | None = None
    _scored: torch.Tensor = field(init=False)
    _read: torch.Tensor = field(init=False)

    @property
    def requests(self) -> int:
        """B."""
        return len(self.chooses)

    @cached_property
    def _own(self) -> torch.Tensor:
        """Entries of the requests' own tables, as those that may be written are apart from them."""
        return self.entries[: self.begin]

    @cached_property
    def _room(self) -> torch.Tensor:
        return self.entries[self.begin :][: self.heads.room(self.requests)]

    def begin_step(self) -> None:
        """Lays out the tables of all layers, by the lengths of requests alone."""
        heads, requests = self.heads, self.requests
        begins = self.offsets[:-1].view(requests, heads.own)
        behind = self.offsets[1:].view(requests, heads.own)
        first, ends = begins[:, heads.scored], behind[:, heads.scored]
        counts = torch.where(self.chooses, ends - first, 0)
        scored = counts > heads.least[:, None]
        if self.far is not None:
            scored &= self.far.begin_step(self.chooses)
        # What is scored, or nothing, by layer and request; what is read, by head besides.
        listed = torch.where(scored, ends, first)
        self._scored = self.offsets.new_zeros((heads.layers, requests * _TABLES + 1))
        tables = self._scored[:, :-1].view(heads.layers, requests, _TABLES)
        tables[..., 0] = first
        tables[..., 1:] = listed[..., None]
        chosen = counts[:, None] > heads.budgets[:, None]
        numbers = torch.arange(requests * heads.heads, device=self.offsets.device)
        places = (numbers * heads.most + self.begin).view(requests, heads.heads).int()
        own = begins[:, heads.tables].transpose(0, 1), behind[:, heads.tables].transpose(0, 1)
        begin = torch.where(chosen, places, own[0])
        pages = heads.budgets.clamp(max=heads.most)[:, None]
        end = torch.where(chosen, places + pages, own[1])
        self._read = self.offsets.new_zeros((heads.layers, 2 * requests * heads.heads + 1))
        read = self._read[:, :-1].view(heads.layers, requests, heads.heads, 2)
        read[..., 0], read[..., 1] = begin, end

    def rank(
        self,
        layer: int,
        q: torch.Tensor,
        bounds: torch.Tensor,
        paged: ops.PagedKv,
        workspace: ops.Workspace,
    ) -> torch.Tensor:
        """The heads of a layer choose by queries q [B, H, D] and bounds of all pages.

        `layer` counts those in which some head chooses. Returns offsets of `entries` by which
        heads read them, with `RankedHeads.read`.
        """
        heads = self.heads
        pages = ops.BoundedPages(
            bounds,
            paged.cache.shape[2],
            0,
            heads.heads,
            paged.scale,
            paged.rope,
            paged.softcap,
            heads.listed[layer],
        )
        own, ends = self._own, self._scored[layer]
        scores, counts = ops.score_pages(q, own, pages, entry_offsets=ends, width=self.width)
        rows = (self.requests, heads.heads, heads.most)
        chosen, selected = ops.select_pages(
            scores.flatten(0, 1),
            counts.flatten(),
            heads.selected(layer, self.requests),
            sink=SINK_PAGES,
            recent=RECENT_PAGES,
            most=heads.most,
        )
        # Of a head that lists nothing nothing is selected.
        chosen = chosen.view(rows)
        ops.gather_entries(
            chosen,
            selected.view(rows[:2]),
            own,
            entry_offsets=self.offsets,
            reach=heads.gathered[layer],
            out=self._room,
            kept=None if self.far is None else self.far.kept(layer),
        )
        if self.far is not None:
            self.far.bring(layer, chosen, self._room.view(*rows, 5), workspace)
        return self._read[layer]

    def read_by(self, layer: int, paged: ops.PagedKv) -> ops.PagedKv:
        """A layer's pages, as heads read them through the tables of `rank`."""
        return replace(paged, reach=self.heads.read[layer])

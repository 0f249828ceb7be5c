"""The pages that heads choose in a step, on the device: nothing here waits. Needs no vLLM.

B requests of one row each, L layers of which some heads choose, G KV heads, K the largest budget.
A request that chooses has its choice anew in each layer, from its own pages and query alone; it is
read as an entry table of its own. One with no more pages than a head reads has that head read its
own table, and so do all heads of a request whose prompt is not done.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.vllm.top_k.map import ALL, FEWEST, PageBudgets
from kvweave.always_read import RECENT_PAGES, SINK_PAGES

_EVERY_PAGE = 2**31 - 1
# Of a request, as scores are listed: its entries, an empty table, and what lies behind.
_SCORED, _NONE, _TABLES = 0, 1, 3


class RankedHeads:
    """The heads that choose, as the device knows them: the same in all steps.

    `budgets` i32 [L, G], of heads that read all more than there are pages. For `select_pages`
    there are as many rows as so many `requests` have.
    """

    def __init__(self, budgets: PageBudgets, device: torch.device, requests: int) -> None:
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
        numbers = np.arange(self.heads)
        self.listed = [_reach(_TABLES, np.where(row, _NONE, _SCORED), numbers) for row in whole]
        """Of each layer the tables that its heads score: an empty one, where they read all."""
        self.reach = _reach(2 * self.heads, 2 * numbers, numbers)
        """The tables that heads read: two each, the second being the room behind the first."""

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


@dataclass
class StepChoice:
    """What the requests of one step choose among.

    `entries` i32 [N, 5]: from 0 on those of the requests' own tables, which `offsets` i32 [B + 1]
    split, and from `begin` on room for what is chosen. `chooses` bool [B]: requests that may.
    `width`: the most pages of a request.
    """

    heads: RankedHeads
    entries: torch.Tensor
    offsets: torch.Tensor
    begin: int
    chooses: torch.Tensor
    width: int
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
        first, ends = self.offsets[:-1], self.offsets[1:]
        counts = torch.where(self.chooses, ends - first, 0)
        # What is scored, or nothing, by layer and request; what is read, by head besides.
        listed = torch.where(counts > heads.least[:, None], ends, first)
        self._scored = self.offsets.new_zeros((heads.layers, requests * _TABLES + 1))
        tables = self._scored[:, :-1].view(heads.layers, requests, _TABLES)
        tables[..., 0] = first
        tables[..., 1:] = listed[..., None]
        chosen = counts[:, None] > heads.budgets[:, None]
        numbers = torch.arange(requests * heads.heads, device=self.offsets.device)
        places = (numbers * heads.most + self.begin).view(requests, heads.heads).int()
        begin = torch.where(chosen, places, first[:, None])
        pages = heads.budgets.clamp(max=heads.most)[:, None]
        end = torch.where(chosen, places + pages, ends[:, None])
        self._read = self.offsets.new_zeros((heads.layers, 2 * requests * heads.heads + 1))
        read = self._read[:, :-1].view(heads.layers, requests, heads.heads, 2)
        read[..., 0], read[..., 1] = begin, end

    def rank(
        self, layer: int, q: torch.Tensor, bounds: torch.Tensor, paged: ops.PagedKv
    ) -> torch.Tensor:
        """The heads of a layer choose by queries q [B, H, D] and bounds of all pages.

        `layer` counts those in which some head chooses. Returns offsets of `entries` by which
        heads read them, with `RankedHeads.reach`.
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
        ops.gather_entries(
            chosen.view(rows),
            selected.view(rows[:2]),
            own,
            entry_offsets=ends,
            reach=heads.listed[layer],
            out=self._room,
        )
        return self._read[layer]

    def read_by(self, paged: ops.PagedKv) -> ops.PagedKv:
        """A layer's pages, as heads read them through the tables of `rank`."""
        return replace(paged, reach=self.heads.reach)

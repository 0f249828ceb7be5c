"""Which packed pages the top-K heads of a batch read (MosaicKV, section 5.1).

A head that chooses reads the packed pages that its query scores highest by their bounds, beside all
that lies in exact pages. The two newest are always read: what decode steps read exactly reaches
into them. What was chosen stays until the next ranking; pages that are packed since are read
besides. Requests are ranked at their first step and every so many from then on, as over exact
pages. What is chosen are numbers in a request's list of packed entries, which only grows, and which
stays as it is when a text is packed finally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.always_read import RECENT_PAGES
from kvweave.ops import Reach, RopeTable, Workspace
from kvweave.packed_page import PAGE_TOKENS
from kvweave.power_of_two import power_of_two
from kvweave.runner.decode.chosen_texts import ChosenTexts, Listed
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.page_budget import PageBudget
from kvweave.runner.kv.states import States
from kvweave.runner.kv.tables import Int32, send, send_index


@dataclass(frozen=True, eq=False)
class _Ranking:
    """Where it says which of B requests one budget ranks in a step.

    `due` bool [B]. `offsets` i32 [2 B + 1]: two tables a request, of which the first are its packed
    entries, `width` at most, or none of one that is not due.
    """

    due: torch.Tensor
    offsets: torch.Tensor
    width: int

    @staticmethod
    def of(requests: int, width: int, device: torch.device) -> _Ranking:
        """Of so many requests, with room for tables of so many entries, or somewhat more."""
        offsets = torch.zeros(2 * requests + 1, dtype=torch.int32, device=device)
        due = torch.zeros(requests, dtype=torch.bool, device=device)
        return _Ranking(due, offsets, power_of_two(width))

    def write(self, due: npt.NDArray[np.bool_], counts: Int64) -> None:
        """Says who of a batch is due, each of which has so many entries."""
        spans = np.zeros(len(self.offsets), np.int32)
        ends = np.cumsum(counts)
        # An empty table begins and ends where its entries do.
        spans[1 : 1 + 2 * len(due)] = np.repeat(ends, 2)
        spans[0 : 2 * len(due) : 2] = np.where(due, ends - counts, ends)
        spans[2 * len(due) :] = ends[-1] if len(ends) else 0
        device = self.due.device
        (offsets,) = send(device, spans)
        self.offsets.copy_(torch.as_tensor(offsets))
        whole = np.zeros(len(self.due), np.int32)
        whole[: len(due)] = due
        self.due.copy_(send_index(device, whole))


Ranked = tuple[bool, ...]
"""Of each budget whether anybody is ranked by it."""


@dataclass(frozen=True, eq=False)
class ChosenPacked:
    """What the heads of B requests choose of packed pages in a step: see `PackedChoice`.

    `rows` i64 [B] of what they have chosen. `rankings` by budget, None where nobody is due.
    `texts`: where what they choose among lies, where some may be packed finally.
    """

    of: PackedChoice
    rows: torch.Tensor
    rankings: tuple[_Ranking | None, ...]
    texts: ChosenTexts | None

    @property
    def ranked(self) -> Ranked:
        """By which budgets heads choose anew."""
        return tuple(ranking is not None for ranking in self.rankings)

    def lies_at(self, other: ChosenPacked) -> bool:
        """Whether all of it lies where another has it."""
        pairs = zip(self.rankings, other.rankings, strict=True)
        same = self.rows is other.rows and self.texts is other.texts
        return same and all(own is its for own, its in pairs)

    def states(
        self,
        layer: int,
        called: tuple[torch.Tensor, torch.Tensor],
        listed: Listed,
        rope: RopeTable,
        workspace: Workspace | None,
    ) -> list[States]:
        """Attention and lse of `called`, queries [B, H, D] and positions, over what was chosen.

        Heads that are to choose anew do so by these queries; others than these see nothing here.
        `listed`: entries in the pool. Of texts that are packed finally there is a part for each
        format.
        """
        choice, pool, texts = self.of, self.of.pool, self.texts
        (q, positions), (entries, offsets) = called, listed
        among = entries if texts is None else texts.listed[0]
        for budget, ranking in zip(pool.heads.budgets, self.rankings, strict=True):
            if ranking is not None:
                choice.rank(layer, budget, ranking, (q, self.rows), among, rope)
        pages, selected = (
            table[:, layer].index_select(0, self.rows) for table in (choice.chosen, choice.selected)
        )
        reading = choice.reading[layer]
        if texts is not None:
            reaches = choice.listing, reading, choice.by_page
            known = (pages, selected), called, listed, reaches, rope, workspace
            return list(texts.states(layer, pool, *known))
        own, ends = ops.gather_entries(
            pages, selected, entries, entry_offsets=offsets, reach=choice.listing
        )
        kv = pool.read(layer, pool.layers[layer], rope, reading)
        return [ops.attend_packed(q, positions, own, kv, entry_offsets=ends, workspace=workspace)]


def chosen_at_most(pool: PackedPool) -> int:
    """How many packed entries a head of a pool has chosen at most."""
    return max(budget.pages + _since(budget) for budget in pool.heads.budgets)


def _since(budget: PageBudget) -> int:
    """Pages that are packed between two rankings."""
    return -(-budget.every // PAGE_TOKENS)


class PackedChoice:
    """What the top-K heads of requests that decode together have chosen of their packed entries.

    `chosen` i32 [R, L, G, W], of which the first `selected` i32 [R, L, G] count: none of a head
    that does not choose. The first row is nobody's. Of each row and budget `_ranked` i64 is the
    position of the newest token when it was ranked, −1 for never, `_listed` i64 the entries then,
    and `_told` i64 those of which `chosen` has been told.
    """

    def __init__(self, pool: PackedPool) -> None:
        self.pool = pool
        heads = pool.heads
        shape, device = heads.budget_of.shape, pool.device
        self._masks = [
            torch.from_numpy(heads.budget_of == number).to(device)
            for number in range(len(heads.budgets))
        ]
        self._since = [_since(budget) for budget in heads.budgets]
        self._width = chosen_at_most(pool)
        self.chosen = torch.zeros((0, *shape, self._width), dtype=torch.int32, device=device)
        self.selected = torch.zeros((0, *shape), dtype=torch.int32, device=device)
        self._ranked = np.zeros((0, len(heads.budgets)), np.int64)
        self._listed = np.zeros((0, len(heads.budgets)), np.int64)
        self._told = np.zeros((0, len(heads.budgets)), np.int64)
        self._rows: dict[Decoding, int] = {}
        # By how many requests there are tables of: the rows of those in a step, whom each budget
        # ranks in it, and what it reads.
        self._index: dict[int, tuple[Int64, torch.Tensor]] = {}
        self._rankings: dict[tuple[int, int], _Ranking] = {}
        self._steps: dict[tuple[int, Ranked], ChosenPacked] = {}
        count = pool.kv_heads
        every = np.arange(count, dtype=np.int32)
        self.listing = Reach(2, np.zeros((count, 4), np.int32))
        by_page = np.zeros((count, 4), np.int32)
        by_page[:, 0] = 2 * every
        self.by_page = Reach(2 * count, by_page)
        self._scoring, self.reading = [], []
        # Of each layer the heads i64 that have a budget.
        self._choosing: list[dict[PageBudget, torch.Tensor]] = []
        for layer in range(pool.cache.shape.layers):
            rows = np.zeros((count, 4), np.int32)
            rows[:, 1] = layer * count + every
            self._scoring.append(Reach(2, rows))
            tables = rows.copy()
            tables[:, 0] = 2 * every
            self.reading.append(Reach(2 * count, tables))
            named = {budget: self._sent(heads.choosing(layer, budget)) for budget in heads.budgets}
            self._choosing.append(named)

    def forget(self, sequence: Decoding) -> None:
        """Lets go of what a request has chosen."""
        self._rows.pop(sequence, None)

    def step(
        self,
        batch: Sequence[Decoding],
        positions: Int32,
        counts: Int64,
        texts: ChosenTexts | None,
        requests: int,
    ) -> ChosenPacked:
        """What a step says of its requests, whose newest tokens are at positions i32 [B].

        `counts` [B]: packed entries of each, which lie one behind the other; `texts` as
        `ChosenPacked` has them. Those of `requests` that are not in the batch choose nothing. Where
        the same budgets rank it is the same object as long as nothing lies elsewhere.
        """
        rows = np.array([self._row(sequence) for sequence in batch], np.int64)
        rankings = []
        for number, budget in enumerate(self.pool.heads.budgets):
            due = self._due(number, budget, rows, positions, counts)
            ranking = self._ranking(number, due, counts, requests) if due.any() else None
            rankings.append(ranking)
        for number, sequence in enumerate(batch):
            if any(counts[number] > budget.pages for budget in self.pool.heads.budgets):
                assert sequence.packed is not None
                sequence.packed.read_in_part(int(positions[number]))
        index = self._index_of(rows, requests)
        made = ChosenPacked(self, index, tuple(rankings), texts)
        known = self._steps.get((requests, made.ranked))
        if known is None or not known.lies_at(made):
            self._steps[requests, made.ranked] = known = made
        return known

    def _ranking(
        self, number: int, due: npt.NDArray[np.bool_], counts: Int64, requests: int
    ) -> _Ranking:
        """Whom a budget ranks among so many requests, where it was said before if there is room."""
        width = int(counts[due].max())
        ranking = self._rankings.get((number, requests))
        if ranking is None or ranking.width < width:
            ranking = _Ranking.of(requests, width, self.pool.device)
            self._rankings[number, requests] = ranking
        ranking.write(due, counts)
        return ranking

    def _index_of(self, rows: Int64, requests: int) -> torch.Tensor:
        """Rows of requests i64 [requests] on the device, where those of earlier steps lay."""
        whole = np.zeros(requests, np.int64)
        whole[: len(rows)] = rows
        before, index = self._index.get(requests, (None, None))
        if before is None or not np.array_equal(before, whole):
            sent = self._sent(whole)
            index = sent if index is None else index.copy_(sent)
            self._index[requests] = whole, index
        return self._index[requests][1]

    def _due(
        self, number: int, budget: PageBudget, rows: Int64, positions: Int32, counts: Int64
    ) -> npt.NDArray[np.bool_]:
        """Whom a budget ranks; others read what was packed since besides."""
        ranked, listed = self._ranked[rows, number], self._listed[rows, number]
        many, age, since = counts > budget.pages, positions - ranked, counts - listed
        kept = many & (ranked >= 0) & (age >= 0) & (age < budget.every)
        kept &= (since >= 0) & (since <= self._since[number]) & (listed >= budget.pages)
        due: npt.NDArray[np.bool_] = many & ~kept
        more = self._told[rows, number] != counts
        for at in np.flatnonzero(kept & more).tolist():
            chosen = budget.pages + int(since[at])
            self._read_besides(number, int(rows[at]), budget.pages, int(listed[at]), chosen)
        for at in np.flatnonzero(~many & more).tolist():
            self._read_besides(number, int(rows[at]), 0, 0, int(counts[at]))
        self._ranked[rows[~many], number], self._told[rows, number] = -1, counts
        self._ranked[rows[due], number] = positions[due]
        self._listed[rows[due], number] = counts[due]
        for row in rows[due].tolist():
            self.selected[row].masked_fill_(self._masks[number], budget.pages)
        return due

    def _read_besides(self, number: int, row: int, at: int, first: int, selected: int) -> None:
        """Has heads of a budget read the entries from `first` on behind `at` others."""
        mask, chosen = self._masks[number], self.chosen[row]
        step = torch.arange(selected - at, dtype=torch.int32, device=chosen.device)
        some = chosen[:, :, at:selected]
        some.copy_(torch.where(mask[:, :, None], first + step, some))
        self.selected[row].masked_fill_(mask, selected)

    def rank(
        self,
        layer: int,
        budget: PageBudget,
        ranking: _Ranking,
        asking: tuple[torch.Tensor, torch.Tensor],
        entries: torch.Tensor,
        rope: RopeTable,
    ) -> None:
        """Has the heads of a layer that have a budget choose for those of B requests who are due.

        `asking`: queries [B, H, D], and the rows i64 [B] of what they have chosen.
        """
        pool, heads = self.pool, self._choosing[layer][budget]
        if not len(heads):
            return
        assert pool.bounds is not None
        of_layer, count, (q, rows) = pool.layers[layer], pool.kv_heads, asking
        pages = ops.BoundedPages(
            pool.bounds,
            PAGE_TOKENS,
            layer,
            count,
            of_layer.scale,
            rope,
            of_layer.softcap,
            self._scoring[layer],
            budget.score,
        )
        scores, counts = ops.score_pages(
            q, entries, pages, entry_offsets=ranking.offsets, width=ranking.width
        )
        budgets = torch.full_like(counts, budget.pages).flatten()
        best, _ = ops.select_pages(
            scores.flatten(0, 1), counts.flatten(), budgets, recent=RECENT_PAGES, most=budget.pages
        )
        best = best.view(len(q), count, -1).index_select(1, heads)
        chosen, at = self.chosen[:, layer, :, : budget.pages], (rows[:, None], heads[None])
        chosen[at] = torch.where(ranking.due[:, None, None], best, chosen[at])

    def _row(self, sequence: Decoding) -> int:
        """The row of a request; one that comes anew has chosen nothing."""
        if sequence in self._rows:
            return self._rows[sequence]
        taken = {0, *self._rows.values()}
        row = next(number for number in range(len(taken) + 1) if number not in taken)
        if row >= len(self.chosen):
            more = max(2, len(self.chosen))
            # What is chosen lies elsewhere then.
            self._steps.clear()
            self.chosen, self.selected = (
                torch.cat((table, table.new_zeros((more, *table.shape[1:]))))
                for table in (self.chosen, self.selected)
            )
            room = np.zeros((more, self._ranked.shape[1]), np.int64)
            known = self._ranked, self._listed, self._told
            self._ranked, self._listed, self._told = (
                np.concatenate((table, room)) for table in known
            )
        self._ranked[row] = self._told[row] = -1
        self._rows[sequence] = row
        return row

    def _sent(self, index: Int64) -> torch.Tensor:
        return send_index(self.pool.device, index).long()

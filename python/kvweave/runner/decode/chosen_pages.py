"""Which pages the top-K heads of a decode step read (FlexiCache, sections 3.1 and 3.2).

A top-K head keeps every token and reads the pages that its query scores highest by their bounds,
the first one and the newest always. What a head has chosen stays until its next ranking; pages
begun since are read besides.

Bounds are of the entries of a request's table, and kept while it decodes: of exactly the slots that
it lists, so that what it chooses does not depend on who else holds the same block. An entry's are
computed when it is first ranked, from what then lies in its page, and again when it has become
another. The last entry, which grows, is always read and needs none. Whoever rewrites tokens of a
request between two steps has to have it forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave._native import Reach
from kvweave.ops import RopeTable
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.reads import StepReach
from kvweave.runner.kv.heads import RECENT_PAGES, SINK_PAGES, HeadReads, PageBudget
from kvweave.runner.kv.tables import Int32
from kvweave.runner.model.model_spec import ModelSpec

_PAGES_AT_ONCE = 4096


@dataclass
class _Ranked:
    """What is known of one request's table of a group.

    `rows` [N, 5]: its entries but the last, when it was ranked last; `places` i64 [N]: where their
    bounds are kept. `position` of the newest token then, None before; `listed`: the entries then.
    `chosen` i32 [heads, K]: which of them each head of the group reads.
    """

    chosen: Int32
    rows: Int32 = field(default_factory=lambda: np.zeros((0, 5), np.int32))
    places: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    position: int | None = None
    listed: int = 0

    def holds(self, rows: Int32, position: int, every: int) -> bool:
        """Whether what was chosen is still to be read, beside the entries that have come since."""
        if self.position is None or len(rows) < self.listed:
            return False
        if not 0 <= position - self.position < every:
            return False
        first = rows[: len(self.rows), 3]
        return np.array_equal(first, self.rows[:, 3])


class _Bounds:
    """Bounds of the entries of a group's tables, a place for each: f32 [places, heads, 3, D]."""

    def __init__(self, heads: int, pages: torch.Tensor) -> None:
        self.heads = heads
        self.pages = pages
        self.values = torch.zeros(1, heads, 3, pages.shape[-1])
        self._free = [0]

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """So many places that are nobody's."""
        if (short := count - len(self._free)) > 0:
            old = len(self.values)
            more = max(short, old)
            self.values = torch.cat((self.values, torch.zeros(more, *self.values.shape[1:])))
            self._free.extend(range(old, old + more))
        taken, self._free = self._free[:count], self._free[count:]
        return np.asarray(taken, np.int64)

    def give_back(self, places: npt.NDArray[np.int64]) -> None:
        """Lets go of places."""
        self._free.extend(places.tolist())

    def compute(self, rows: Int32, places: npt.NDArray[np.int64]) -> None:
        """Bounds of the keys that lie in the slots of entries [N, 5], at so many places."""
        at_once = max(1, _PAGES_AT_ONCE // self.heads)
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            at = torch.from_numpy(places[some])
            self.values[at] = self._of(torch.from_numpy(rows[some].astype(np.int64)))

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        numbers = rows[:, :1] + torch.arange(self.heads)
        keys = (
            self.pages[numbers.reshape(-1), 0].float().view(*numbers.shape, *self.pages.shape[2:])
        )
        slot = torch.arange(keys.shape[2])
        held = (slot >= rows[:, 1:2]) & (slot < rows[:, 2:3])
        count = held.sum(1).view(-1, 1, 1)
        if bool(held.all()):
            least, most, summed = keys.amin(2), keys.amax(2), keys.sum(2, dtype=torch.float64)
        else:
            # NaN of a slot that is held stays NaN; what lies in others is not looked at.
            others = ~held[:, None, :, None]
            least = keys.masked_fill(others, torch.inf).amin(2)
            most = keys.masked_fill(others, -torch.inf).amax(2)
            summed = keys.masked_fill(others, 0.0).sum(2, dtype=torch.float64)
        return torch.stack((least, most, (summed / count).float()), 2)


@dataclass(frozen=True)
class _GroupStep:
    """A group's tables [N, 5] of each request in a step, and those that are ranked in it.

    `known` of each request; None where it lists no more than it may read. `due`: the numbers of
    the requests that are ranked. `entries` and `offsets`: their tables as `score_pages` wants them,
    the number of an entry's bounds in place of its block.
    """

    rows: list[Int32]
    known: list[_Ranked | None]
    due: list[int]
    entries: Int32
    offsets: Int32


class ChosenPages:
    """What the top-K heads of requests that decode together have chosen, and their bounds."""

    def __init__(self, heads: HeadReads, pages: torch.Tensor) -> None:
        self.spec = heads.spec
        self.heads = heads
        self.page_tokens = int(pages.shape[2])
        self.bounds = {b.group: _Bounds(b.heads, pages) for b in heads.budgets}
        self._known: dict[tuple[Decoding, int], _Ranked] = {}

    def forget(self, sequence: Decoding) -> None:
        """Lets go of a request, or of what it has chosen so far."""
        for group, bounds in self.bounds.items():
            known = self._known.pop((sequence, group), None)
            if known is not None:
                bounds.give_back(known.places)

    def step(
        self,
        batch: Sequence[Decoding],
        positions: Int32,
        entries: Int32,
        spans: Int32,
        reach: StepReach,
        rope: RopeTable,
    ) -> StepPages:
        """A step of requests whose newest tokens are at `positions` [B].

        Their tables lie at `spans` [B, T, 2] of `entries`. Bounds are brought up to date.
        """
        groups = {}
        for budget in self.heads.budgets:
            of_group = spans[:, budget.group].tolist()
            rows = [entries[begin:end] for begin, end in of_group]
            groups[budget.group] = self._group(budget, batch, positions.tolist(), rows)
        return StepPages(self, groups, entries, spans, reach, rope)

    def _group(
        self, budget: PageBudget, batch: Sequence[Decoding], at: list[int], tables: list[Int32]
    ) -> _GroupStep:
        known: list[_Ranked | None] = []
        due, asked = [], [np.zeros((0, 5), np.int32)]
        for number, (sequence, position, rows) in enumerate(zip(batch, at, tables, strict=True)):
            if len(rows) <= budget.pages:
                known.append(None)
                continue
            key = (sequence, budget.group)
            if key not in self._known:
                chosen = np.zeros((budget.heads, budget.pages), np.int32)
                self._known[key] = _Ranked(chosen)
            found = self._known[key]
            known.append(found)
            if not found.holds(rows, position, budget.every):
                due.append(number)
                asked.append(self._ranking(budget, found, rows, position))
        ends = np.cumsum([len(table) for table in asked], dtype=np.int32)
        return _GroupStep(tables, known, due, np.concatenate(asked), ends)

    def _ranking(self, budget: PageBudget, known: _Ranked, rows: Int32, position: int) -> Int32:
        """Brings a table's bounds up to date; its entries by the numbers of these."""
        bounds, whole = self.bounds[budget.group], rows[:-1]
        if (more := len(whole) - len(known.places)) > 0:
            known.places = np.concatenate((known.places, bounds.take(more)))
        elif more < 0:
            bounds.give_back(known.places[len(whole) :])
            known.places = known.places[: len(whole)]
        both = min(len(whole), len(known.rows))
        other = np.ones(len(whole), bool)
        other[:both] = (whole[:both] != known.rows[:both]).any(1)
        bounds.compute(whole[other], known.places[other])
        known.rows, known.position, known.listed = whole.copy(), position, len(rows)
        asked: Int32 = rows.copy()
        # The last entry is read whatever it scores.
        asked[:-1, 0] = known.places * budget.heads
        asked[-1, 0] = 0
        return asked


class StepPages:
    """One decode step: what each of its layers reads."""

    def __init__(
        self,
        chosen: ChosenPages,
        groups: dict[int, _GroupStep],
        entries: Int32,
        spans: Int32,
        reach: StepReach,
        rope: RopeTable,
    ) -> None:
        self.chosen = chosen
        self.groups = groups
        self.entries = entries
        self.spans = spans
        self.reach = reach
        self.rope = rope

    def read(self, layer: int, q: torch.Tensor) -> tuple[Int32, Int32, Reach]:
        """The entries, offsets and reach by which rows of queries q [B, H, D] read a layer."""
        reach = self.reach.chosen[layer]
        if reach is None:
            ends = np.append(self.spans, np.int32(0))
            return self.entries, ends, self.reach.reads[layer]
        parts, spans, end = [self.entries], [self.spans], len(self.entries)
        for budget, heads, ranks in self.chosen.heads.ranked(layer):
            step = self.groups[budget.group]
            if step.due:
                self._rank(budget, step, layer, q, heads, ranks)
            found = np.empty((len(step.rows), len(heads), 2), np.int32)
            for number, (rows, known) in enumerate(zip(step.rows, step.known, strict=True)):
                if known is None:
                    found[number] = self.spans[number, budget.group]
                    continue
                since = np.arange(known.listed, len(rows), dtype=np.int32)
                numbers = known.chosen[ranks]
                each = np.concatenate((numbers, np.tile(since, (len(heads), 1))), 1)
                parts.append(rows[each].reshape(-1, 5))
                borders = end + np.arange(len(heads) + 1) * each.shape[1]
                found[number, :, 0], found[number, :, 1] = borders[:-1], borders[1:]
                end = int(borders[-1])
            spans.append(found)
        ends = np.append(np.concatenate(spans, 1), np.int32(0))
        read: Int32 = np.concatenate(parts)
        return read, ends, reach

    def _rank(
        self,
        budget: PageBudget,
        step: _GroupStep,
        layer: int,
        q: torch.Tensor,
        heads: list[int],
        ranks: list[int],
    ) -> None:
        """What some heads of a layer choose anew, by the queries of the requests that are due."""
        spec: ModelSpec = self.chosen.spec
        bounds = self.chosen.bounds[budget.group]
        asking = q.view(len(q), spec.kv_heads, -1, q.shape[-1])[step.due][:, heads]
        pages = ops.BoundedPages(
            bounds.values.flatten(0, 1),
            self.chosen.page_tokens,
            layer,
            len(heads),
            spec.layers[layer].scale,
            self.rope,
            spec.layers[layer].softcap,
            Reach(1, np.asarray([(0, rank, 0, 0) for rank in ranks], np.int32)),
        )
        scores, counts = ops.score_pages(
            asking.flatten(1, 2), step.entries, pages, entry_offsets=step.offsets
        )
        budgets = np.full(counts.numel(), budget.pages, np.int32)
        chosen, _ = ops.select_pages(
            scores.flatten(0, 1),
            counts.flatten(),
            budgets,
            sink=SINK_PAGES,
            recent=RECENT_PAGES,
        )
        of_each = chosen.numpy().reshape(len(step.due), len(heads), budget.pages)
        for number, some in zip(step.due, of_each, strict=True):
            known = step.known[number]
            assert known is not None
            known.chosen[ranks] = some

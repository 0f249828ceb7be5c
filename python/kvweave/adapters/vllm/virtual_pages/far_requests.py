"""Which requests' pages lie in the host's memory, and where there. Needs no vLLM.

Heads that choose pages read few in a decode step (FlexiCache, section 3.3). So where blocks run
short, requests that decode have their full pages of such heads copied to the host's memory and give
the blocks back, but for slots, into which what is chosen is brought. A request's newest page stays,
and nothing returns before the request ends. Copies are made by the workers before the step for
which room was wanted; all here is numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvweave.adapters.vllm.virtual_pages.residency import Residency

_Rows = npt.NDArray[np.int32]
NOBODY = -1


@dataclass(frozen=True)
class FarChanges:
    """What changed for the workers, all i32; `copies` are made first.

    `copies` [N, 2]: virtual page, and the block of the host's memory that it is copied to. `begun`
    [K]: seats that were taken, of which nothing is known. `homes` [N, 3]: seat, number of a page of
    its request, and the block at home. `counts` [K, 3]: seat, how many pages lie at home, and a
    virtual page that is computed and nobody else's, or 0 where none lie there any more.
    `newest` [N, 2]: virtual page, and the seat whose request writes it, or `NOBODY`.
    """

    copies: _Rows
    begun: _Rows
    homes: _Rows
    counts: _Rows
    newest: _Rows


@dataclass
class _Seated:
    """A request of vLLM with a seat: its blocks at home, by number of its pages, if any.

    `prompt`: the tokens that it had when it was given its first blocks. `own`: the number of the
    first of its pages that no other request is ever given, as it says more than what prompts find.
    `newest`: pages that it wrote last.
    """

    request: Any
    prompt: int
    seat: int
    own: int
    homes: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)


class FarRequests:
    """Requests by how much of them lies at home, in `blocks` of the host's memory.

    Each has one of so many `seats`, by which workers keep what it has chosen and the slots that it
    may have; without one it stays on the device. `spilled`: pages copied so far.
    """

    def __init__(self, residency: Residency, blocks: int, seats: int) -> None:
        self.residency = residency
        self.blocks = blocks
        self.spilled = 0
        self._free = list(range(blocks - 1, -1, -1))
        self._seats = list(range(seats - 1, -1, -1))
        # Given back in this step: workers may still copy to these.
        self._leaving: list[int] = []
        self._of: dict[str, _Seated] = {}
        self._copies: dict[int, int] = {}
        self._begun: set[int] = set()
        self._homes: dict[tuple[int, int], int] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self._newest: dict[int, int] = {}

    @property
    def held(self) -> int:
        """Blocks of the host's memory that requests have."""
        return self.blocks - len(self._free) - len(self._leaving)

    @property
    def away(self) -> int:
        """Requests that have pages there."""
        return sum(1 for seated in self._of.values() if seated.homes)

    def at_home(self, name: str) -> int:
        """How many of a request's first pages lie at home."""
        seated = self._of.get(name)
        return 0 if seated is None else len(seated.homes)

    def know(self, request: Any, pages: Sequence[int]) -> None:
        """Takes note of a request of vLLM that has been given its first pages.

        One that may be gone on with from outside has no seat: it reads all of it again.
        """
        name: str = request.request_id
        if name in self._of or not self._seats or request.resumable:
            return
        layout, prompt = self.residency.layout, int(request.num_tokens)
        # Exact pages are found by others: see `top_k.prompt_prefix`.
        exact = min(budget for budget in layout.budgets if budget)
        own = max(prompt // layout.page_tokens, exact)
        self._of[name] = _Seated(request, prompt, self._seats.pop(), own)
        self._begun.add(self._of[name].seat)
        self.writes(name, pages)

    def make_room(
        self,
        lacking: Callable[[], int],
        pages_of: Callable[[str], Sequence[int]],
        findable: Callable[[int], bool],
    ) -> list[int]:
        """Has requests give up blocks until none are lacking, if that is possible.

        Those that free most go first; what several share stays. Returns the numbers of pages that
        can no longer be found; `findable` says which may be.
        """
        wanted, forgotten = lacking(), list[int]()
        if not wanted:
            return forgotten
        for name, end in self._plan(wanted, pages_of):
            forgotten += self._spill(name, pages_of(name), end, findable)
        return forgotten

    def _plan(self, wanted: int, pages_of: Callable[[str], Sequence[int]]) -> list[tuple[str, int]]:
        """Who gives up which first pages so that so many blocks are free; nobody if too few are."""
        blocks, gained = len(self._free), 0
        plan = []
        able = [(*self._gain(name, pages_of(name), blocks), name) for name in self._of]
        for gain, end, name in sorted((of for of in able if of[0] > 0), reverse=True):
            if gained >= wanted:
                break
            if end - self.at_home(name) > blocks:
                # Those before it have left less at home.
                gain, end = self._gain(name, pages_of(name), blocks)
            if gain > 0:
                plan.append((name, end))
                gained += gain
                blocks -= end - self.at_home(name)
        return plan if gained >= wanted else []

    def _gain(self, name: str, pages: Sequence[int], blocks: int) -> tuple[int, int]:
        """Blocks that a request may free, and how many of its first pages lie at home then.

        `blocks`: those at home that are left for it.
        """
        seated = self._of[name]
        begin, computed = len(seated.homes), seated.request.num_computed_tokens
        page_tokens = self.residency.layout.page_tokens
        end = min(computed // page_tokens, begin + blocks)
        # Where a transfer fails, the request is told apart by a page of its own: that comes first.
        decodes = computed >= seated.prompt and computed > seated.own * page_tokens
        if not decodes or end <= begin:
            return 0, begin
        return self.residency.gain(name, pages[:end], seated=begin > 0), end

    def _spill(
        self, name: str, pages: Sequence[int], end: int, findable: Callable[[int], bool]
    ) -> list[int]:
        seated = self._of[name]
        first = len(seated.homes)
        seat = None if first else seated.seat
        forgotten = self.residency.give_up(name, pages[:end], seat, findable)
        for number, page in enumerate(pages[first:end], first):
            block = self._free.pop()
            seated.homes.append(block)
            self._copies[block] = int(page)
            self._homes[seated.seat, number] = block
        self._counts[seated.seat] = end, int(pages[seated.own])
        self.spilled += end - first
        return forgotten

    def writes(self, name: str, pages: Sequence[int]) -> None:
        """Takes note of pages that a request was given: by the last one it is recognised."""
        seated = self._of.get(name)
        if seated is not None and pages:
            seated.newest.append(int(pages[-1]))
            self._newest[int(pages[-1])] = seated.seat

    def drop(self, name: str) -> None:
        """Gives back all that a request has here."""
        seated = self._of.pop(name, None)
        if seated is None:
            return
        if seated.homes:
            self.residency.leave_seat(seated.seat)
            self._counts[seated.seat] = 0, 0
        # Nobody reads what was to be copied with the next step.
        for block in seated.homes:
            self._copies.pop(block, None)
        self._homes = {at: block for at, block in self._homes.items() if at[0] != seated.seat}
        self._leaving += seated.homes
        self._seats.append(seated.seat)
        self._begun.discard(seated.seat)
        self._newest.update(dict.fromkeys(seated.newest, NOBODY))

    def take_changes(self) -> FarChanges:
        """What changed since this was last asked."""
        made = FarChanges(
            _rows([(page, block) for block, page in self._copies.items()], 2),
            np.array(sorted(self._begun), np.int32),
            _rows([(*at, block) for at, block in self._homes.items()], 3),
            _rows([(seat, *known) for seat, known in self._counts.items()], 3),
            _rows(list(self._newest.items()), 2),
        )
        self._free += self._leaving
        self._leaving = []
        for changes in (self._copies, self._begun, self._homes, self._counts, self._newest):
            changes.clear()
        return made


def _rows(rows: list[tuple[int, ...]], columns: int) -> _Rows:
    return np.array(rows, np.int32).reshape(-1, columns)

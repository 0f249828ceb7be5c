"""Who holds what: the virtual pages of each request, class by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvweave._native import VirtualPages
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout

_Rows = npt.NDArray[np.int32]


class Residency:
    """Holders of virtual pages over one arena.

    A request's pages are given by number, in the order of its tokens. Each class holds all of them
    until `advance` says which no row to come sees. What loses its last holder stays, where it can
    be found again, until its blocks are needed. `given_back`, by class: blocks that lost theirs to
    `advance`.
    """

    def __init__(self, layout: PageLayout, virtual_pages: int, seats: int = 0) -> None:
        """`seats`: requests that may have slots at a time, which are pages behind vLLM's."""
        self.layout = layout
        arena = layout.arena_pages(virtual_pages)
        numbers = virtual_pages + seats * layout.slots
        self.pages = VirtualPages(numbers, arena, layout.block_pages, layout.parts)
        self._virtual_pages = virtual_pages
        # By request and class: the first page behind the sink that is still held.
        self._first: dict[str, list[int]] = {}
        self._sinks = [layout.sink_pages(number) for number in self._classes()]
        spans = enumerate(layout.spans)
        self._windows = [(number, span.window) for number, span in spans if span.window is not None]
        self._nothing = _rows(())
        self._all = _rows((c, page) for c in self._classes() for page in range(1, virtual_pages))
        self.given_back = [0] * len(layout.spans)

    def resident_blocks(self) -> list[int]:
        """Blocks of each class, held or to be found again."""
        kept = self.pages.is_kept(self._all).reshape(len(self.layout.spans), -1).sum(1)
        return [int(count) * parts for count, parts in zip(kept, self.layout.parts, strict=True)]

    def lacking(self, fresh: int, hit: Sequence[int]) -> int:
        """Blocks that so many new pages lack at once, while those of a prefix hit are kept."""
        return max(fresh * sum(self.layout.parts) - self.pages.room_beside(self._seen(hit)), 0)

    def lacking_in_time(self, tokens: int, in_flight: int, hit: Sequence[int]) -> int:
        """Blocks that a request of so many tokens lacks to be computed, its windows moving on.

        A prefix hit counts among what it holds, and needs no room where others hold it too.
        """
        seen = self._seen(hit)
        room = self.pages.room_beside(self._nothing)
        hit_blocks = sum(self.layout.parts[number] for number, _ in seen.tolist())
        shared = hit_blocks - (room - self.pages.room_beside(seen))
        fresh = max(-(-tokens // self.layout.page_tokens) - len(hit), 0)
        at_once = fresh * sum(self.layout.parts) + hit_blocks
        most = min(at_once, self.layout.most_blocks(tokens, in_flight))
        return max(int(most - shared - room), 0)

    def extend(self, request: str, fresh: Sequence[int]) -> list[int]:
        """Gives a request new pages; returns the numbers of pages that can no longer be found.

        Errors: `PoolFull`.
        """
        if request not in self._first:
            self._first[request] = list(self._sinks)
        if not fresh:
            return []
        self.pages.take(_rows((c, page) for page in fresh for c in self._classes()))
        return self._forgotten()

    def _forgotten(self) -> list[int]:
        whole = [number for number, span in enumerate(self.layout.spans) if span.window is None]
        return [int(page) for number, page in self.pages.take_forgotten() if number in whole]

    @contextmanager
    def sparing(self, hit: Sequence[int]) -> Iterator[None]:
        """Has nobody lose what is kept of a prefix hit meanwhile, which nobody may hold yet."""
        seen = self._seen(hit)
        self.pages.hold(seen)
        try:
            yield
        finally:
            self.pages.release(seen, keep=True)

    def gain(self, request: str, pages: Sequence[int], *, seated: bool) -> int:
        """Blocks that are freed if a request gives up these first pages, as `give_up` does.

        What others hold too is not. `seated`: it has slots already.
        """
        slots = 0 if seated else self.layout.slots * len(self.layout.choosing)
        return self.pages.held_alone(_rows(self._given(request, pages))) - slots

    def give_up(
        self,
        request: str,
        pages: Sequence[int],
        seat: int | None,
        findable: Callable[[int], bool],
    ) -> list[int]:
        """Has heads that choose give up a request's first pages, which lie elsewhere from now on.

        `pages` are all first ones, and free more than slots take: see `gain`. `seat`: whose slots
        the request has from now on, None where it has some. Returns the numbers of pages that can
        no longer be found.
        """
        self._release(self._given(request, pages), findable)
        if seat is not None:
            self.pages.take(self._slots(seat))
        first = self._first[request]
        for number in self._choosing():
            first[number] = len(pages)
        return self._forgotten()

    def _given(self, request: str, pages: Sequence[int]) -> list[tuple[int, int]]:
        first = self._first[request]
        return [(c, page) for c in self._choosing() for page in pages[first[c] :]]

    def leave_seat(self, seat: int) -> None:
        """Gives the slots of a seat back."""
        self.pages.release(self._slots(seat), keep=False)

    def _slots(self, seat: int) -> _Rows:
        begin = self._virtual_pages + seat * self.layout.slots
        numbers = range(begin, begin + self.layout.slots)
        return _rows((c, page) for c in self._choosing() for page in numbers)

    def adopt(self, request: str, hit: Sequence[int]) -> None:
        """Gives a request the pages of a prefix hit: those of windows, what coming rows see."""
        self.pages.hold(self._seen(hit))
        computed = len(hit) * self.layout.page_tokens
        first = [min(self.layout.first_seen(c, computed), len(hit)) for c in self._classes()]
        self._first[request] = [max(a, b) for a, b in zip(first, self._sinks, strict=True)]

    def has_left(self, request: str, computed: int) -> bool:
        """Whether a request may hold pages that no row at or behind `computed` sees."""
        first = self._first.get(request)
        if first is None:
            return False
        page_tokens = self.layout.page_tokens
        for number, window in self._windows:
            if (computed - window + 1) // page_tokens > first[number]:
                return True
        return False

    def advance(
        self,
        request: str,
        pages: Sequence[int],
        computed: int,
        findable: Callable[[int], bool],
    ) -> None:
        """Gives up what no row at or behind `computed` sees; `findable` says of which page."""
        first = self._first.get(request, [])
        for number, start in enumerate(first):
            end = min(self.layout.first_seen(number, computed), len(pages))
            if end > start:
                held = self.pages.stats()["held"]
                self._release([(number, page) for page in pages[start:end]], findable)
                self.given_back[number] += held - self.pages.stats()["held"]
                first[number] = end

    def drop(self, request: str, pages: Sequence[int], findable: Callable[[int], bool]) -> None:
        """Gives up all that a request holds."""
        first = self._first.pop(request, None)
        if first is None:
            return
        held = [
            (number, page)
            for index, page in enumerate(pages)
            for number, start in enumerate(first)
            if index >= start or index < self.layout.sink_pages(number)
        ]
        self._release(held, findable)

    def longest_hit(self, pages: Sequence[int]) -> int:
        """How many of these pages, found one after another, a request can go on from."""
        count, classes = len(pages), list(self._classes())
        if not count:
            return 0
        kept = self.pages.is_kept(_rows((c, page) for c in classes for page in pages))
        # Per class and page: how many pages up to this one are kept without a gap.
        ends = np.arange(1, count + 1)
        gaps = np.where(kept.reshape(-1, count), 0, ends)
        runs = np.zeros((len(classes), count + 1), np.int64)
        runs[:, 1:] = ends - np.maximum.accumulate(gaps, axis=1)
        while count:
            computed = count * self.layout.page_tokens
            if all(self._goes_on(c, runs[c], count, computed) for c in classes):
                return count
            count -= 1
        return 0

    def _goes_on(self, number: int, runs: npt.NDArray[np.int64], count: int, computed: int) -> bool:
        sink = min(self.layout.sink_pages(number), count)
        window = count - min(self.layout.first_seen(number, computed), count)
        return bool(runs[sink] >= sink and runs[count] >= window)

    def _seen(self, hit: Sequence[int]) -> _Rows:
        if not hit:
            return self._nothing
        computed = len(hit) * self.layout.page_tokens
        return _rows(
            (number, page)
            for index, page in enumerate(hit)
            for number in self._classes()
            if index >= self.layout.first_seen(number, computed)
            or index < self.layout.sink_pages(number)
        )

    def _release(self, held: Sequence[tuple[int, int]], findable: Callable[[int], bool]) -> None:
        rows: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for at in held:
            rows[findable(at[1])].append(at)
        for keep, released in rows.items():
            if released:
                self.pages.release(_rows(released), keep=keep)

    def _classes(self) -> range:
        return range(len(self.layout.spans))

    def _choosing(self) -> list[int]:
        return [number for number in self._classes() if self.layout.budgets[number]]


def _rows(pairs: Iterable[tuple[int, int]]) -> _Rows:
    return np.array(list(pairs), np.int32).reshape(-1, 2)

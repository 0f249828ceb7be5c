"""Bounds and means of entries of a group's tables: of exactly the slots that each lists.

An entry's are computed from what lies in its page when it is asked about, so what is chosen by them
does not depend on who else holds the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.page_budget import PageBudget
from kvweave.runner.kv.tables import Int32, send, send_index

_PAGES_AT_ONCE = {"cpu": 4096, "cuda": 32768}

_SPARE = 4
"""A part of so many is made beside what is asked for, lest all move with every request."""


_PagesOf = Callable[[torch.Tensor, slice], torch.Tensor]
"""The keys and values [N · heads, 2, P, D] of entries [N, 5], and of which of them all.

Where means of values are not asked for, they may be keys alone [N · heads, 1, P, D].
"""


class KeptBounds:
    """Least and greatest keys of entries, a place for each: f32 [places, heads, 3, D].

    The third vector, which `score_pages` takes for means, is the mean key where the budget's pages
    are ranked by it, and else 0. Where they are not, of keys of 16 bits on a GPU bounds are
    [places, heads, 2, D] in the dtype of these, a third of the bytes: the least and the greatest of
    some numbers are two of them. Of an `fp8` budget they are float8_e4m3fn with `scales` uint8
    [places, heads], as `ops.PageBounds` rounds them: [places, heads, 2, D], or of one that ranks by
    means [places, heads, 1, D]. `pool`: host memory where pages may lie, by entries whose block is
    −1 − its number there.

    `means` [places, heads, 2, D], of a budget that estimates: mean keys and mean values as
    `estimate_pages` takes them. One of a value that is not finite has NaN for its mean key, so that
    nothing is estimated of the page.
    """

    def __init__(
        self, budget: PageBudget, pages: torch.Tensor, pool: HostPool | None = None
    ) -> None:
        self.budget = budget
        self.heads = budget.heads
        self.pages = pages
        self.pool = pool
        self.values, self.scales, self.means = self._zeros(1)
        self._free = np.zeros(1, np.int64)
        self._ranks = torch.arange(self.heads, device=pages.device)

    def _zeros(self, places: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Bounds, their scales and means of nothing."""
        pages, budget = self.pages, self.budget
        of_keys = pages.is_cuda and pages.element_size() == 2

        def zeros(vectors: int, dtype: torch.dtype) -> torch.Tensor:
            sizes = (places, self.heads, vectors, pages.shape[-1])
            return torch.zeros(sizes, dtype=dtype, device=pages.device)

        dtype = pages.dtype if of_keys else torch.float32
        means = zeros(2, dtype) if budget.estimate else None
        by_bounds = budget.score == "min-max"
        if budget.fp8:
            sizes = (places, self.heads)
            scales = torch.zeros(sizes, dtype=torch.uint8, device=pages.device)
            return zeros(2 if by_bounds else 1, torch.float8_e4m3fn), scales, means
        if of_keys and by_bounds:
            return zeros(2, dtype), None, means
        return zeros(3, torch.float32), None, means

    @property
    def free(self) -> Int64:
        """The places that are nobody's."""
        return self._free

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return self.values.nbytes + sum(
            part.nbytes for part in (self.scales, self.means) if part is not None
        )

    def make_room(self, wanted: int) -> None:
        """Has so many places, whosever they are; where there were fewer, some more.

        `values`, `scales` and `means` then are other tensors.
        """
        old = len(self.values)
        if wanted <= old:
            return
        places = max(wanted, old + old // _SPARE)
        before = self.values, self.scales, self.means
        self.values, self.scales, self.means = made = self._zeros(places)
        for part, of_old in zip(made, before, strict=True):
            if part is not None and of_old is not None:
                part[:old] = of_old
        self._free = np.concatenate((self._free, np.arange(old, places)))

    def take(self, count: int, wanted: int) -> Int64:
        """So many places that are nobody's.

        Where there are too few there is room for `wanted` afterwards: see `make_room`.
        """
        if count > len(self._free):
            self.make_room(max(len(self.values) - len(self._free) + count, wanted))
        given, self._free = self._free[:count], self._free[count:]
        return given

    def give_back(self, places: Int64) -> None:
        """Lets go of places."""
        self._free = np.concatenate((self._free, places))

    def compute(self, rows: Int32, places: Int64) -> None:
        """Bounds of the keys that lie in the slots of entries [N, 5], at so many places."""
        away: npt.NDArray[np.bool_] = rows[:, 0] < 0
        here = ~away
        if self.scales is not None and here.any():
            self._round(self.pages, rows[here, :3], places[here], self.scales)
        self._compute(rows[here], places[here], self._here)
        if self.pool is not None and away.any():
            listed = rows[away]
            home, pool = -1 - listed[:, 0], self.pool
            if self.scales is not None:
                self._round_away(pool, listed, places[away], self.scales)
            self._compute(listed, places[away], lambda _, some: pool.contents(home[some]))

    def _here(self, rows: torch.Tensor, _some: slice) -> torch.Tensor:
        pages = self.pages if self.means is not None else self.pages[:, :1]
        found: torch.Tensor = pages[(rows[:, :1] + self._ranks).reshape(-1)]
        return found

    def _round(self, pages: torch.Tensor, held: Int32, places: Int64, scales: torch.Tensor) -> None:
        """Bounds in e4m3 of what blocks of these pages hold, rows (block, begin, end)."""
        at = (places * self.heads).astype(np.int32)
        held_there, rows = send(pages.device, np.ascontiguousarray(held), at)
        values = self.values.flatten(0, 1)
        bounds = ops.PageBounds(values, held_there, rows, scales.flatten())
        ops.bound_pages(pages, bounds, pages=self.heads)

    def _round_away(
        self, pool: HostPool, listed: Int32, places: Int64, scales: torch.Tensor
    ) -> None:
        """The same of blocks that lie in host memory, some of them at a time."""
        at_once = max(1, _PAGES_AT_ONCE[self.pages.device.type] // self.heads)
        for start in range(0, len(listed), at_once):
            some = listed[start : start + at_once]
            home = -1 - some[:, 0]
            # The first block of pages is nobody's.
            found = pool.contents(np.concatenate((home[:1], home)))
            held = some[:, :3].copy()
            held[:, 0] = self.heads * np.arange(1, len(some) + 1)
            self._round(found, held, places[start : start + at_once], scales)

    def _compute(self, rows: Int32, places: Int64, pages_of: _PagesOf) -> None:
        if self.scales is not None and self.means is None:
            return
        device = self.pages.device
        vectors = self.heads if self.means is None else 2 * self.heads
        at_once = max(1, _PAGES_AT_ONCE[device.type] // vectors)
        (sent,) = map(torch.as_tensor, send(device, rows))
        at = send_index(device, places).long()
        partial: npt.NDArray[np.bool_] = rows[:, 2] - rows[:, 1] < self.pages.shape[2]
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            pages = pages_of(sent[some], some)
            held = self._held(sent[some]) if partial[some].any() else None
            if self.scales is None:
                self._put_exact(pages, held, at[some])
            if self.means is not None:
                for number, mean in enumerate(_finite_means_of(pages, held)):
                    self._put(self.means, number, at[some], mean)

    def _put_exact(self, pages: torch.Tensor, held: torch.Tensor | None, at: torch.Tensor) -> None:
        for number, bound in enumerate(_bounds_of(pages[:, 0], held)):
            self._put(self.values, number, at, bound)
        if self.budget.score == "mean":
            self._put(self.values, 2, at, _means_of(pages[:, :1], held)[:, 0])

    def _put(self, to: torch.Tensor, number: int, at: torch.Tensor, vectors: torch.Tensor) -> None:
        kept = vectors.to(to.dtype).view(-1, self.heads, vectors.shape[-1])
        to[:, :, number].index_copy_(0, at, kept)

    def _held(self, rows: torch.Tensor) -> torch.Tensor:
        """Which slots of the pages of entries [N, 5] these list: bool [N · heads, P]."""
        slot = torch.arange(self.pages.shape[2], device=rows.device)
        held = (slot >= rows[:, 1:2]) & (slot < rows[:, 2:3])
        return held[:, None].expand(-1, self.heads, -1).reshape(-1, len(slot))


def _bounds_of(keys: torch.Tensor, held: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest [N, D] of keys [N, P, D]; NaN where one is NaN.

    What lies in slots that are not `held` [N, P] is not looked at; None holds all.
    """
    if held is None:
        return torch.aminmax(keys, dim=1)
    others = ~held[:, :, None]
    least = keys.masked_fill(others, torch.inf).amin(1)
    return least, keys.masked_fill(others, -torch.inf).amax(1)


def _means_of(pages: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
    """Means f32 [N, V, D] over the slots of pages [N, V, P, D] that are `held`."""
    if held is None:
        return pages.mean(2, dtype=torch.float32)
    there = pages.masked_fill(~held[:, None, :, None], 0.0)
    return there.sum(2, dtype=torch.float32) / held.sum(1)[:, None, None]


def _finite_means_of(pages: torch.Tensor, held: torch.Tensor | None) -> Iterable[torch.Tensor]:
    """Mean keys and mean values [N, D] of pages [N, 2, P, D]: see `KeptBounds.means`."""
    keys, values = _means_of(pages, held).unbind(1)
    finite = values.isfinite().all(1, keepdim=True)
    return keys.masked_fill(~finite, torch.nan), values

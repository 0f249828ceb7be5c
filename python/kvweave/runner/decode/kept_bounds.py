"""Bounds of entries of a group's tables: of exactly the slots that each lists, on the device.

An entry's are computed from what lies in its page when it is asked about, so what is chosen by them
does not depend on who else holds the same block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.tables import Int32, send, send_index

_PAGES_AT_ONCE = {"cpu": 4096, "cuda": 32768}

_SPARE = 4
"""A part of so many is made beside what is asked for, lest all move with every request."""


_KeysOf = Callable[[torch.Tensor, slice], torch.Tensor]
"""The keys [N · heads, P, D] of entries [N, 5], and of which of them all."""


class KeptBounds:
    """Least and greatest keys of entries, a place for each: f32 [places, heads, 3, D].

    `heads`: the pages of a block. The third vector, which `score_pages` takes for means, is 0. Of
    keys of 16 bits on a GPU they are [places, heads, 2, D] in the dtype of these, a third of the
    bytes: the least and the greatest of some numbers are two of them. `pool`: host memory where
    pages may lie, by entries whose block is −1 − its number there.
    """

    def __init__(self, heads: int, pages: torch.Tensor, pool: HostPool | None = None) -> None:
        self.heads = heads
        self.pages = pages
        self.pool = pool
        self.values = self._zeros(1)
        self._free = np.zeros(1, np.int64)
        self._ranks = torch.arange(heads, device=pages.device)

    def _zeros(self, places: int) -> torch.Tensor:
        pages = self.pages
        alone = pages.is_cuda and pages.element_size() == 2
        sizes = (places, self.heads, 2 if alone else 3, pages.shape[-1])
        dtype = pages.dtype if alone else torch.float32
        return torch.zeros(sizes, dtype=dtype, device=pages.device)

    @property
    def free(self) -> Int64:
        """The places that are nobody's."""
        return self._free

    def take(self, count: int, wanted: int) -> Int64:
        """So many places that are nobody's.

        Where there are too few there is room for `wanted` afterwards, and some more: `values` then
        are another tensor.
        """
        if count > len(self._free):
            old = self.values
            taken = len(old) - len(self._free)
            places = max(taken + count, wanted, len(old) + len(old) // _SPARE)
            self.values = self._zeros(places)
            self.values[: len(old)] = old
            self._free = np.concatenate((self._free, np.arange(len(old), places)))
        given, self._free = self._free[:count], self._free[count:]
        return given

    def give_back(self, places: Int64) -> None:
        """Lets go of places."""
        self._free = np.concatenate((self._free, places))

    def compute(self, rows: Int32, places: Int64) -> None:
        """Bounds of the keys that lie in the slots of entries [N, 5], at so many places."""
        away: npt.NDArray[np.bool_] = rows[:, 0] < 0
        self._compute(rows[~away], places[~away], self._here)
        if self.pool is not None and away.any():
            listed = rows[away]
            home, pool = -1 - listed[:, 0], self.pool
            self._compute(listed, places[away], lambda _, some: pool.keys(home[some]))

    def _here(self, rows: torch.Tensor, _some: slice) -> torch.Tensor:
        keys: torch.Tensor = self.pages[(rows[:, :1] + self._ranks).reshape(-1), 0]
        return keys

    def _compute(self, rows: Int32, places: Int64, keys_of: _KeysOf) -> None:
        device = self.pages.device
        at_once = max(1, _PAGES_AT_ONCE[device.type] // self.heads)
        (sent,) = map(torch.as_tensor, send(device, rows))
        at = send_index(device, places).long()
        partial: npt.NDArray[np.bool_] = rows[:, 2] - rows[:, 1] < self.pages.shape[2]
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            keys = keys_of(sent[some], some)
            found = self._of(keys, sent[some], bool(partial[some].any()))
            for number, bound in enumerate(found):
                kept = bound.to(self.values.dtype).view(-1, self.heads, bound.shape[-1])
                self.values[:, :, number].index_copy_(0, at[some], kept)

    def _of(
        self, keys: torch.Tensor, rows: torch.Tensor, partial: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest [N · heads, D] of keys [N · heads, P, D]; NaN where one is NaN."""
        if not partial:
            return torch.aminmax(keys, dim=1)
        slot = torch.arange(keys.shape[1], device=keys.device)
        held = (slot >= rows[:, 1:2]) & (slot < rows[:, 2:3])
        # What lies in other slots is not looked at.
        others = ~held[:, None].expand(-1, self.heads, -1).reshape(len(keys), -1, 1)
        least = keys.masked_fill(others, torch.inf).amin(1)
        return least, keys.masked_fill(others, -torch.inf).amax(1)

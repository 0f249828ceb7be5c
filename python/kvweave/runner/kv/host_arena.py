"""Host memory that is reserved as it comes to be needed, at addresses that stay.

All pages lie behind one another from the beginning, so that a kernel finds any of them from one
address; but only a range of addresses is taken then. Memory behind them is reserved in chunks: it
is touched, and pinned where a GPU is to read it, before the first page of a chunk is written.
"""

from __future__ import annotations

import errno
import math
import mmap
import sys
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from kvweave.errors import OutOfMemory
from kvweave.runner.kv.near_device import cpus_near, do_on
from kvweave.runner.kv.pinned import register, unregister
from kvweave.runner.kv.tables import Int32

CHUNK_BYTES = 64 << 20
"""Memory that is reserved at once: a part of a second for touching and pinning it."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_POPULATE_WRITE = 23
"""Linux's `MADV_POPULATE_WRITE`: touch all pages, and say so if there is no memory for them."""


class HostArena:
    """Pages of the host of these `sizes` [pages, ...], all 0: for the `device` to read and write.

    `pages` are all of them. `pinned`: whether a GPU may read what has been reserved by now; on the
    CPU there is nothing to pin. `reserved` bytes are memory, the others addresses alone. The first
    chunk is reserved at once, so that a driver which pins nothing is known from the beginning.

    # Errors
    `OutOfMemory` for what the host has no addresses for, or not even the memory of the first chunk.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        size = math.prod(sizes) * dtype.itemsize
        self.device = device
        self._memory = _addresses(size)
        # The tensors of all pages keep this one alive, and it the addresses.
        held = np.frombuffer(self._memory, np.uint8)
        self.pages = torch.from_numpy(held).view(dtype).view(tuple(sizes))
        self._address = self.pages.data_ptr()
        self._page_bytes = size // sizes[0]
        whole = -(-CHUNK_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._starts = np.append(np.arange(0, size, whole), size)
        self._there = np.zeros(len(self._starts) - 1, bool)
        self._registered: list[int] = []
        weakref.finalize(held, unregister, self._registered)
        self._cpus = cpus_near(device)
        self.pinned = device.type == "cuda"
        self._reserve(0)

    @property
    def reserved(self) -> int:
        """Bytes that are memory."""
        return int(np.diff(self._starts)[self._there].sum())

    def reserve(self, first: Int32, count: int) -> None:
        """Sees to memory for runs of `count` pages that begin with these [N].

        # Errors
        `OutOfMemory`: what was reserved by then stays, and another time there may be more.
        """
        if not len(first) or self._there.all():
            return
        begin = first.astype(np.int64) * self._page_bytes
        ends = begin + count * self._page_bytes - 1
        runs = (np.searchsorted(self._starts, at, side="right") - 1 for at in (begin, ends))
        needed = np.zeros(len(self._there) + 1, np.int64)
        for at, step in zip(runs, (1, -1), strict=True):
            np.add.at(needed, at + (step < 0), step)
        for chunk in np.flatnonzero((needed.cumsum()[:-1] > 0) & ~self._there).tolist():
            self._reserve(chunk)

    def _reserve(self, chunk: int) -> None:
        start, end = (int(at) for at in self._starts[chunk : chunk + 2])
        do_on(self._cpus, lambda: self._take(start, end - start))
        self._there[chunk] = True

    def _take(self, start: int, size: int) -> None:
        """Touches a chunk, and pins it if all before could be pinned."""
        try:
            self._memory.madvise(_POPULATE_WRITE, start, size)
        except OSError as error:
            # An older system touches pages when they are first written.
            if error.errno != errno.EINVAL:
                raise _no_memory(size, error) from error
        if not self.pinned:
            return
        self.pinned = register(self._address + start, size, self.device)
        if self.pinned:
            self._registered.append(self._address + start)


def _addresses(size: int) -> mmap.mmap:
    """A range of addresses without memory.

    # Errors
    `OutOfMemory` where the process may not have so many.
    """
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise _no_memory(size, error) from error


def _no_memory(size: int, error: Exception) -> OutOfMemory:
    expected, got = f"{size} bytes more of the host's", str(error)
    return OutOfMemory(f"host memory: expected {expected}, got {got}", expected=expected, got=got)

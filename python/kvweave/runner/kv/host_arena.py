"""Host memory that is reserved as it comes to be needed, at addresses that stay.

All pages lie behind one another from the beginning, so that a kernel finds any of them from one
address; but only a range of addresses is taken then. Memory behind them is reserved in chunks: it
is touched, and pinned where a GPU is to read it, before the first page of a chunk is written. A
thread may do so ahead of who needs it, so that nobody waits for that.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from kvweave.errors import KvweaveError, OutOfMemory
from kvweave.runner.kv.near_device import cpus_near, do_on
from kvweave.runner.kv.pinned import register, unregister
from kvweave.runner.kv.tables import Int32
from kvweave.runner.worker import Job, Worker

_log = logging.getLogger(__name__)

AHEAD_BYTES = 1 << 30
"""Memory that a GPU's steps find reserved before they need it, where nobody says how much."""

CHUNK_BYTES = 64 << 20
"""Memory that is reserved at once: a part of a second for touching and pinning it."""

_TOUCHED_BYTES = 2 << 20
"""Memory that is touched at once, .3 to .9 ms: who needs memory of the system meanwhile waits."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_POPULATE_WRITE = 23
"""Linux's `MADV_POPULATE_WRITE`: touch all pages, and say so if there is no memory for them."""


class HostArena:
    """Pages of the host of these `sizes` [pages, ...], all 0: for the `device` to read and write.

    `pages` are all of them. `pinned`: whether a GPU may read what has been reserved by now; on the
    CPU there is nothing to pin. `reserved` bytes are memory, the others addresses alone. The first
    chunk is reserved at once, so that a driver which pins nothing is known from the beginning.
    `ahead`: all up to so many bytes behind the last that were asked for is reserved by a thread.

    # Errors
    `OutOfMemory` for what the host has no addresses for, or not even the memory of the first chunk.
    """

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, ahead: int = 0
    ) -> None:
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
        self._ahead = ahead
        # Who reserves, of whoever needs a chunk and the thread that goes ahead.
        self._reserving = threading.Lock()
        self._needed = 1
        # Whether that thread has something to do; of whoever has `_planning`.
        self._going, self._planning = False, threading.Lock()
        self._reserve(0)
        self._worker = Worker("host memory")
        weakref.finalize(self, self._worker.close, finish=False)
        self._go_ahead()

    @property
    def first(self) -> torch.Tensor:
        """What was reserved at once when it was made, in bytes."""
        return self.pages.view(-1).view(torch.uint8)[: int(self._starts[1])]

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
        chunks = np.flatnonzero(needed.cumsum()[:-1] > 0)
        self._needed = max(self._needed, int(chunks[-1]) + 1)
        for chunk in chunks[~self._there[chunks]].tolist():
            self._reserve(chunk)
        self._go_ahead()

    def wait(self) -> None:
        """Returns when nothing is being reserved ahead any more."""
        self._worker.wait()

    def _reserve(self, chunk: int) -> None:
        with self._reserving:
            if not self._there[chunk]:
                self.pinned = do_on(self._cpus, lambda: self._take(chunk))
                self._there[chunk] = True

    def _take(self, chunk: int, *otherwise: str) -> bool:
        """Touches a chunk, and pins it if all before could be pinned; whether it is.

        `otherwise`: what the log says of a refusal, as `register` takes it.
        """
        start, end = (int(at) for at in self._starts[chunk : chunk + 2])
        self._touch(start, end)
        known = self._address + start, end - start, self.device
        if not self.pinned or not register(*known, *otherwise):
            return False
        self._registered.append(self._address + start)
        return True

    def _touch(self, start: int, end: int) -> None:
        for at in range(start, end, _TOUCHED_BYTES):
            size = min(_TOUCHED_BYTES, end - at)
            error = _advise(self._address + at, size, _POPULATE_WRITE)
            # An older system touches pages when they are first written.
            if error == errno.EINVAL:
                return
            if error:
                refused = OSError(error, os.strerror(error))
                raise _no_memory(size, refused) from refused

    def _go_ahead(self) -> None:
        """Has the next chunk be reserved aside, while there are fewer than are to be ready."""
        needed = int(self._starts[self._needed])
        until = int(np.searchsorted(self._starts, needed + self._ahead))
        missing = np.flatnonzero(~self._there[:until])
        may = self._ahead > 0 and (self.pinned or self.device.type != "cuda")
        if not len(missing) or not may:
            return
        with self._planning:
            if self._going:
                return
            self._going = True
        self._worker.submit(_Ahead(self, int(missing[0])))

    def reserve_ahead(self, chunk: int) -> None:
        """Reserves a chunk that nobody needs yet. One that is not pinned is left to who needs it.

        # Errors
        `OutOfMemory`.
        """
        with self._reserving:
            if not self._there[chunk]:
                took = do_on(self._cpus, lambda: self._take(chunk, "no more is pinned ahead"))
                self._there[chunk] = took == self.pinned
        if not self._there[chunk]:
            self._ahead = 0

    def went_ahead(self, error: BaseException | None) -> None:
        """Goes on to the next chunk; where there was no memory it is left to who needs it."""
        with self._planning:
            self._going = False
        if error is None:
            self._go_ahead()
        else:
            self._ahead = 0


class _Ahead(Job):
    """A chunk of an arena that is reserved before anybody needs it, and then the next one."""

    def __init__(self, arena: HostArena, chunk: int) -> None:
        # An arena that nobody else has is let go of.
        self._arena, self._chunk = weakref.ref(arena), chunk

    def run(self) -> None:
        if (arena := self._arena()) is not None:
            arena.reserve_ahead(self._chunk)

    def end(self, error: BaseException | None) -> None:
        # Of other errors of ours the only one is that of a worker that has been closed.
        if isinstance(error, OutOfMemory) or not isinstance(error, KvweaveError | None):
            _log.warning("host memory: no more is reserved ahead: %s", error)
        if (arena := self._arena()) is not None:
            arena.went_ahead(error)


def _advise(address: int, size: int, advice: int) -> int:
    """Tells the system what will be with memory; returns an error's number, 0 for none.

    Python's other threads go on meanwhile, who would wait for `mmap.madvise`.
    """
    system = ctypes.CDLL(None, use_errno=True)
    refused = system.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if refused else 0


def _addresses(size: int) -> mmap.mmap:
    """A range of addresses without memory.

    # Errors
    `OutOfMemory` where the process may not have so many.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise _no_memory(size, error) from error
    if _HUGE_PAGES is not None:
        # Large pages are touched and pinned sooner; a system without them says so.
        with suppress(OSError):
            memory.madvise(_HUGE_PAGES)
    return memory


def _no_memory(size: int, error: Exception) -> OutOfMemory:
    expected, got = f"{size} bytes more of the host's", str(error)
    return OutOfMemory(f"host memory: expected {expected}, got {got}", expected=expected, got=got)

"""What a process holds while a soak goes on: bytes of it, of its allocators, and objects."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MIB = 1 << 20
MOST_GROWTH = 8 * MIB
"""Memory that a process may seem to gain over the second half: allocators give back in pieces."""


def resident_bytes(process: str = "self") -> int:
    """Bytes of a process that lie in memory; `OSError` where it has ended."""
    with open(f"/proc/{process}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Memory:
    """Memory of this process, of the GPU and in objects, each time that all was idle.

    `allocated`: bytes that the C library has given out, 0 where it does not say.
    """

    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)

    def look(self, at: float) -> None:
        """Takes a sample, once garbage was collected and free memory was given back."""
        import torch

        gc.collect()
        give_free_back()
        self.seconds.append(at)
        self.resident.append(resident_bytes())
        self.device.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
        self.objects.append(len(gc.get_objects()))
        self.allocated.append(allocated_bytes())

    def slope(self, samples: list[int]) -> float:
        """What a line through the second half of samples rises by in a second."""
        half = len(samples) // 2
        if len(samples) - half < 3:
            return 0.0
        seconds = np.array(self.seconds[half:])
        return float(np.polyfit(seconds, np.array(samples[half:], float), 1)[0])

    def growth(self, samples: list[int]) -> float:
        """What that line rises by over the second half."""
        half = len(samples) // 2
        return self.slope(samples) * (self.seconds[-1] - self.seconds[half]) if samples else 0.0

    def complaints(self) -> list[str]:
        """Where memory is not flat."""
        looked = {"resident": self.resident, "device": self.device, "allocated": self.allocated}
        grown = {what: self.growth(samples) for what, samples in looked.items()}
        return [
            f"{what} memory grew by {size / MIB:.1f} MiB over the second half"
            for what, size in grown.items()
            if size > MOST_GROWTH
        ]


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc (malloc.h): in use are `uordblks`, and `hblkhd` in own maps."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """Bytes that the C library has given out and not got back; 0 where it is not glibc."""
    mallinfo2 = _of_glibc("mallinfo2")
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def give_free_back() -> None:
    """Has glibc give to the system what it keeps of freed memory: each thread's heap keeps some."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _of_glibc(name: str) -> Any:
    """A function of glibc; None where it is another library."""
    return getattr(ctypes.CDLL(None), name, None)

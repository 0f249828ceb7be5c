"""A GPU on which this process finds little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def room_on_gpu(size: int) -> Iterator[None]:
    """Lets torch take `size` bytes more than it has now, and no others."""
    torch.cuda.empty_cache()
    most = torch.cuda.memory_reserved() + size
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(most / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def no_room_on_gpu() -> Iterator[None]:
    """Lets torch take nothing, what it holds unused being taken first."""
    with room_on_gpu(0):
        taken = []
        for power in range(30, 8, -1):
            try:
                while True:
                    taken.append(torch.empty(1 << power, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass
        yield

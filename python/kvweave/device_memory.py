"""Memory of a host or device: pages of an arena, tables sent, what is raised without room."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import OutOfMemory

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_SHORTAGES = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def needs_memory(
    what: str, wanted: str = "memory for it"
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Marks a function, called `what`, whose tensors may not fit where they shall lie.

    It raises `OutOfMemory` then: that `wanted` was expected, and torch's words for what it tried to
    get.
    """

    def marked(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def named(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            try:
                return function(*arguments, **options)
            except RuntimeError as error:
                if isinstance(error, OutOfMemory) or not is_shortage(error):
                    raise
                got = str(error)
                text = f"{what}: expected {wanted}, got {got}"
                raise OutOfMemory(text, expected=wanted, got=got) from error

        return named

    return marked


def arena_pages(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Pages [pages, 2, P, D] of an arena, all 0.

    # Errors
    `OutOfMemory` when the device has no room for them.
    """
    wanted = f"{math.prod(sizes) * dtype.itemsize} bytes on {device}"
    return needs_memory("arena", wanted)(torch.zeros)(tuple(sizes), dtype=dtype, device=device)


def sent(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """An array of the host as a tensor on a device.

    Nothing is waited for: a copy to a GPU starts from pinned memory, which torch keeps until it is
    done. On the CPU it is the array's own memory, if its numbers lie side by side.
    """
    here = torch.from_numpy(np.ascontiguousarray(array))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def is_shortage(error: RuntimeError) -> bool:
    """Whether an error says that there is no memory.

    torch has a class for what its own allocator of a GPU lacks. What the host, CUDA or cuBLAS
    lacks is known by its words alone.
    """
    shortage = isinstance(error, (OutOfMemory, torch.OutOfMemoryError))
    return shortage or any(words in str(error) for words in _SHORTAGES)

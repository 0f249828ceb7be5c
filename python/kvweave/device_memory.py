"""Memory of a device: the pages of an arena there, and what is raised when there is no room."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from kvweave.errors import OutOfMemory

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def needs_memory(
    what: str,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Marks a function, called `what`, whose tensors may not fit their device.

    It raises `OutOfMemory` then, with torch's words for what it tried to get and what was free.
    """

    def marked(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def named(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            try:
                return function(*arguments, **options)
            except torch.OutOfMemoryError as error:
                raise _named(what, "memory for it", error) from error

        return named

    return marked


def arena_pages(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Pages [pages, 2, P, D] of an arena, all 0.

    # Errors
    `OutOfMemory` when the device has no room for them.
    """
    try:
        return torch.zeros(tuple(sizes), dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        wanted = f"{math.prod(sizes) * dtype.itemsize} bytes on {device}"
        raise _named("arena", wanted, error) from error


def _named(what: str, expected: str, error: torch.OutOfMemoryError) -> OutOfMemory:
    got = str(error)
    return OutOfMemory(f"{what}: expected {expected}, got {got}", expected=expected, got=got)

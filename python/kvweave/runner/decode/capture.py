"""Capturing a CUDA graph while nothing else calls the driver from the same thread."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
    """As `torch.cuda.graph`, whose arguments `how` are; other threads may go on allocating.

    No garbage is collected meanwhile. It may hold memory of the host that the driver has pinned,
    and to end that is a call which a capture does not survive.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **how):
            yield
    finally:
        if collects:
            gc.enable()

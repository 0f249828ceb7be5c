"""When something happened on a device's own line: an event on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

Mark: TypeAlias = "float | torch.cuda.Event"


def milliseconds() -> int:
    """The time that a runner's caches are told, from any start on."""
    return time.monotonic_ns() // 1_000_000


class Clock:
    """Marks points in a device's work without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """The point that the device's work has come to, once all that was asked for is done."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    @staticmethod
    def is_reached(mark: Mark) -> bool:
        """Whether the device's work has come to a mark."""
        return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Returns when all that was asked for is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @staticmethod
    def seconds(begin: Mark, end: Mark) -> float:
        """Seconds between two marks; on a GPU both must have been reached."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float)
            assert isinstance(end, float)
            return end - begin
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms / 1e3

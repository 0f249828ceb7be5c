"""Copies that a GPU makes beside its other work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Arrival:
    """When a copy that the device makes beside its other work has come over.

    `event` is behind it on the stream that makes it; None for a copy that has been made already.
    Whoever waits is the current stream of `device`.
    """

    event: Any = None
    device: torch.device | None = None

    def is_there(self) -> bool:
        """Whether it has. What the current stream does from then on finds it."""
        if self.event is None:
            return True
        there = bool(self.event.query())
        if there:
            self.wait()
        return there

    def wait(self) -> None:
        """Has the current stream do nothing more before it has; the host does not wait."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream(self.device))


class Aside:
    """A stream of a GPU for copies that nothing waits for; elsewhere they are made at once."""

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream
        self.stream: torch.cuda.Stream | None = stream(device) if device.type == "cuda" else None
        self.abandoned = Arrival()

    def do(self, work: Callable[[], None]) -> Arrival:
        """Does something behind all that the current stream has been asked to do by now."""
        if self.stream is None:
            work()
            return Arrival()
        self.follow()
        with torch.cuda.stream(self.stream):
            work()
            event: Any = torch.cuda.Event
            made = self.stream.record_event(event(enable_timing=True))
            return Arrival(made, self.stream.device)

    def made(self, work: Callable[[], object]) -> None:
        """Does something aside, and returns when the device has done it.

        For a thread that waits for it while others go on; there is something aside.
        """
        assert self.stream is not None
        event: Any = torch.cuda.Event
        with torch.cuda.stream(self.stream):
            work()
            made = self.stream.record_event(event(blocking=True))
        made.synchronize()

    def follow(self) -> None:
        """Has what is done aside from now on come behind all that the current stream has to do."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the host, copied aside; for a thread that waits for it while others go on."""
        if self.stream is None:
            return tensor
        with torch.cuda.stream(self.stream):
            return tensor.cpu()

    def join(self) -> None:
        """Has the current stream do nothing more before all that is done aside by now.

        The host does not wait.
        """
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def reads(self, *tensors: torch.Tensor) -> None:
        """Says that what is done aside reads these, so that nobody is given their memory before."""
        if self.stream is not None:
            for tensor in tensors:
                tensor.record_stream(self.stream)

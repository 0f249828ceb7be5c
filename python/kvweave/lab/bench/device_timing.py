"""Times calls on a CUDA device: events around each, nothing of theirs left in its L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvweave.lab.bench.timing import Timing, summarise, turns

Call: TypeAlias = Callable[[], Any]
SWEPT = 256 << 20
"""Bytes read between samples: several times any L2 cache."""
WARM_UP = 3
CYCLES_A_SECOND = 2e9
"""About what today's devices do; only how far the host runs ahead depends on it."""
FEWEST = 10


@dataclass(frozen=True)
class Effort:
    """Samples of each contender: as many as the slowest fits into a time, at most `most`."""

    budget_s: float
    most: int

    def rounds(self, slowest_s: float) -> int:
        """Samples of each, when the slowest takes so long."""
        return max(FEWEST, min(self.most, int(self.budget_s / slowest_s)))


FULL, QUICK = Effort(0.5, 100), Effort(0.02, FEWEST)


class DeviceClock:
    """Samples of contenders in turns.

    Before each sample a large buffer is read, so that the L2 cache holds only its clean lines (a
    buffer that was written would leave lines to be written back while the call runs). Then the
    device waits a little, and the host has enqueued the whole call before the first event passes:
    a sample never counts time that the host spent in Python.
    """

    def __init__(self, device: torch.device) -> None:
        self._swept = torch.ones(SWEPT // 4, device=device)

    def time(self, contenders: Mapping[str, Call], effort: Effort) -> dict[str, Timing]:
        """Seconds of each call, all of them equally often; each round starts with another one."""
        if not contenders:
            return {}
        probed = {name: _probe(call) for name, call in contenders.items()}
        rounds = effort.rounds(max(whole for _, whole in probed.values()))
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        events = {name: [] for name in contenders}
        for name in turns(list(contenders), rounds):
            self._swept.sum()
            spin(int((2 * probed[name][0] + 30e-6) * CYCLES_A_SECOND))
            begin, end = _event(), _event()
            begin.record()
            contenders[name]()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
        return {
            name: summarise([begin.elapsed_time(end) / 1e3 for begin, end in pairs])
            for name, pairs in events.items()
        }


def replayed(call: Call, captured_on: torch.cuda.Stream | None = None) -> Call:
    """The call as a replay of a CUDA graph that it was captured in.

    What is captured on a stream has its priority wherever it is replayed.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=captured_on):
        call()
    return graph.replay


def _probe(call: Call) -> tuple[float, float]:
    """Seconds until the host has enqueued a warm call, and until the device has done it."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    enqueued = time.perf_counter() - start
    torch.cuda.synchronize()
    return enqueued, time.perf_counter() - start


def spin(cycles: int) -> None:
    """A kernel that does nothing for so many cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

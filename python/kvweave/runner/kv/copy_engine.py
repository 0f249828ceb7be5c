"""From which size on a GPU's copy engine carries pieces sooner than its processors do.

No one number fits every GPU, bus and driver: the driver takes the host some time for each piece
that the copy engine is given, whatever its size. So both ways are timed when memory has been
pinned, for some milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.ops import RowPages
from kvweave.runner.kv.carry_pages import Way
from kvweave.runner.kv.tables import send

NEVER = 2**62
"""A size that no piece has: processors carry everything."""

PIECES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the pieces that are timed."""

WAYS: tuple[Way, Way] = ("fetch", "spill")

_ONE_TRY = 4 << 20
"""Bytes of one try."""

_TRIES = 5

_NOISE = 0.05
"""A part by which two timings differ that say the same."""


@dataclass(frozen=True)
class PieceTiming:
    """Seconds in which pieces of so many bytes were carried, from the call until all were there.

    `engine` by the copy engine, `processors` by the device's processors.
    """

    piece_bytes: int
    engine: float
    processors: float


def engine_from(timings: Sequence[PieceTiming]) -> int:
    """The least size from which on the copy engine is as fast as processors; `NEVER` if none is.

    It is as fast where it takes no more, but for noise: processors are left to others then. Of
    sizes that were not timed the next greater one that was decides.
    """
    found = NEVER
    for timing in sorted(timings, key=lambda timing: -timing.piece_bytes):
        if not timing.engine <= timing.processors * (1 + _NOISE):
            break
        found = timing.piece_bytes
    return found


def measured(arena: torch.Tensor, memory: torch.Tensor) -> Mapping[Way, int]:
    """From which size on the copy engine is as fast, each way between a GPU and pinned memory.

    `arena` says which GPU; nothing of it is read or written. `memory` of the host, as pinned as it
    will be read, is read and written as it is: nobody else may write there meanwhile.
    """
    device = arena.device
    home = memory.reshape(-1)[: 2 * _ONE_TRY // memory.element_size()]
    stream: Any = torch.cuda.Stream
    aside = stream(device, priority=0)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        here = home.to(device)
        found = {
            way: engine_from(
                [_timed(here, home, way, size) for size in PIECES if 2 * size <= home.nbytes]
            )
            for way in WAYS
        }
    aside.synchronize()
    return found


def _timed(here: torch.Tensor, home: torch.Tensor, way: Way, size: int) -> PieceTiming:
    """Every other piece of some memory, from its end on, so that no two of them are one copy."""
    count, numbers = home.nbytes // size, size // home.element_size()
    device = here.device
    slots, pages = (side[: count * numbers].view(count, numbers) for side in (here, home))
    moves = np.zeros((count // 2, 3), np.int32)
    moves[:, 1] = moves[:, 2] = np.arange(count // 2)
    number = np.asarray([len(moves)], np.int32)
    table = np.ascontiguousarray(np.arange(count - 1, -1, -2, dtype=np.int32)[None, : count // 2])
    sent = send(device, moves, number, table)

    def by_engine() -> None:
        known = RowPages(slots, table), RowPages(pages, table)
        ops.move_pages(moves, number, *known, way=way, processors=0)

    def by_processors() -> None:
        known = RowPages(slots, sent[2]), RowPages(pages, sent[2])
        ops.move_pages(sent[0], sent[1], *known, way=way)

    return PieceTiming(size, _seconds(by_engine), _seconds(by_processors))


def _seconds(carry: Callable[[], None]) -> float:
    """The least that a call took of some, until what it asked for was done: others only delay."""
    stream, found = torch.cuda.current_stream(), []
    for _ in range(_TRIES):
        stream.synchronize()
        start = time.perf_counter()
        carry()
        stream.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)

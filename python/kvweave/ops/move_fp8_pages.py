"""Pages between slots and where they lie as float8_e4m3fn: what `move_pages` is with scales."""

from __future__ import annotations

from typing import TypeAlias

import torch

from kvweave import _native
from kvweave.ops.dispatch import Pages, Table, on_device, stream_of

Side: TypeAlias = tuple[Pages, Table, int]
"""An arena, its blocks and their ranks: see `RowPages`."""


def move_fp8_pages(
    steps: tuple[Table, Table],
    slots: Side,
    home: Side,
    scales: Pages,
    way: str,
    *,
    device: torch.device | None,
    processors: int,
    reference: bool,
) -> None:
    """As `move_pages`; `steps` are moves and count, `device` a CUDA one or None for the host."""
    arena, blocks, ranks = home
    if device is None:
        kept = arena, scales, blocks, ranks
        _native.move_fp8_pages(steps, slots, kept, way, reference)
        return
    given = {"moves": steps[0], "count": steps[1], "slots": slots[1], "home": blocks}
    tables = on_device(device, **given)
    there = tables["moves"], tables["count"]
    in_slots = slots[0], tables["slots"], slots[2]
    rounded = arena, scales, tables["home"], ranks
    on = way, processors, stream_of(device)
    _native.move_fp8_pages_cuda(there, in_slots, rounded, *on)

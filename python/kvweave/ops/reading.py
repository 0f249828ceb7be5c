"""What the ops that read pages have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvweave._native import Reach, RopeTable
from kvweave.ops.dispatch import OnDevice, Pages, Table


@dataclass(slots=True)
class Reading:
    """Arguments of one call, made anew for each; the native module reads the fields by name."""

    q: torch.Tensor
    positions: Table | OnDevice
    entries: Table | OnDevice
    cache: Pages
    layer: int
    kv_heads: int
    scale: float
    rope: RopeTable
    window: int | None
    softcap: float | None
    reach: Reach | None
    kv_scales: tuple[float, float] | None = None

    def placed(self, tables: Mapping[str, OnDevice]) -> Reading:
        """This call, its tables now on a device."""
        self.positions, self.entries = tables["positions"], tables["entries"]
        return self

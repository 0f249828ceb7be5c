"""Where the KV of a document comes from: the fastest place that has it, or computing it.

Pure: what was measured and counted goes in, a choice and its reason come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Source = Literal["device", "host", "disk", "remote", "computed"]
Tier = Literal["host", "disk", "remote"]

TIERS: tuple[Tier, ...] = ("host", "disk", "remote")
"""The tiers beyond the device, the nearest first."""


@dataclass(frozen=True)
class Speeds:
    """What was measured so far, in units a second; None: nothing yet.

    `host`, `disk`, `remote`: bytes that came from there to the device. `compute`: FLOPs of
    prefills.
    """

    host: float | None = None
    disk: float | None = None
    compute: float | None = None
    remote: float | None = None

    def of(self, tier: Tier) -> float | None:
        """That of a tier."""
        return {"host": self.host, "disk": self.disk, "remote": self.remote}[tier]


@dataclass(frozen=True)
class Choice:
    """Where KV comes from, and why from there."""

    source: Source
    why: str


def choose(there: Sequence[Tier], size: int, flops: int, speeds: Speeds) -> Choice:
    """Whether `size` bytes of KV are loaded from one of the tiers that have them, or computed.

    `flops`: what computing the same tokens would take. A tier that was never measured is tried, the
    nearest first: its speed is known from then on. So is every tier while nothing was computed yet.
    Of equal times the nearest tier's wins, and loading wins over computing.
    """
    if not there:
        return Choice("computed", "no tier has it")
    in_order = [tier for tier in TIERS if tier in there]
    for tier in in_order:
        if speeds.of(tier) is None:
            return Choice(tier, f"loading from {tier} was never measured")
    times = [(size / (speeds.of(tier) or 1.0), tier) for tier in in_order]
    seconds, nearest = min(times, key=lambda timed: timed[0])
    loading = f"loading {size} bytes from {nearest} takes {seconds:.3g} s"
    if speeds.compute is None:
        return Choice(nearest, f"{loading}, computing was never measured")
    computing = flops / speeds.compute
    both = f"{loading}, computing {flops:.3g} FLOPs {computing:.3g} s"
    return Choice(nearest if seconds <= computing else "computed", both)

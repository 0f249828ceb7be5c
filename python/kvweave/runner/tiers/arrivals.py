"""`Arrivals`: documents whose KV comes layer by layer while their prompt is prefilled.

They are committed when they set out, so that the prompt can be admitted; whoever computes them asks
for a layer before it reads any KV of it. Nobody else computes until all of it has come. Where some
does not come, nobody finds it any more, and the prompt is begun anew without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvweave.cache import KvRequest
from kvweave.runner.clock import Clock, Mark
from kvweave.runner.kv.host_pages import blocks_of
from kvweave.runner.kv.tables import Int32
from kvweave.runner.tiers.choice import Tier
from kvweave.runner.tiers.expected import Expected
from kvweave.runner.tiers.loads import Wanted

CopyLayers = Callable[[int, Int32, int, int], None]
"""Carries out copies [C, 6] of a group, in the layers [first, end)."""


class NotArrivedError(LookupError):
    """Some KV did not come; its documents say why. Nobody outside a prefill, which begins anew."""


class KvOnItsWay(Protocol):
    """A document's KV that is brought into the blocks of a request of it alone, layer by layer."""

    request: KvRequest
    layers: int

    def write_to(self, layers: int) -> None:
        """Brings it on, until so many layers are there."""

    def release(self) -> None:
        """Lets it go; what has not come as a whole is found by nobody any more. Any time."""


@dataclass(eq=False)
class Coming:
    """A document on its way from a tier."""

    want: Wanted
    tier: Tier
    kv: KvOnItsWay


class Arrivals:
    """What comes for one prompt; whoever has one finishes or releases it in the end.

    `stood`: from when to when the prompt's prefill stood still, until KV had come; `copied`: until
    it had been copied and turned.
    """

    def __init__(self, expected: Expected, layers: int, clock: Clock) -> None:
        self.coming: list[Coming] = []
        self.stood: list[tuple[Mark, Mark]] = []
        self.copied: list[tuple[Mark, Mark]] = []
        self._expected = expected
        self._clock = clock
        self._all = layers
        self._layers = 0
        self._copies: list[tuple[int, Int32]] = []
        self._blocks: dict[int, Int32] = {}

    def defer(self, group: int, copies: Int32, copy: CopyLayers) -> Int32:
        """Those of a prompt's copies [C, 6] in a group that read nothing on its way.

        The others are made in layers that have come, and left for those that come.
        """
        if self._layers == self._all or not len(copies):
            return copies
        if group not in self._blocks:
            found = [blocks_of(one.kv.request, group) for one in self.coming]
            self._blocks[group] = np.concatenate(found)
        coming = np.isin(copies[:, 0], self._blocks[group])
        if coming.any():
            some = np.ascontiguousarray(copies[coming])
            copy(group, some, 0, self._layers)
            self._copies.append((group, some))
        return np.ascontiguousarray(copies[~coming])

    def need(self, layer: int, copy: CopyLayers) -> None:
        """Returns when the KV of a layer is where the prompt reads it.

        # Errors
        `NotArrivedError` where it will not come, or not in time.
        """
        if layer < self._layers:
            return
        for one in self.coming:
            self._bring(one, layer + 1)
        begun = self._clock.mark()
        # More may have come than was asked for: few calls do many layers.
        end = min((one.kv.layers for one in self.coming), default=self._all)
        for group, copies in self._copies:
            copy(group, copies, self._layers, end)
        self._layers = end
        self.copied.append((begun, self._clock.mark()))

    def _bring(self, one: Coming, layers: int) -> None:
        begun = self._clock.mark()
        there = self._expected.wait_for(one.want, layers)
        if there:
            one.kv.write_to(max(layers, one.want.layers))
        self.stood.append((begun, self._clock.mark()))
        if not there:
            raise NotArrivedError

    def bring_rest(self) -> list[Coming]:
        """Brings what still comes of each document; those that do not are found by nobody now."""
        lost = []
        for one in self.coming:
            try:
                self._bring(one, self._all)
            except NotArrivedError:
                one.kv.release()
                lost.append(one)
        return lost

    def release(self) -> None:
        """Lets all go; what has not come as a whole is found by nobody any more. Any time."""
        coming, self.coming = self.coming, []
        for one in coming:
            one.kv.release()
        self._expected.release()

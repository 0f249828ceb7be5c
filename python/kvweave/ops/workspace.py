"""Memory that reading KV on CUDA puts parts of its results in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from kvweave.power_of_two import power_of_two

Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""f32 of any value, and i32 that are 0 between calls."""


class Workspace:
    """Kept by a caller for all its calls on one stream of a device: two calls at once would mix.

    Tensors that a captured graph may know stay alive and where they are; when a call needs more, a
    larger one is made beside them, its size a power of two. So all of a kind together are less than
    twice the largest, whatever sizes are asked for.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._values: list[torch.Tensor] = []
        self._zeros: list[torch.Tensor] = []

    @property
    def held(self) -> Parts | None:
        """The largest parts there are; None before the first call of `numbers`."""
        return (self._values[-1], self._zeros[-1]) if self._values else None

    def numbers(self, floats: int, counters: int) -> Parts:
        """At least so many f32 of any value, and so many i32 that are 0 between calls."""
        if not self._values or len(self._values[-1]) < floats:
            size = _size(floats, self._values)
            self._values.append(torch.empty(size, dtype=torch.float32, device=self.device))
        if not self._zeros or len(self._zeros[-1]) < counters:
            size = _size(counters, self._zeros)
            self._zeros.append(torch.zeros(size, dtype=torch.int32, device=self.device))
        return self._values[-1], self._zeros[-1]


def launch(workspace: Workspace, call: Callable[[Parts | None], tuple[int, int] | None]) -> None:
    """Launches a call; again with more workspace where what is at hand is too small for it."""
    needs = call(workspace.held)
    if needs is not None:
        call(workspace.numbers(*needs))


def results(q: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what rows attend to and its log-sum-exp."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def _size(least: int, made: list[torch.Tensor]) -> int:
    """What a caller with one size of call asks for is all that it gets."""
    return power_of_two(least) if made else least

"""Memory that attention on CUDA puts parts of its results in."""

from __future__ import annotations

import torch


class Workspace:
    """Kept by a caller for all its calls on one stream of a device: two calls at once would mix.

    Tensors that a captured graph may know stay alive and where they are; when a call needs more,
    larger ones are made beside them.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def numbers(self, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At least so many f32 of any value, and so many i32 that are 0 between calls."""
        if self._made:
            values, zeros = self._made[-1]
            if len(values) >= floats and len(zeros) >= counters:
                return values, zeros
            # Never less than before of either, or calls of two kinds in turns would grow for ever.
            floats, counters = max(floats, len(values)), max(counters, len(zeros))
        values = torch.empty(floats, dtype=torch.float32, device=self.device)
        zeros = torch.zeros(counters, dtype=torch.int32, device=self.device)
        self._made.append((values, zeros))
        return values, zeros

"""`Staging`: what was packed anew lies on the device before whoever computes puts it in place."""

from __future__ import annotations

from functools import partial

import torch

from kvweave.runner.kv.aside import Aside

BETWEEN_BYTES = 16 << 20
"""So many bytes at a time lie in memory that a GPU reads while others go on."""


class Staging:
    """Sends tensors from the host's memory to a GPU, beside what it computes.

    A thread that does so waits; nobody else does. One may ask at a time.
    """

    def __init__(self, aside: Aside) -> None:
        self._aside = aside
        # From the first tensor on.
        self._between: torch.Tensor | None = None

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor where it will be read, when this returns.

        As it is where nothing is aside, or the device has no memory for it yet, nor the host for
        what it goes by: then it is sent when it is put in place.
        """
        stream = self._aside.stream
        if stream is None:
            return tensor
        try:
            if self._between is None:
                size = BETWEEN_BYTES
                self._between = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(stream):
                there = torch.empty_like(tensor, device=stream.device)
        except RuntimeError:
            return tensor
        self._send(self._between, tensor, there)
        return there

    def _send(self, between: torch.Tensor, tensor: torch.Tensor, there: torch.Tensor) -> None:
        source, target = (each.view(-1).view(torch.uint8) for each in (tensor, there))
        for begin in range(0, len(source), len(between)):
            part = source[begin : begin + len(between)]
            some, into = between[: len(part)], target[begin : begin + len(part)]
            some.copy_(part)
            self._aside.made(partial(into.copy_, some, non_blocking=True))

    def close(self) -> None:
        """Gives the host's memory back."""
        self._between = None

"""`MemoryMark`: by which a store knows whether its memory is still what it was.

An engine that sleeps at vLLM's level 2 gives the memory of its weights back, and a store's lies
with these. When it wakes there is other memory at the same addresses, and vLLM tells nobody at
which level it slept. So random bytes lie beside the store, and are compared with those on the host.
"""

from __future__ import annotations

import secrets

import torch

MARK_BYTES = 4096


class MemoryMark:
    """Random bytes, allocated where and when a store's pages are."""

    def __init__(self, device: torch.device) -> None:
        self._there = torch.zeros(MARK_BYTES, dtype=torch.uint8, device=device)
        self.renew()

    def renew(self) -> None:
        """Takes what is there now for what it should be."""
        # A source of its own: vLLM seeds those of torch and numpy, and makes weights of them.
        self._said = torch.frombuffer(bytearray(secrets.token_bytes(MARK_BYTES)), dtype=torch.uint8)
        self._there.copy_(self._said)

    def is_there(self) -> bool:
        """Whether nothing has been lost since; waits for the device."""
        return torch.equal(self._there.cpu(), self._said)

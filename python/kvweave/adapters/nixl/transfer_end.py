"""What both ends of a transfer have: the secret that they share, and an agent of their own."""

from __future__ import annotations

from typing import Any

from kvweave.adapters.nixl.agent import make_agent
from kvweave.closing import Closing
from kvweave.errors import InvalidArgument
from kvweave.remote.seal import check_secret


class TransferEnd(Closing):
    """One end, until it is closed. A context manager; one thread uses it at a time.

    `secret`: 16 to 64 bytes that the other end knows too.

    # Errors
    `InvalidArgument` for no secret; `Unsupported` without NIXL, `TransferFailed` where it fails.
    """

    def __init__(self, secret: bytes) -> None:
        check_secret(secret)
        if secret is None:
            raise InvalidArgument("secret: expected 16 to 64 bytes, got none")
        self._secret = secret
        self._own: Any = make_agent()

    @property
    def _agent(self) -> Any:
        """The agent; raises `InvalidArgument` once this end is closed."""
        if self._own is None:
            name = type(self).__name__
            raise InvalidArgument(f"{name}: expected an open one, got one that was closed")
        return self._own

    def close(self) -> None:
        """Forgets its agent; safe to call twice."""
        self._own = None

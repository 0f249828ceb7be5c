"""`Seal`: proof that an object was written by somebody who knows a secret.

Checksums find what a network has spoiled, and anybody can make them. Behind a sealed object stands
a keyed BLAKE2b of all its bytes, which are what it is of as well: so nobody without the secret can
write one, change one, or put one in another's place.
"""

from __future__ import annotations

import hashlib
import hmac

from kvweave.errors import CorruptShard, InvalidArgument

SEAL_BYTES = 32
_LEAST, _MOST = 16, 64


def check_secret(secret: bytes | None) -> None:
    """Refuses what is no secret: bytes, 16 to 64 of them."""
    if secret is None or (isinstance(secret, bytes) and _LEAST <= len(secret) <= _MOST):
        return
    got = f"{len(secret)}" if isinstance(secret, bytes) else type(secret).__name__
    raise InvalidArgument(f"secret: expected {_LEAST} to {_MOST} bytes, got {got}")


class Seal:
    """The seal of an object, made of its bytes in order; without a secret there is none."""

    def __init__(self, secret: bytes | None) -> None:
        self._hash = None
        if secret is not None:
            self._hash = hashlib.blake2b(
                key=secret, digest_size=SEAL_BYTES, person=b"kvweave shard"
            )

    @property
    def size(self) -> int:
        """Bytes that stand behind an object."""
        return 0 if self._hash is None else SEAL_BYTES

    def add(self, data: bytes | memoryview) -> None:
        """Takes the next bytes."""
        if self._hash is not None:
            self._hash.update(data)

    def made(self) -> bytes:
        """The seal of all that was taken."""
        return b"" if self._hash is None else self._hash.digest()

    def expect(self, found: bytes) -> None:
        """Refuses another seal.

        # Errors
        `CorruptShard`.
        """
        if not hmac.compare_digest(self.made(), found):
            raise CorruptShard("remote shard seal: expected that of our secret, got another")

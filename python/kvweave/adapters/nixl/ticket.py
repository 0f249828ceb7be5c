"""`Ticket`: what a sender tells a receiver, signed with the secret that both know.

A ticket is JSON behind its HMAC-SHA-256. It has the payload's header, NIXL's own description of the
sender, and of each part where it lies, its bytes, and a keyed digest of them. So who does not know
the secret can have no peer connected to, no address read, and no KV believed. It is signed and not
encrypted: whoever sees a ticket may read the KV while it is offered.
"""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch

from kvweave.adapters.nixl.part_digest import key_for
from kvweave.errors import CorruptPayload
from kvweave.payload import PayloadHeader
from kvweave.payload.header_fields import parsed
from kvweave.payload.payload import LOGITS, PART_DTYPES, TOKENS

_SCHEMA = 2
_DIGEST = 32
_MOST = 1 << 22
_MOST_ADDRESS = 2**64
_MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class PartPlace:
    """A part where the sender has it: address, bytes, and their keyed digest in hexadecimal.

    `device`: the sender's CUDA device on which it lies; None: in the host's memory.
    """

    address: int
    size: int
    digest: str
    device: int | None = None


@dataclass(frozen=True)
class Ticket:
    """One offer. `peer`: NIXL's description of the sender; `until`: seconds since 1970."""

    name: str
    peer: bytes
    until: float
    header: PayloadHeader
    places: dict[str, PartPlace]

    def encode(self, secret: bytes) -> bytes:
        """The bytes that travel."""
        said = {
            "schema": _SCHEMA,
            "name": self.name,
            "peer": base64.b64encode(self.peer).decode(),
            "until": self.until,
            "header": self.header.to_json(),
            "places": {name: list(astuple(place)) for name, place in self.places.items()},
        }
        text = json.dumps(said, separators=(",", ":")).encode()
        return _signature(secret, text) + text

    @staticmethod
    def decode(data: bytes, secret: bytes, now: Callable[[], float] = time.time) -> Ticket:
        """A ticket of any origin; nothing of it is read before its signature has been.

        # Errors
        `CorruptPayload` for one that was not signed with the secret, has expired, or says what no
        payload can be.
        """
        if not isinstance(data, bytes) or not _DIGEST < len(data) <= _MOST:
            raise CorruptPayload("ticket: expected bytes of one, got others")
        if not hmac.compare_digest(data[:_DIGEST], _signature(secret, data[_DIGEST:])):
            raise CorruptPayload("ticket: expected one that is signed with our secret, got another")
        try:
            said = parsed(data[_DIGEST:].decode())
            if said["schema"] != _SCHEMA:
                raise CorruptPayload(f"ticket schema: expected {_SCHEMA}, got another")
            ticket = Ticket(
                str(said["name"]),
                base64.b64decode(said["peer"], validate=True),
                float(said["until"]),
                PayloadHeader.from_json(said["header"]),
                {str(name): _place(place) for name, place in said["places"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptPayload(f"ticket: expected the fields of one, got {error}") from error
        if not now() < ticket.until:
            raise CorruptPayload("ticket: expected one that has not expired, got one that has")
        return ticket

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each part, as the header has them, the sizes said being those.

        # Errors
        `CorruptPayload`.
        """
        kinds = self.header.part_kinds().items()
        wanted = {name: (PART_DTYPES[dtype], shape) for name, (dtype, shape) in kinds}
        wanted[TOKENS] = (torch.int32, (self.header.tokens,))
        if LOGITS in self.places:
            wanted[LOGITS] = (torch.float32, (self.places[LOGITS].size // 4,))
        sizes = {name: place.size for name, place in self.places.items()}
        expected = {name: bytes_of(*part) for name, part in wanted.items()}
        if sizes != expected:
            raise CorruptPayload(f"ticket parts: expected {expected}, got {sizes}")
        return wanted


def bytes_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def _place(said: Any) -> PartPlace:
    address, size, digest, device = said
    if type(address) is not int or not 0 <= address < _MOST_ADDRESS:
        raise CorruptPayload("ticket address: expected one, got something else")
    if type(size) is not int or not 0 <= size < _MOST_ADDRESS:
        raise CorruptPayload("ticket size: expected one, got something else")
    if device is not None and (type(device) is not int or not 0 <= device < _MOST_DEVICES):
        raise CorruptPayload("ticket device: expected one or none, got something else")
    return PartPlace(address, size, str(digest), device)


def _signature(secret: bytes, text: bytes) -> bytes:
    return hmac.digest(key_for(secret, b"ticket"), text, "sha256")

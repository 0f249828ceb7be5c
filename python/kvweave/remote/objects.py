"""`Objects`: named runs of bytes on another machine, whoever carries them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from kvweave.errors import CorruptShard

_SHOWN = 200


class Stream(Protocol):
    """An object that is being read. No more is taken than is asked for, whatever is sent."""

    def take(self, room: memoryview) -> int:
        """Fills the begin of `room` with the next bytes; how many: 0 where there are no more."""


class Objects(Protocol):
    """What lies behind one service. From any thread; the GIL is free meanwhile.

    # Errors
    `StoreUnavailable` for whatever the service refuses, or does not answer in time.
    """

    def size(self, path: str) -> int | None:
        """Bytes of an object, as the service says; None where there is none."""

    def reading(self, path: str, size: int) -> AbstractContextManager[Stream]:
        """An object's bytes, from its begin on, as they are asked for; it has said its `size`."""

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> None:
        """Writes an object of `size` bytes; what was there is replaced when all of it has come."""

    def remove(self, path: str) -> None:
        """Removes an object, if it is there."""

    def names(self, folder: str) -> list[str]:
        """Names of the objects in a folder, sorted."""


def read_into(stream: Stream, room: memoryview) -> None:
    """Fills memory with a stream's next bytes.

    # Errors
    `CorruptShard` where there are fewer.
    """
    at = 0
    while at < len(room):
        taken = stream.take(room[at:])
        if taken == 0:
            raise CorruptShard(f"remote shard: expected {len(room)} bytes more, got {at}")
        at += taken


def read_bytes(stream: Stream, size: int) -> bytes:
    """A stream's next bytes. Errors as for `read_into`."""
    room = bytearray(size)
    read_into(stream, memoryview(room))
    return bytes(room)


def first_line(error: BaseException) -> str:
    """What an error says first. What follows may tell of credentials."""
    return (str(error).splitlines() or [type(error).__name__])[0][:_SHOWN]

"""`Objects`: named runs of bytes by OpenDAL, each call bounded in time and in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from kvweave.errors import CorruptShard, InvalidArgument, KvweaveError, StoreUnavailable

_REFUSALS = (
    *("AlreadyExists", "ConditionNotMatch", "ConfigInvalid", "Conflict", "Error"),
    *("IsADirectory", "IsSameFile", "NotADirectory", "NotFound", "PermissionDenied"),
    *("RangeNotSatisfied", "RateLimited", "Unexpected", "Unsupported"),
)
_SHOWN = 200


class Stream:
    """An object that is being read. No more is taken than is asked for, whatever is sent."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read_into(self, room: memoryview) -> None:
        """Fills memory with the next bytes.

        # Errors
        `CorruptShard` where there are fewer.
        """
        at = 0
        while at < len(room):
            piece: bytes = self._file.read(len(room) - at)
            if not piece:
                raise CorruptShard(f"remote shard: expected {len(room)} bytes more, got {at}")
            room[at : at + len(piece)] = piece
            at += len(piece)

    def read(self, size: int) -> bytes:
        """The next bytes. Errors as for `read_into`."""
        room = bytearray(size)
        self.read_into(memoryview(room))
        return bytes(room)


class Objects:
    """What lies behind one service of OpenDAL. From any thread; the GIL is free meanwhile.

    No call takes longer than `timeout_s` without a byte that comes or goes.

    # Errors
    `StoreUnavailable` for whatever the service refuses, with its first line alone: what follows it
    may tell of credentials. `InvalidArgument` for options that are no service's.
    """

    def __init__(self, scheme: str, options: Mapping[str, str], timeout_s: float) -> None:
        try:
            opendal = import_module("opendal")
        except ModuleNotFoundError as error:
            raise StoreUnavailable(
                "remote store: expected the package opendal to be installed; "
                "run: pip install 'kvweave[remote]'"
            ) from error
        known = opendal.exceptions
        self._absent: type[Exception] = known.NotFound
        self._refused = tuple(getattr(known, name) for name in _REFUSALS if hasattr(known, name))
        try:
            timeout = opendal.layers.TimeoutLayer(timeout=timeout_s, io_timeout=timeout_s)
            self._operator: Any = opendal.Operator(scheme, **options).layer(timeout)
        except self._refused as error:
            text = f"remote store: expected the options of a service, got: {_first(error)}"
            raise InvalidArgument(text) from error

    def size(self, path: str) -> int | None:
        """Bytes of an object, as the service says; None where there is none."""
        with self._answering("to be looked for"):
            try:
                return int(self._operator.stat(path).content_length)
            except self._absent:
                return None

    @contextmanager
    def reading(self, path: str) -> Iterator[Stream]:
        """An object's bytes, from its begin on, as they are asked for."""
        with self._answering("to be read"):
            file = self._operator.open(path, "rb")
            try:
                yield Stream(file)
            finally:
                # Closing tells nothing that is not known yet.
                with suppress(Exception):
                    file.close()

    def write(self, path: str, pieces: Iterable[bytes]) -> None:
        """Writes an object; what was there before is replaced when all of it has come."""
        with self._answering("to be written"):
            # Left open after an error: closing it would publish half an object.
            file = self._operator.open(path, "wb")
            for piece in pieces:
                file.write(piece)
            file.close()

    def remove(self, path: str) -> None:
        """Removes an object, if it is there."""
        with self._answering("to be removed"):
            self._operator.delete(path)

    def names(self, folder: str) -> list[str]:
        """Names of the objects in a folder, sorted."""
        with self._answering("to be listed"):
            try:
                found = [str(entry.name) for entry in self._operator.list(folder)]
            except self._absent:
                found = []
        return sorted(found)

    @contextmanager
    def _answering(self, to: str) -> Iterator[None]:
        try:
            yield
        except (*self._refused, OSError) as error:
            if isinstance(error, KvweaveError):
                raise
            raise StoreUnavailable(f"remote shard: expected {to}, got: {_first(error)}") from error


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:_SHOWN]

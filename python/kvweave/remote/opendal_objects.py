"""`OpendalObjects`: objects of a service that OpenDAL speaks to, each call bounded in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from kvweave.errors import InvalidArgument, KvweaveError, StoreUnavailable
from kvweave.remote.objects import first_line

_REFUSALS = (
    *("AlreadyExists", "ConditionNotMatch", "ConfigInvalid", "Conflict", "Error"),
    *("IsADirectory", "IsSameFile", "NotADirectory", "NotFound", "PermissionDenied"),
    *("RangeNotSatisfied", "RateLimited", "Unexpected", "Unsupported"),
)


class _Stream:
    """A file of OpenDAL's."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def take(self, room: memoryview) -> int:
        piece: bytes = self._file.read(len(room))
        room[: len(piece)] = piece
        return len(piece)


class OpendalObjects:
    """What lies behind one service of OpenDAL, as `Objects` says.

    No call takes longer than `timeout_s` without a byte that comes or goes.

    # Errors
    `InvalidArgument` for options that are no service's.
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
            text = f"remote store: expected the options of a service, got: {first_line(error)}"
            raise InvalidArgument(text) from error

    def size(self, path: str) -> int | None:
        """As `Objects.size`."""
        with self._answering("to be looked for"):
            try:
                return int(self._operator.stat(path).content_length)
            except self._absent:
                return None

    @contextmanager
    def reading(self, path: str, size: int) -> Iterator[_Stream]:
        """As `Objects.reading`; where it ends the service says."""
        with self._answering("to be read"):
            file = self._operator.open(path, "rb")
            try:
                yield _Stream(file)
            finally:
                # Closing tells nothing that is not known yet.
                with suppress(Exception):
                    file.close()

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> None:
        """As `Objects.write`; the service counts the bytes itself."""
        with self._answering("to be written"):
            # Left open after an error: closing it would publish half an object.
            file = self._operator.open(path, "wb")
            for piece in pieces:
                file.write(piece)
            file.close()

    def remove(self, path: str) -> None:
        """As `Objects.remove`."""
        with self._answering("to be removed"):
            self._operator.delete(path)

    def names(self, folder: str) -> list[str]:
        """As `Objects.names`."""
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
            text = f"remote shard: expected {to}, got: {first_line(error)}"
            raise StoreUnavailable(text) from error

"""`MooncakeObjects`: objects in a Mooncake Store, the pooled host memory of several machines.

Its client (the package `mooncake-transfer-engine`, or `…-non-cuda`) takes bytes from memory that
was registered with it, and says with numbers what it refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument, StoreUnavailable

_Answer = TypeVar("_Answer")

_NEEDED = {"local_hostname", "metadata_server", "master_server_addr"}
_OWN = {
    *("global_segment_size", "local_buffer_size", "protocol", "rdma_devices", "ipc_socket_path"),
    *("enable_ssd_offload", "ssd_offload_path", "tenant_id"),
}
_LENDS_NOTHING = {"global_segment_size": "0", "local_buffer_size": str(16 << 20), "protocol": "tcp"}
_ABSENT = -704
_PIECE = 8 << 20
"""Bytes that are read at a time, as many as `RemoteStore` asks for; each has the whole patience."""


class _Stream:
    """An object that is read in ranges, through memory that the client knows."""

    def __init__(self, objects: MooncakeObjects, path: str, size: int, room: _Registered) -> None:
        self._objects, self._path, self._left = objects, path, size
        self._room, self._at = room, 0

    def take(self, room: memoryview) -> int:
        size = min(len(room), self._left, _PIECE)
        if size == 0:
            return 0
        taken = self._objects.read_range(self._path, self._at, size, self._room)
        room[:taken] = self._room.memory[:taken].data
        self._at, self._left = self._at + taken, self._left - taken
        return taken


class _Registered:
    """Memory that the client may write to and read from."""

    def __init__(self, client: Any, size: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty(size, np.uint8)
        self.client, self.address = client, self.memory.ctypes.data
        _accepted("memory to be registered", client.register_buffer(self.address, size))

    def release(self) -> None:
        self.client.unregister_buffer(self.address)


class MooncakeObjects:
    """What lies in a Mooncake Store, as `Objects` says.

    `options` are those of Mooncake's own client. Where they name no `global_segment_size`, this
    process lends no memory to the store. The client is made by the first call. What its own
    functions need longer than `timeout_s` for (for 8 MiB, where bytes come or go) is given up:
    until they end by themselves, every call is refused at once.

    # Errors
    `InvalidArgument` for options that its client does not know.
    """

    def __init__(self, options: Mapping[str, str], timeout_s: float) -> None:
        known = _NEEDED | _OWN
        if not options.keys() <= known or not options.keys() >= _NEEDED:
            expected = f"{sorted(_NEEDED)} and of {sorted(_OWN)}"
            raise InvalidArgument(
                f"remote store: expected options {expected}, got {shown(sorted(options))}"
            )
        try:
            self._make: Callable[[], Any] = import_module("mooncake.store").MooncakeDistributedStore
        except ImportError as error:
            raise StoreUnavailable(
                "remote store: expected the package mooncake-transfer-engine and the libraries it "
                f"names (Debian: libibverbs1 libnuma1 libcurl4), got: {error}"
            ) from error
        self._options = {**_LENDS_NOTHING, **options}
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._client: Any = None
        self._overdue: list[threading.Thread] = []
        self._rooms: list[_Registered] = []

    def size(self, path: str) -> int | None:
        """As `Objects.size`."""
        client = self._connected()
        size = self._within("to be looked for", lambda: int(client.get_size(path)))
        return None if size == _ABSENT else _accepted("shard to be looked for", size)

    @contextmanager
    def reading(self, path: str, size: int) -> Iterator[_Stream]:
        """As `Objects.reading`."""
        room = self._room()
        try:
            yield _Stream(self, path, size, room)
        finally:
            # An overdue read may still write there; until it has ended, nobody reads at all.
            with self._lock:
                self._rooms.append(room)

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> None:
        """As `Objects.write`. The object lies in this process's memory once more meanwhile."""
        client = self._connected()

        def put() -> int:
            whole = _Registered(client, size)
            try:
                at = 0
                for piece in pieces:
                    whole.memory[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                    at += len(piece)
                return int(client.upsert_from(path, whole.address, size))
            finally:
                whole.release()

        _accepted("shard to be written", self._within("to be written", put, size))

    def remove(self, path: str) -> None:
        """As `Objects.remove`, also while somebody else reads it: then their checksums fail."""
        client = self._connected()
        said = self._within("to be removed", lambda: int(client.remove(path, True)))
        if said != _ABSENT:
            _accepted("shard to be removed", said)

    def names(self, folder: str) -> list[str]:
        """Refused: the client of a Mooncake Store cannot list."""
        raise StoreUnavailable("remote shard: expected to be listed, got: mooncake cannot list")

    def read_range(self, path: str, at: int, size: int, room: _Registered) -> int:
        """Reads some bytes of an object into registered memory; 0 where it has just gone."""

        def get() -> int:
            ranges = ([[[0]]], [[[at]]], [[[size]]])
            return int(room.client.get_into_ranges([room.address], [[path]], *ranges)[0][0][0])

        taken = self._within("to be read", get)
        return 0 if taken == _ABSENT else _accepted("shard to be read", taken)

    def _room(self) -> _Registered:
        with self._lock:
            if self._rooms:
                return self._rooms.pop()
        client = self._connected()
        return self._within("memory to be registered", lambda: _Registered(client, _PIECE))

    def _connected(self) -> Any:
        """The client, which is made at most once at a time."""
        with self._connecting:
            if self._client is None:
                self._client = self._within("to be connected to", self._set_up)
            return self._client

    def _set_up(self) -> Any:
        client = self._make()
        _accepted("client to be connected", int(client.setup(self._options)))
        return client

    def _within(self, to: str, call: Callable[[], _Answer], size: int = 0) -> _Answer:
        """Calls in a thread of its own, which is left to itself when its time is over."""
        done: Future[_Answer] = Future()

        def answer() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        with self._lock:
            self._overdue = [thread for thread in self._overdue if thread.is_alive()]
            if self._overdue:
                raise _late(to)
        thread = threading.Thread(target=answer, name="kvweave mooncake", daemon=True)
        thread.start()
        try:
            return done.result(self._timeout_s * (1 + size // _PIECE))
        except FutureTimeout as error:
            with self._lock:
                self._overdue.append(thread)
            raise _late(to) from error


def _late(to: str) -> StoreUnavailable:
    return StoreUnavailable(f"remote shard: expected {to}, got: no answer in time")


def _accepted(what: str, said: int) -> int:
    """What a function of the client said, unless it is one of the numbers it refuses with."""
    if said < 0:
        raise StoreUnavailable(f"remote store: expected {what}, got: Mooncake's error {said}")
    return said

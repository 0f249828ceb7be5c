"""`RemoteStore`: shards behind a service on another machine, of which nothing is believed.

An object is a shard's file, named by the SHA-256 of the tokens and all that their KV depends on.
Its size is held against a bound before anything is read, its head before any part, its token ids
before any KV, and each part against its checksum before anybody has it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvweave._native import ShardHead
from kvweave.arguments import real, shown, whole, word
from kvweave.errors import CorruptShard, ForeignShard, InvalidArgument, UnknownShard
from kvweave.remote.mooncake_objects import MooncakeObjects
from kvweave.remote.objects import Objects, Stream, read_bytes, read_into
from kvweave.remote.opendal_objects import OpendalObjects
from kvweave.remote.seal import SEAL_BYTES, Seal, check_secret
from kvweave.store import Provenance

TOKENS = "tokens"
MOST_BYTES = 1 << 36
_FOLDER = "shards/"
_NAME = re.compile(r"[0-9a-f]{64}")
_ALIGNED, _CHUNK = 4096, 8 << 20


@dataclass(frozen=True, eq=False)
class RemoteShard:
    """A shard that was read and checked, all of it: its parts lie in the host's memory."""

    name: str
    head: ShardHead
    memory: Mapping[str, npt.NDArray[np.uint8]]

    @property
    def provenance(self) -> Provenance:
        """What its KV is of."""
        return self.head.provenance

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part, the token ids first."""
        return {name: size for name, (_, _, size) in self.head.places.items()}

    def tokens(self) -> npt.NDArray[np.uint32]:
        """The token ids, u32 [T]."""
        return self.memory[TOKENS].view("<u4").astype(np.uint32)

    def read(self, part: str) -> bytes:
        """A part as bytes."""
        return self.memory[part].tobytes()


@dataclass(frozen=True)
class StoredObject:
    """One line of what a remote store holds. Where the object says nothing, `error` says why.

    `used` is 0: a service does not say when an object was last read.
    """

    name: str
    provenance: Provenance | None
    tokens: int | None
    expires: int | None
    file_bytes: int
    error: str | None
    used: int = 0


class RemoteStore:
    """Shards on other machines: `scheme` names a service, `options` are its own.

    "mooncake" is a Mooncake Store; "fs", "s3", "redis" and other names are services of OpenDAL.

    `timeout_s`: a call that waits longer for a byte fails. `secret`, 16 to 64 bytes: objects are
    sealed with it, and one that was sealed otherwise is refused; without it, whoever can write to
    the service can write KV of their choice. `most_bytes`: larger objects are refused. From any
    thread.

    # Errors
    `InvalidArgument` for options that cannot be; `StoreUnavailable` without the package that
    speaks to the service, and of every method where the service does not answer, or refuses.
    """

    def __init__(
        self,
        scheme: str,
        options: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 2.0,
        secret: bytes | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        given = dict(options or {})
        for key, value in given.items():
            word("option", key)
            word(f"option {key}", value)
        check_secret(secret)
        self.scheme = word("scheme", scheme)
        if self.scheme == "fs" and "root" in given:
            # A file is written beside and renamed, so that none is read half written.
            given.setdefault("atomic_write_dir", str(Path(given["root"]) / "writing"))
        self._most = whole("most_bytes", most_bytes, 1)
        self._secret = secret
        self._objects = _objects(self.scheme, given, real("timeout_s", timeout_s))
        self._lock = threading.Lock()
        self._refused: set[str] = set()

    def __repr__(self) -> str:
        """Without its options, which may hold keys of the service."""
        return f"RemoteStore({self.scheme!r}, sealed={self._secret is not None})"

    @staticmethod
    def from_file(path: str | PathLike[str]) -> RemoteStore:
        """The store that a JSON file describes: `scheme`, `options`, `secret` in hexadecimal.

        # Errors
        As the class; `InvalidArgument` for a file that says something else.
        """
        try:
            said = json.loads(Path(path).read_bytes())
            known = {"scheme", "options", "secret", "timeout_s", "most_bytes"}
            if not isinstance(said, dict) or not said.keys() <= known or "scheme" not in said:
                raise InvalidArgument(f"remote store: expected {sorted(known)}, got {shown(said)}")
            if (secret := said.pop("secret", None)) is not None:
                said["secret"] = bytes.fromhex(secret)
        except (OSError, ValueError, TypeError) as error:
            text = f"remote store: expected a JSON file that describes one, got: {error}"
            raise InvalidArgument(text) from error
        return RemoteStore(said.pop("scheme"), said.pop("options", None), **said)

    # ---- shards ---------------------------------------------------------------------------

    def put(
        self,
        provenance: Provenance,
        tokens: npt.NDArray[Any],
        parts: dict[str, Any],
        *,
        expires: int | None = None,
    ) -> tuple[str, bool]:
        """Writes the KV of some tokens; its name, and whether it was written or there before.

        `parts`: bytes, or contiguous uint8 arrays. When this returns, the service has it.
        """
        head = ShardHead(provenance, tokens, parts, expires=expires)
        name = provenance.shard_name(tokens)
        if self._is_there(name, head):
            return name, False
        ids = np.ascontiguousarray(tokens).astype("<u4").tobytes()
        seal = Seal(self._secret)
        pieces = _sealed_pieces(head, {TOKENS: ids, **parts}, seal)
        self._objects.write(_path(name), head.file_bytes + seal.size, pieces)
        with self._lock:
            self._refused.discard(name)
        return name, True

    def get(
        self,
        provenance: Provenance,
        tokens: npt.NDArray[Any],
        *,
        most_bytes: int | None = None,
        left: Callable[[], bool] = lambda: False,
        now: int | None = None,
    ) -> RemoteShard | None:
        """The shard of some tokens, all of it compared and checked; None where there is none.

        `most_bytes`: what such a shard can have at most. `left` is asked between pieces whether
        nobody wants it any more: then None.

        # Errors
        `CorruptShard`, `ForeignShard`: then the KV is to be computed, and `put` replaces it.
        """
        name = provenance.shard_name(tokens)
        try:
            with self._opened(name, most_bytes) as found:
                if found is None or _is_expired(found[0], now):
                    return None
                provenance.expect(found[0].provenance)
                if found[0].tokens != len(tokens):
                    raise _other_tokens()
                return self._read(name, *found, np.asarray(tokens), left)
        except (CorruptShard, ForeignShard):
            with self._lock:
                self._refused.add(name)
            raise

    def contains(
        self, provenance: Provenance, tokens: npt.NDArray[Any], *, now: int | None = None
    ) -> bool:
        """Whether there is a shard of some tokens, by what its head says."""
        head = self._head(provenance.shard_name(tokens))
        if head is None:
            return False
        provenance.expect(head.provenance)
        return head.tokens == len(tokens) and not _is_expired(head, now)

    def delete(self, name: str) -> None:
        """Removes a shard, if it is there."""
        self._objects.remove(_path(_checked(name)))

    # ---- upkeep ---------------------------------------------------------------------------

    def list(self, namespace: str | None = None) -> list[StoredObject]:
        """What is there, by name; of one namespace, or all. For whoever serves tenants.

        # Errors
        `StoreUnavailable` of a service that cannot list, as Redis and Mooncake.
        """
        names = [name for name in self._objects.names(_FOLDER) if _NAME.fullmatch(name)]
        found = [self._line(name) for name in names]
        held = [one for one in found if one is not None]
        return [one for one in held if namespace is None or _is_of(one, namespace)]

    def verify(self, name: str) -> None:
        """Reads every byte of a shard and holds it to its checksums, its seal and its name.

        # Errors
        `CorruptShard`, `ForeignShard`, `UnknownShard`.
        """
        with self._opened(_checked(name), None) as found:
            shard = None if found is None else self._read(name, *found, None, lambda: False)
        if shard is None:
            raise UnknownShard(f"shard: expected {name}, got none of that name")
        own = shard.provenance.shard_name(shard.tokens())
        if own != name:
            raise ForeignShard(f"shard name: expected {own}, got {name}", expected=own, got=name)

    def collect(self, *, spoiled: tuple[str, ...] = (), now: int | None = None) -> dict[str, int]:
        """Removes what has expired, what is spoiled by its head, and what `spoiled` names."""
        counts = {"expired": 0, "spoiled": 0, "bytes": 0}
        for one in self.list():
            expired = one.expires is not None and _now(now) >= one.expires
            if expired or one.provenance is None or one.name in spoiled:
                self.delete(one.name)
                counts["expired" if expired else "spoiled"] += 1
                counts["bytes"] += one.file_bytes
        return counts

    # ---- inside ---------------------------------------------------------------------------

    def _head(self, name: str) -> ShardHead | None:
        """The head of an object; None where there is no object."""
        with self._opened(name, None) as found:
            return None if found is None else found[0]

    @contextmanager
    def _opened(
        self, name: str, most_bytes: int | None
    ) -> Iterator[tuple[ShardHead, Stream] | None]:
        """The head of an object, its size bounded first, and the bytes behind it."""
        size = self._objects.size(_path(name))
        if size is None:
            yield None
            return
        most = min(self._most, self._most if most_bytes is None else most_bytes)
        sealed = 0 if self._secret is None else SEAL_BYTES
        if not _ALIGNED + sealed <= size <= most + sealed:
            expected = f"{_ALIGNED} to {most} bytes"
            raise CorruptShard(f"remote shard: expected {expected}, got {size}")
        with self._objects.reading(_path(name), size) as stream:
            begin = read_bytes(stream, _ALIGNED)
            length = ShardHead.length(begin, size - sealed)
            begin += read_bytes(stream, length - len(begin))
            yield ShardHead.parse(begin, size - sealed), stream

    def _read(
        self,
        name: str,
        head: ShardHead,
        stream: Stream,
        tokens: npt.NDArray[Any] | None,
        left: Callable[[], bool],
    ) -> RemoteShard | None:
        """All parts of an object whose head is known; None if nobody wants them any more."""
        seal, memory = Seal(self._secret), {}
        seal.add(head.encode())
        # Parts follow each other behind the head, without a gap.
        for part, (_, held, size) in head.places.items():
            room = _room(held)
            for at in range(0, held, _CHUNK):
                if left():
                    return None
                read_into(stream, room[at : at + _CHUNK].data)
            head.check(part, room)
            seal.add(room.data)
            memory[part] = room[:size]
            if part == TOKENS and not _are_asked(memory[part], tokens):
                raise _other_tokens()
        if seal.size:
            seal.expect(read_bytes(stream, seal.size))
        return RemoteShard(name, head, memory)

    def _is_there(self, name: str, head: ShardHead) -> bool:
        """Whether an object that says the very same of itself lies there and was not refused."""
        with self._lock:
            if name in self._refused:
                return False
        try:
            return self._head(name) == head
        except (CorruptShard, ForeignShard):
            return False

    def _line(self, name: str) -> StoredObject | None:
        size = self._objects.size(_path(name))
        if size is None:
            return None
        try:
            head = self._head(name)
        except (CorruptShard, ForeignShard) as error:
            return StoredObject(name, None, None, None, size, str(error))
        if head is None:
            return None
        return StoredObject(name, head.provenance, head.tokens, head.expires, size, None)


def _objects(scheme: str, options: Mapping[str, str], timeout_s: float) -> Objects:
    """Who carries bytes to and from a service of that name."""
    if scheme == "mooncake":
        return MooncakeObjects(options, timeout_s)
    return OpendalObjects(scheme, options, timeout_s)


def _sealed_pieces(head: ShardHead, parts: Mapping[str, Any], seal: Seal) -> Iterator[bytes]:
    """An object's bytes in order, the seal behind them."""
    for piece in _file_pieces(head, parts):
        seal.add(piece)
        yield piece
    if seal.size:
        yield seal.made()


def _file_pieces(head: ShardHead, parts: Mapping[str, Any]) -> Iterator[bytes]:
    yield head.encode()
    for part, (_, held, size) in head.places.items():
        data = memoryview(parts[part]).cast("B")
        for at in range(0, size, _CHUNK):
            yield bytes(data[at : at + _CHUNK])
        if held > size:
            yield bytes(held - size)


def _room(size: int) -> npt.NDArray[np.uint8]:
    """Memory of so many bytes whose begin is aligned, as tensors and direct copies like it."""
    memory = np.empty(size + _ALIGNED, np.uint8)
    begin = -memory.ctypes.data % _ALIGNED
    return memory[begin : begin + size]


def _path(name: str) -> str:
    return f"{_FOLDER}{name}"


def _checked(name: str) -> str:
    if _NAME.fullmatch(word("shard name", name)) is None:
        raise InvalidArgument(f"shard name: expected 64 hexadecimal digits, got {shown(name)}")
    return name


def _is_of(one: StoredObject, namespace: str) -> bool:
    return one.provenance is not None and one.provenance.namespace == namespace


def _is_expired(head: ShardHead, now: int | None) -> bool:
    return head.expires is not None and _now(now) >= head.expires


def _now(now: int | None) -> int:
    return int(time.time() * 1000) if now is None else whole("now", now, 0)


def _are_asked(ids: npt.NDArray[np.uint8], tokens: npt.NDArray[Any] | None) -> bool:
    """Whether the ids of a shard are those asked for, where any are."""
    return tokens is None or np.array_equal(ids.view("<u4"), tokens.astype(np.uint32))


def _other_tokens() -> ForeignShard:
    return ForeignShard("shard tokens: expected those asked for, got others under the same name")

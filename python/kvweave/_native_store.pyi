"""Types of the native module's store, which `kvweave._native` has; meaning: `kvweave.store`."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

_Array: TypeAlias = Any
"""Anything with `__dlpack__` or of numpy: checked at run time."""

@final
class CostOrder:
    """Things in the cost-aware order, by their names; for whoever keeps them elsewhere.

    What costs little and was used once goes first. `cost` is of any unit that is the same for all,
    such as FLOPs for a byte; what 32 bits do not hold counts as the most that they do. `again`: it
    was there before and had to go, which counts as a use. `note_gone`: it had to go for others;
    `withdraw`: it went for itself, and says nothing of them. Of two things that with the smaller
    `rank` (its worth, and the turn in which it came there) goes first. From any thread.

    Errors: `InvalidArgument` for a name that is not there, or is there already, and a cost below 0.
    """

    def __new__(cls) -> CostOrder: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: bytes, /) -> bool: ...
    def enter(self, name: bytes, cost: int, *, again: bool = False) -> None: ...
    def note_used(self, name: bytes) -> None: ...
    def note_gone(self, name: bytes) -> None: ...
    def withdraw(self, name: bytes) -> None: ...
    def rank(self, name: bytes) -> tuple[int, int]: ...

@final
class Provenance:
    """Everything but the tokens that K and V depend on: see `kvweave.store`.

    `regime` names the frequencies of RoPE, `heads` the head map ("" where every head keeps all),
    `layout` how the parts are to be read.
    """

    def __new__(
        cls,
        model: str,
        *,
        dtype: str,
        layout: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        namespace: str = "",
        regime: int = 0,
        heads: str = "",
    ) -> Provenance: ...
    @property
    def namespace(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def regime(self) -> int: ...
    @property
    def heads(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    def expect(self, found: Provenance) -> None: ...
    def shard_name(self, tokens: _Array, *, hash: str = "sha256") -> str: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Shard:
    """A shard that is open for reading; it stays readable when it is evicted meanwhile."""

    @property
    def name(self) -> str: ...
    @property
    def provenance(self) -> Provenance: ...
    @property
    def expires(self) -> int | None: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def parts(self) -> dict[str, int]: ...
    def tokens(self) -> npt.NDArray[np.uint32]: ...
    def read(self, part: str) -> bytes: ...
    def read_into(self, part: str, out: _Array) -> str: ...
    def read_some(self, part: str, begin: int, out: _Array) -> list[int]: ...
    def check(self, part: str, hashes: list[int]) -> None: ...

@final
class ShardHead:
    """The head of a shard's file that lies elsewhere: what it is of, and where its parts lie."""

    def __new__(
        cls,
        provenance: Provenance,
        tokens: _Array,
        parts: dict[str, Any],
        *,
        expires: int | None = None,
    ) -> ShardHead: ...
    @staticmethod
    def length(head: bytes, file_bytes: int) -> int: ...
    @staticmethod
    def parse(head: bytes, file_bytes: int) -> ShardHead: ...
    @property
    def provenance(self) -> Provenance: ...
    @property
    def tokens(self) -> int: ...
    @property
    def expires(self) -> int | None: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def places(self) -> dict[str, tuple[int, int, int]]: ...
    def encode(self) -> bytes: ...
    def check(self, part: str, memory: _Array) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class StoredShard:
    """One line of what a store holds. Where the file says nothing, `error` says why."""

    def __new__(
        cls,
        name: str,
        provenance: Provenance | None,
        tokens: int | None,
        expires: int | None,
        cost: int | None,
        file_bytes: int,
        used: int,
        documents: int,
        error: str | None,
    ) -> StoredShard: ...
    def __eq__(self, other: object, /) -> bool: ...

    name: str
    provenance: Provenance | None
    tokens: int | None
    expires: int | None
    cost: int | None
    file_bytes: int
    used: int
    documents: int
    error: str | None

@final
class Store:
    """A folder of shards: see `kvweave.store`."""

    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        hash: str | None = None,
        create: bool = True,
        capacity_bytes: int | None = None,
        quota_bytes: int | None = None,
        direct: bool = True,
        threads: int = 4,
        eviction: str = "lru",
        model: str | None = None,
    ) -> Store: ...
    @property
    def hash(self) -> str: ...
    @property
    def model(self) -> str | None: ...
    def set_quota(self, namespace: str = "", *, bytes: int | None = None) -> None: ...
    def put(
        self,
        provenance: Provenance,
        tokens: _Array,
        parts: dict[str, Any],
        *,
        expires: int | None = None,
        cost: int | None = None,
        now: int | None = None,
    ) -> tuple[str, bool]: ...
    def has_room(
        self,
        provenance: Provenance,
        tokens: int,
        parts: dict[str, int],
        *,
        expires: int | None = None,
        cost: int | None = None,
    ) -> bool: ...
    def get(
        self, provenance: Provenance, tokens: _Array, *, now: int | None = None
    ) -> Shard | None: ...
    def contains(
        self, provenance: Provenance, tokens: _Array, *, now: int | None = None
    ) -> bool: ...
    def shard(self, name: str) -> Shard: ...
    def delete(self, name: str) -> bool: ...
    def list(self, namespace: str | None = None) -> Sequence[StoredShard]: ...
    def held(self) -> tuple[int, dict[str, int]]: ...
    def name(self, namespace: str, name: str, shard: str) -> None: ...
    def document(
        self, name: str, namespace: str = "", *, now: int | None = None
    ) -> Shard | None: ...
    def forget(self, name: str, namespace: str = "") -> bool: ...
    def documents(self, namespace: str | None = None) -> Sequence[tuple[str, str, str]]: ...
    def collect(self, *, now: int | None = None) -> dict[str, int]: ...
    def verify(self, name: str) -> None: ...
    def verify_documents(self) -> Sequence[tuple[str, str]]: ...
    def export_shard(self, name: str, path: str | PathLike[str]) -> None: ...
    def import_shard(
        self, path: str | PathLike[str], *, now: int | None = None
    ) -> tuple[str, bool]: ...

"""Types of the native module. Shapes and meaning stand in `kvweave.ops` and `kvweave.cache`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from kvweave._native_ops import Moments as Moments
from kvweave._native_ops import PackedFormat as PackedFormat
from kvweave._native_ops import Reach as Reach
from kvweave._native_ops import RopeTable as RopeTable
from kvweave._native_ops import attend_decode as attend_decode
from kvweave._native_ops import attend_decode_cuda as attend_decode_cuda
from kvweave._native_ops import attend_packed as attend_packed
from kvweave._native_ops import attend_packed_cuda as attend_packed_cuda
from kvweave._native_ops import attend_prefill as attend_prefill
from kvweave._native_ops import attend_prefill_cuda as attend_prefill_cuda
from kvweave._native_ops import copy_pages_cuda as copy_pages_cuda
from kvweave._native_ops import copy_rerotate as copy_rerotate
from kvweave._native_ops import copy_rerotate_cuda as copy_rerotate_cuda
from kvweave._native_ops import estimate_pages as estimate_pages
from kvweave._native_ops import estimate_pages_cuda as estimate_pages_cuda
from kvweave._native_ops import gather_entries as gather_entries
from kvweave._native_ops import gather_entries_cuda as gather_entries_cuda
from kvweave._native_ops import merge_states as merge_states
from kvweave._native_ops import merge_states_cuda as merge_states_cuda
from kvweave._native_ops import move_fp8_pages as move_fp8_pages
from kvweave._native_ops import move_fp8_pages_cuda as move_fp8_pages_cuda
from kvweave._native_ops import move_pages as move_pages
from kvweave._native_ops import move_pages_cuda as move_pages_cuda
from kvweave._native_ops import pack_losses as pack_losses
from kvweave._native_ops import pack_pages as pack_pages
from kvweave._native_ops import pack_pages_cuda as pack_pages_cuda
from kvweave._native_ops import recycle_pages as recycle_pages
from kvweave._native_ops import recycle_pages_cuda as recycle_pages_cuda
from kvweave._native_ops import recycle_seats_cuda as recycle_seats_cuda
from kvweave._native_ops import rotate_rows as rotate_rows
from kvweave._native_ops import rotate_rows_cuda as rotate_rows_cuda
from kvweave._native_ops import score_pages as score_pages
from kvweave._native_ops import score_pages_cuda as score_pages_cuda
from kvweave._native_ops import score_tokens as score_tokens
from kvweave._native_ops import score_tokens_cuda as score_tokens_cuda
from kvweave._native_ops import select_pages as select_pages
from kvweave._native_ops import select_pages_cuda as select_pages_cuda
from kvweave._native_ops import step_tables as step_tables
from kvweave._native_ops import step_tables_cuda as step_tables_cuda
from kvweave._native_ops import unpack_pages as unpack_pages
from kvweave._native_ops import unpack_pages_cuda as unpack_pages_cuda
from kvweave._native_ops import write_pages as write_pages
from kvweave._native_ops import write_pages_cuda as write_pages_cuda
from kvweave._native_store import CostOrder as CostOrder
from kvweave._native_store import Provenance as Provenance
from kvweave._native_store import Shard as Shard
from kvweave._native_store import ShardHead as ShardHead
from kvweave._native_store import Store as Store
from kvweave._native_store import StoredShard as StoredShard
from kvweave._native_virtual_pages import VirtualPages as VirtualPages

__version__: str

_Rows: TypeAlias = npt.NDArray[np.int32]
_Array: TypeAlias = Any
_Pairs: TypeAlias = Sequence[tuple[str, str]]
"""Anything with `__dlpack__` or of numpy: checked at run time."""

@final
class Arena:
    """All pages as a tensor [pages, 2, P, D]."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: Any | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

@final
class KvShape:
    """The KV geometry of a model."""

    def __new__(
        cls, layers: int, kv_heads: int, head_dim: int, page_tokens: int = 16, dtype: Any = None
    ) -> KvShape: ...
    def __hash__(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    def blocks_for_tokens(self, tokens: int) -> int: ...
    def pages_for_blocks(self, blocks: int, heads: HeadClassMap | None = None) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class HeadClassMap:
    """What each (layer, KV head) keeps and reads."""

    @staticmethod
    def from_json(text: str) -> HeadClassMap: ...
    @staticmethod
    def full(shape: KvShape, model_fingerprint: str) -> HeadClassMap: ...
    def to_json(self) -> str: ...
    def _repr_html_(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def model_fingerprint(self) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class HeadGroup:
    """The heads of one class, whose blocks come and go together."""

    def __new__(
        cls,
        kind: str,
        sink: int,
        recent: int,
        pages: int,
        read: int,
        rerank_every: int,
        score: str,
        estimate: bool,
    ) -> HeadGroup: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    kind: str
    sink: int
    recent: int
    pages: int
    read: int
    rerank_every: int
    score: str
    estimate: bool

@final
class PlanSpan:
    """Tokens [start, end) of a prompt with one outcome."""

    start: int
    end: int
    kind: str
    reason: str | None
    explanation: str | None
    delta: int | None
    source: str | None
    exact: bool | None
    own: bool | None
    @staticmethod
    def from_json(text: str) -> PlanSpan: ...
    def to_json(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class ReusePlan:
    """What happens to every token of a prompt."""

    tokens: int
    spans: list[PlanSpan]
    reused_prefix: int
    reused_segment: int
    recomputed: int
    def rows(self) -> _Rows: ...
    @staticmethod
    def from_json(text: str) -> ReusePlan: ...
    def to_json(self) -> str: ...
    def _repr_html_(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class KvRequest:
    """An admitted prompt: its plan, its blocks and their tables."""

    @property
    def plan(self) -> ReusePlan: ...
    @property
    def length(self) -> int: ...
    @property
    def tokens(self) -> _Rows: ...
    @property
    def namespace(self) -> str: ...
    @property
    def regime(self) -> int: ...
    @property
    def released(self) -> bool: ...
    @property
    def tables(self) -> int: ...
    @property
    def promoted(self) -> list[tuple[int, int]]: ...
    def head_rows(self, layer: int) -> _Rows: ...
    def entries(self, table: int = 0) -> _Rows: ...
    def take_copies(self, group: int = 0) -> _Rows: ...
    def finish_copies(self) -> None: ...
    def make_writable(self, positions: _Array, group: int | None = None) -> None: ...
    def slots(self, positions: _Array, table: int = 0) -> _Rows: ...
    def advance(self, start: int, end: int) -> None: ...
    def promote(self, layer: int, head: int) -> _Rows: ...
    def append(self, tokens: _Array) -> None: ...
    def truncate(self, length: int) -> None: ...
    def set_tokens(self, start: int, tokens: _Array) -> None: ...
    def commit(self, computed: int, exact: int) -> None: ...
    def retract(self) -> None: ...
    def freeze(self, name: str, start: int, end: int) -> None: ...
    def require_frozen_room(self, name: str, *, going: _Pairs = ()) -> None: ...
    def advise(
        self,
        start: int,
        end: int,
        *,
        priority: int = 0,
        cost: int = 1,
        until: int | None = None,
        past: str = "first",
        hint: str = "none",
    ) -> None: ...
    def fork(self) -> KvRequest: ...
    def kv_bytes(self) -> tuple[int, int]: ...
    def spill(self, group: int, home: _Array, slots: int) -> _Rows: ...
    def bring_back(self, group: int) -> None: ...
    def spilled(self, group: int) -> int: ...
    def bring_in(self) -> None: ...
    def release(self) -> None: ...
    def __enter__(self) -> KvRequest: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class FrozenSegment:
    """A knowledge-base entry, as it was when it was asked for."""

    def __new__(
        cls,
        name: str,
        namespace: str,
        tokens: int,
        blocks: int,
        resident_blocks: int,
        references: int,
    ) -> FrozenSegment: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

    name: str
    namespace: str
    tokens: int
    blocks: int
    resident_blocks: int
    references: int

@final
class KvCache:
    """A cache of KV blocks over one arena of pages."""

    def __new__(
        cls,
        shape: KvShape,
        *,
        arena_bytes: int | None = None,
        blocks: int | None = None,
        heads: HeadClassMap | None = None,
        hash: str = "xxh3-128",
        frozen_share: float = 0.5,
        watermark: float = 0.9,
        eviction: str = "lru",
        external: _Array | None = None,
        fingerprint: str = "",
        memory: bool = True,
    ) -> KvCache: ...
    @property
    def shape(self) -> KvShape: ...
    @property
    def arena(self) -> Any: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def groups(self) -> list[HeadGroup]: ...
    def head_rows(self, layer: int) -> _Rows: ...
    def page_layers(self, group: int) -> _Rows: ...
    def admit(
        self,
        tokens: _Array,
        *,
        namespace: str = "",
        segments: Sequence[tuple[int, int, str]] | None = None,
        discover: bool = False,
        reuse: str = "segments",
        mode: str = "materialise",
        reserve_tokens: int = 0,
        regime: int = 0,
        chunk_tokens: int = 0,
        publish: bool = True,
    ) -> KvRequest: ...
    def append_step(self, requests: Sequence[KvRequest], tokens: _Array) -> None: ...
    def zero_freed_by(self, fill: Callable[[_Rows], None]) -> None: ...
    def zero_freed(self) -> None: ...
    def forget(self, namespace: str | None = "") -> int: ...
    def match_prefix(self, tokens: _Array, namespace: str = "", *, regime: int = 0) -> int: ...
    def match_segment(self, tokens: _Array, namespace: str = "", *, regime: int = 0) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def check(self) -> None: ...
    def frozen(self, namespace: str | None = None) -> list[FrozenSegment]: ...
    def frozen_segment(self, name: str, namespace: str = "") -> FrozenSegment: ...
    def delete(self, name: str, namespace: str = "") -> None: ...
    def require_frozen_room(
        self, name: str, tokens: _Array, namespace: str, *, regime: int, going: _Pairs = ()
    ) -> None: ...
    def set_quota(
        self, namespace: str = "", *, blocks: int | None = None, bytes: int | None = None
    ) -> None: ...
    def advise(
        self,
        tokens: _Array,
        namespace: str = "",
        *,
        start: int = 0,
        end: int | None = None,
        regime: int = 0,
        priority: int = 0,
        cost: int = 1,
        until: int | None = None,
        past: str = "first",
        hint: str = "none",
    ) -> int: ...
    def set_time(self, now: int) -> None: ...
    def rebalance(self) -> None: ...

@final
class DecodeStep:
    """What one decode step of B requests reads and writes: see `DecodeRows.step`."""

    positions: _Rows
    slots: _Rows
    spans: _Rows
    places: npt.NDArray[np.int64]
    moved: _Rows
    copies: _Rows
    entries: int
    lanes: int

@final
class DecodeRows:
    """The tables of requests that decode together, their entries in one array of the caller's.

    A step has T tables: one for each head group of the cache, then one for each head of
    `set_heads`, i32 [N, 4] of layer, KV head, and the window and sink of what the head sees where
    it was not promoted. `step` appends one token to each request, all or none: it gives positions
    i32 [B]; slots i32 [T, B, 2] of block and slot; spans i32 [B, T, 2], from where to where a
    table's entries lie in the array; places i64 [M] of the array and what is to be written there,
    moved i32 [M, 5]; copies i32 [C, 8] of request, group, and the columns of `take_copies`, to be
    executed before anything is written. The array has `entries` rows and doubles when it must.
    `counts` i32 [B] appends so many tokens to each, at least one, tokens i32 [R] being those of
    all, one request behind the other: positions are i32 [R] then and slots i32 [T, R, 2]. Tokens
    that `KvRequest.truncate` took back since are listed no more, and nothing else is listed anew.
    Errors: `PoolFull` with the number of the request in `request`, `InvalidArgument`; nothing has
    changed then.
    """

    def __new__(cls, cache: KvCache) -> DecodeRows: ...
    @property
    def tables(self) -> int: ...
    @property
    def entries(self) -> int: ...
    def set_heads(self, heads: _Array) -> None: ...
    def join(self) -> int: ...
    def leave(self, row: int) -> None: ...
    def step(
        self, requests: Sequence[KvRequest], rows: _Array, tokens: _Array, counts: _Array = None
    ) -> DecodeStep: ...

@final
class Scheduler:
    """Which requests of a cache the next step computes; `kvweave.scheduler` says how it is used.

    Times are nanoseconds from any start and never go back; requests are numbers from 0 on, of one
    live request at a time. Use it from any thread. `cancel`, `finish`, `produced` and `not_done`
    say whether the request was live, `expect` whether it waits. Errors: `InvalidArgument`, and for
    a prompt that the whole arena could not hold `PoolFull`; nothing has changed then.
    """

    def __new__(
        cls,
        cache: KvCache,
        *,
        token_budget: int = 8192,
        chunk_tokens: int = 8192,
        max_running: int = 256,
        partial_prefills: int = 4,
        lead_share: float = 0.5,
        ageing_ns: int = 10_000_000_000,
        patience_ns: int = 2_000_000_000,
        headroom: int = 1,
        quantum: int = 65_536,
        kind_patience: int = 8,
        order: str = "arrival",
        doubling_ns: int = 10_000_000_000,
        span_tokens: int | None = None,
        homes: list[tuple[int, KvCache, int, int]] | None = None,
        part_tokens: int | None = None,
    ) -> Scheduler: ...
    def arrive(
        self,
        request: int,
        tokens: int,
        now: int,
        *,
        cached: int = 0,
        shared_pages: int = 0,
        reserve: int = 0,
        priority: int = 0,
        namespace: str = "",
        kind: int = 0,
        whole: bool = False,
        leaves: bool = False,
    ) -> None: ...
    def expect(
        self,
        request: int,
        *,
        cached: int,
        shared_pages: int = 0,
        reserved: int = 0,
        leaves: bool = False,
    ) -> bool: ...
    def in_parts(self, request: int) -> bool: ...
    def holds(self, request: int, *, pages: int = 0, homes: list[int] | None = None) -> None: ...
    def pages_of(self, tokens: int) -> int: ...
    def set_weight(self, namespace: str, weight: int) -> None: ...
    def cancel(self, request: int) -> bool: ...
    def finish(self, request: int) -> bool: ...
    def produced(self, request: int, count: int = 1) -> bool: ...
    def not_done(self, request: int, *, no_room: bool = False) -> bool: ...
    def plan(
        self, now: int, *, answered: _Array | None = None, finished: _Array | None = None
    ) -> StepPlan: ...
    def state(self, request: int) -> str | None: ...
    def metrics(self) -> dict[str, int]: ...

@final
class StepPlan:
    """One step of the whole batch: rows as `kvweave.scheduler` names them, in that order."""

    step: int
    kind: int
    refused: list[tuple[int, str]]
    preempted: npt.NDArray[np.int64]
    admitted: npt.NDArray[np.int64]
    prefill: npt.NDArray[np.int64]
    decode: npt.NDArray[np.int64]
    blocked: tuple[int, int, int] | None
    tokens: int
    is_idle: bool
    def __eq__(self, other: object, /) -> bool: ...

def cuda_status() -> str: ...
def stand_back() -> None: ...

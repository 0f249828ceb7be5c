"""Types of the native module's ops, which `kvweave._native` has; their meaning: `kvweave.ops`."""

from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

_Rows: TypeAlias = npt.NDArray[np.int32]
_Array: TypeAlias = Any
"""Anything with `__dlpack__` or of numpy: checked at run time."""
_Results: TypeAlias = tuple[_Array, _Array]
_TablePair: TypeAlias = tuple[_Array, _Array | None]
"""A table on a CUDA device, and the same on the host where it came from there."""
_Bases: TypeAlias = tuple[_Array, _Array] | None
"""Bases of packed pages, and which of them each block has."""

@final
class RopeTable:
    """Inverse frequencies of every layer and how elements pair up."""

    def __new__(cls, inv_freq: _Array, pairing: str = "half") -> RopeTable: ...
    layers: int
    rotary_dim: int
    pairing: str
    inv_freq: npt.NDArray[np.float32]

@final
class Reach:
    """What each KV head of a layer reads: its entry table, page, window and sink."""

    def __new__(cls, tables: int, heads: _Array) -> Reach: ...
    @property
    def tables(self) -> int: ...
    @property
    def heads(self) -> _Rows: ...

@final
class PackedFormat:
    """What a packed page is, by kind and sizes."""

    def __new__(
        cls,
        kind: str,
        head_dim: int,
        page_tokens: int = 64,
        scales: str = "bf16",
        *,
        kept: int | None = None,
        group: int = 1,
        channels: int | None = None,
        numbers: str | None = None,
        token_bytes: int | None = None,
    ) -> PackedFormat: ...
    @property
    def kind(self) -> str: ...
    @property
    def scales(self) -> str: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def numbers(self) -> str: ...
    @property
    def token_bytes(self) -> int | None: ...
    @property
    def basis_rows(self) -> int | None: ...
    def check_bases(self, bases: _Array) -> None: ...
    def __hash__(self) -> int: ...

@final
class Moments:
    """Mean and covariance of a text's keys and values, and the basis made of them."""

    def __new__(cls, format: PackedFormat, pages: int) -> Moments: ...
    def add(self, cache: _Array, packs: _Array) -> None: ...
    def add_queries(self, queries: _Array, *, first: int, kv_heads: int) -> None: ...
    def moved(
        self, rope: RopeTable, deltas: _Array, *, kv_heads: int, first_layer: int
    ) -> Moments: ...
    @property
    def tokens(self) -> int: ...
    @property
    def left_out(self) -> int: ...
    @property
    def metric(self) -> npt.NDArray[np.float64] | None: ...
    def basis(self, *, centred: bool = True, rotated: bool = True) -> npt.NDArray[np.float32]: ...

def write_pages(
    cache: _Array,
    layer: int,
    k: _Array,
    v: _Array,
    slots: _Array,
    reach: Reach | None,
    bounds: tuple[_Array, _Array, _Array | None, _Array | None] | None,
    kv_scales: tuple[float, float] | None,
    reference: bool,
) -> None: ...
def write_pages_cuda(
    cache: _Array,
    layer: int,
    k: _Array,
    v: _Array,
    slots: _TablePair,
    reach: Reach | None,
    bounds: tuple[_Array, _TablePair, _TablePair | None, _Array | None] | None,
    kv_scales: tuple[float, float] | None,
    stream: int,
) -> None: ...
def copy_rerotate(
    cache: _Array,
    source: _Array | None,
    copies: _Array,
    rope: RopeTable,
    kv_heads: int,
    layers: _Array | None,
    reference: bool,
) -> None: ...
def copy_rerotate_cuda(
    cache: _Array,
    source: _Array | None,
    copies: _TablePair,
    rope: RopeTable,
    kv_heads: int,
    layers: _TablePair | None,
    stream: int,
) -> None: ...
def attend_prefill(
    arguments: Any,
    row_offsets: _Array | None,
    entry_offsets: _Array | None,
    out: _Array,
    lse: _Array,
    reference: bool,
) -> None: ...
def attend_decode(
    arguments: Any, entry_offsets: _Array, out: _Array, lse: _Array, reference: bool
) -> None: ...
def attend_prefill_cuda(
    arguments: Any,
    row_offsets: _TablePair,
    entry_offsets: _TablePair,
    results: _Results,
    workspace: tuple[_Array, _Array] | None,
    stream: int,
) -> tuple[int, int] | None: ...
def attend_decode_cuda(
    arguments: Any,
    entry_offsets: _TablePair,
    results: _Results,
    workspace: tuple[_Array, _Array] | None,
    stream: int,
) -> tuple[int, int] | None: ...
def attend_packed(
    arguments: Any,
    format: PackedFormat,
    bases: _Bases,
    entry_offsets: _Array,
    out: _Array,
    lse: _Array,
    reference: bool,
) -> None: ...
def attend_packed_cuda(
    arguments: Any,
    format: PackedFormat,
    bases: tuple[_Array, _TablePair] | None,
    entry_offsets: _TablePair,
    results: _Results,
    workspace: tuple[_Array, _Array] | None,
    stream: int,
) -> tuple[int, int] | None: ...
def move_fp8_pages(
    moves: tuple[_Array, _Array],
    slots: tuple[_Array, _Array, int],
    home: tuple[_Array, _Array, _Array, int],
    way: str,
    reference: bool,
) -> None: ...
def move_fp8_pages_cuda(
    moves: tuple[_TablePair, _TablePair],
    slots: tuple[_Array, _TablePair, int],
    home: tuple[_Array, _Array, _TablePair, int],
    way: str,
    processors: int,
    stream: int,
) -> None: ...
def move_pages(
    moves: tuple[_Array, _Array],
    slots: tuple[_Array, _Array, int],
    home: tuple[_Array, _Array, int],
    way: str,
    reference: bool,
) -> None: ...
def copy_pages_cuda(
    moves: tuple[_Array, _Array],
    slots: tuple[_Array, _Array, int],
    home: tuple[_Array, _Array, int],
    way: str,
    stream: int,
) -> None: ...
def move_pages_cuda(
    moves: tuple[_TablePair, _TablePair],
    slots: tuple[_Array, _TablePair, int],
    home: tuple[_Array, _TablePair, int],
    way: str,
    processors: int,
    stream: int,
) -> None: ...
def pack_losses(
    cache: _Array,
    format: PackedFormat,
    packs: _Array,
    pages: int,
    ranks: _Array,
    basis: _Array | None,
    roots: _Array | None,
    left_out: int,
    packed: _Array | None,
    reference: bool,
) -> npt.NDArray[np.float64]: ...
def pack_pages(
    cache: _Array,
    packed: _Array,
    format: PackedFormat,
    packs: _Array,
    pages: int,
    bases: _Bases,
    reference: bool,
) -> None: ...
def unpack_pages(
    cache: _Array,
    packed: _Array,
    format: PackedFormat,
    packs: _Array,
    pages: int,
    bases: _Bases,
    in_basis: bool,
    reference: bool,
) -> None: ...
def pack_pages_cuda(
    cache: _Array,
    packed: _Array,
    format: PackedFormat,
    packs: _TablePair,
    pages: int,
    bases: tuple[_Array, _TablePair] | None,
    stream: int,
) -> None: ...
def unpack_pages_cuda(
    cache: _Array,
    packed: _Array,
    format: PackedFormat,
    packs: _TablePair,
    pages: int,
    bases: tuple[_Array, _TablePair] | None,
    in_basis: bool,
    in_order: bool,
    stream: int,
) -> None: ...
def recycle_pages(
    chosen: tuple[_Array, _Array],
    limit: int,
    room: tuple[_Array, _Array | None],
    results: tuple[_Array, ...],
    reference: bool,
) -> None: ...
def recycle_pages_cuda(
    chosen: tuple[_TablePair, _TablePair],
    limit: int,
    room: tuple[_Array, _Array | None],
    results: tuple[_Array, ...],
    workspace: tuple[_Array, _Array] | None,
    stream: int,
) -> tuple[int, int] | None: ...
def recycle_seats_cuda(
    chosen: tuple[_Array, bool, _Array],
    seats: tuple[_Array, _Array, _Array],
    rows: tuple[_Array, _Array, int, int],
    results: tuple[_Array, ...],
    workspace: tuple[_Array, _Array] | None,
    stream: int,
) -> tuple[int, int] | None: ...
def rotate_rows(
    vectors: tuple[_Array, _Array | None],
    turns: tuple[_Array, _Array],
    pairing: str,
    out: tuple[_Array, _Array | None] | None,
    reference: bool,
) -> None: ...
def rotate_rows_cuda(
    vectors: tuple[_Array, _Array | None],
    turns: tuple[_Array, _Array],
    pairing: str,
    out: tuple[_Array, _Array | None] | None,
    stream: int,
) -> None: ...
def score_tokens(
    arguments: Any,
    entry_offsets: _Array | None,
    mass: _Array,
    edge: tuple[_Array, int, int] | None,
    reference: bool,
) -> None: ...
def score_tokens_cuda(
    arguments: Any,
    entry_offsets: _TablePair,
    mass: _Array,
    edge: tuple[_Array, int, int] | None,
    workspace: tuple[_Array, _Array] | None,
    stream: int,
) -> tuple[int, int] | None: ...
def score_pages(
    q: _Array,
    entries: _Array,
    pages: Any,
    entry_offsets: _Array,
    results: _Results,
    reference: bool,
) -> None: ...
def select_pages(
    scores: _Array,
    counts: _Array,
    budgets: _Array,
    always: tuple[int, int],
    results: _Results,
    reference: bool,
) -> None: ...
def score_pages_cuda(
    q: _Array,
    entries: _TablePair,
    pages: Any,
    entry_offsets: _TablePair,
    results: _Results,
    stream: int,
) -> None: ...
def select_pages_cuda(
    scores: _Array,
    counts: _TablePair,
    budgets: _TablePair,
    always: tuple[int, int],
    results: _Results,
    stream: int,
) -> None: ...
def estimate_pages(
    q: _Array,
    attended: _Results,
    listed: tuple[_Array, _Array],
    pages: Any,
    read: tuple[_Array, _Array, Reach | None],
    results: _Results,
    reference: bool,
) -> None: ...
def estimate_pages_cuda(
    q: _Array,
    attended: _Results,
    listed: tuple[_TablePair, _TablePair],
    pages: Any,
    read: tuple[_TablePair, _TablePair, Reach | None],
    results: _Results,
    workspace: tuple[_Array, _Array] | None,
    stream: int,
) -> tuple[int, int] | None: ...
def gather_entries(
    chosen: tuple[_Array, _Array],
    entries: _Array,
    entry_offsets: _Array,
    reach: Reach | None,
    results: _Results,
) -> None: ...
def gather_entries_cuda(
    chosen: tuple[_Array, _Array],
    tables: tuple[_TablePair, _TablePair],
    reach: Reach | None,
    results: _Results,
    kept: tuple[_Array, _Array, _Array] | None,
    stream: int,
) -> None: ...
def step_tables(
    batch: tuple[_Array, _Array, _Array, _Array, _Array | None],
    out: tuple[_Array, _Array, _Array, _Array],
    sizes: tuple[int, int],
    spans: Sequence[tuple[int, int, int]],
) -> None: ...
def step_tables_cuda(
    batch: tuple[_Array, _Array, _Array, _Array, _Array | None],
    out: tuple[_Array, _Array, _Array, _Array],
    sizes: tuple[int, int],
    spans: Sequence[tuple[int, int, int]],
    stream: int,
) -> None: ...
def merge_states(outs: _Array, lses: _Array, out: _Array, lse: _Array, reference: bool) -> None: ...
def merge_states_cuda(
    outs: _Array, lses: _Array, out: _Array, lse: _Array, stream: int
) -> None: ...

"""The cases of `kvweave bench ops`, as data: what is computed, and how fast it must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.lab.bench.pages import PAGE, Shape

LLAMA = Shape("Llama-8B", 1, 32, 8, 128, 5e5)
"""One layer of Llama-8B: what attention is measured on."""
LAYERS_64 = Shape("Qwen3-32B", 64, 32, 8, 128, 1e6)
"""All layers of Qwen3-32B as RedKnot measures them, with 32 query heads (section 5.4)."""
WINDOW, SINK = 304, 16
"""What a head that does not read everything reads: 320 tokens (RedKnot's local heads)."""
GRAPH = ", graph replay"
"""What a case's name ends with where its call was replayed from a graph."""
K = 1024


@dataclass(frozen=True)
class Decode:
    """One row a request over `tokens` keys; `full_heads` KV heads read all, the others a window.

    With more than one layer: a launch for each, over keys of its own. `fp8`: keys and values are
    stored as e4m3 numbers.
    """

    batch: int
    tokens: int
    full_heads: int = LLAMA.kv_heads
    shape: Shape = LLAMA
    fp8: bool = False

    @property
    def dense(self) -> bool:
        """Whether every head reads everything."""
        return self.full_heads == self.shape.kv_heads

    @property
    def keys(self) -> int:
        """Keys that a request reads, summed over its KV heads."""
        local = self.shape.kv_heads - self.full_heads
        return self.full_heads * self.tokens + local * (WINDOW + SINK)


@dataclass(frozen=True)
class Prefill:
    """A share of a prompt's rows over all its keys; rows come in runs of `run` neighbours.

    `local` KV heads, the last ones, see a row's window and the sink only.
    """

    tokens: int
    share: float = 1.0
    run: int = 1
    shape: Shape = LLAMA
    local: int = 0

    @property
    def dense(self) -> bool:
        """Whether every row is computed, in heads that see everything."""
        return self.share == 1.0 and not self.local

    @property
    def full_heads(self) -> int:
        """KV heads that see everything."""
        return self.shape.kv_heads - self.local

    def positions(self) -> npt.NDArray[np.int32]:
        """Positions i32 [R] of the rows, ascending, runs at random places."""
        runs = self.tokens // self.run
        order = np.random.default_rng(7).permutation(runs)
        chosen = np.sort(order[: round(runs * self.share)])
        return (chosen[:, None] * self.run + np.arange(self.run)).flatten().astype(np.int32)

    @property
    def pairs(self) -> float:
        """(row, key) pairs that are seen, summed over KV heads."""
        seen = self.positions().astype(np.int64) + 1
        near = np.minimum(seen, WINDOW) + np.clip(seen - WINDOW, 0, SINK)
        return float(self.full_heads * seen.sum() + self.local * near.sum())


@dataclass(frozen=True)
class Copy:
    """Whole blocks of all layers copied within an arena, keys moved by `delta` positions.

    `grouped`: as blocks of a head group, whose pages are told their layers.
    """

    shape: Shape
    mib: int
    dtype: str = "bfloat16"
    pairing: str = "half"
    delta: int = 1234
    grouped: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers and heads."""
        size = 4 if self.dtype == "float32" else 2
        return self.shape.block_pages * 2 * PAGE * self.shape.head_dim * size

    @property
    def blocks(self) -> int:
        """Blocks that are copied."""
        return max(1, (self.mib << 20) // self.block_bytes)


@dataclass(frozen=True)
class Write:
    """New keys and values of `rows` tokens, each to a slot of its own.

    `local` KV heads, the last ones, have blocks of their own and keep a sink and a window.
    """

    rows: int
    shape: Shape = LLAMA
    local: int = 0

    def kept(self) -> npt.NDArray[np.int64]:
        """The rows that local heads keep."""
        rows = np.arange(self.rows)
        return rows[(rows < SINK) | (rows >= self.rows - WINDOW)]

    @property
    def vectors(self) -> int:
        """Keys that are written."""
        return (self.shape.kv_heads - self.local) * self.rows + self.local * len(self.kept())


@dataclass(frozen=True)
class Merge:
    """`parts` partial results of the same rows."""

    parts: int
    rows: int
    shape: Shape = LLAMA


@dataclass(frozen=True)
class Rotate:
    """Queries and keys of `rows` tokens, rotated by RoPE: views of one projection's output."""

    rows: int
    shape: Shape = LLAMA

    @property
    def elements(self) -> int:
        """Of queries and keys."""
        return self.rows * (self.shape.heads + self.shape.kv_heads) * self.shape.head_dim


@dataclass(frozen=True)
class Score:
    """The last `rows` of a prompt probe all its keys."""

    rows: int
    tokens: int
    shape: Shape = LLAMA


Work: TypeAlias = Decode | Prefill | Copy | Write | Rotate | Merge | Score


@dataclass(frozen=True)
class Target:
    """Ours must be `ratio` times as fast as the fastest contender whose name starts so."""

    peer: str
    ratio: float

    def __str__(self) -> str:
        return f"≥ {self.ratio:g} × {self.peer or 'best peer'}"


@dataclass(frozen=True)
class Case:
    """One row of the table. With `graph` it is measured as a call and as a graph replay.

    `cited` is what a paper says of such a case on its own machine: it is shown, never compared.
    """

    op: str
    name: str
    work: Work
    target: Target | None = None
    graph: bool = False
    cited: str = ""


LLAMA_32, QWEN, SMOL = (
    Shape("Llama-8B", 32, 32, 8, 128, 5e5),
    Shape("Qwen-0.5B", 24, 14, 2, 64, 1e6),
    Shape("SmolLM2", 30, 9, 3, 64),
)


def _decode(batch: int, tokens: int, target: Target | None) -> Case:
    name = f"decode, B={batch}, {tokens // K}K"
    return Case("decode", name, Decode(batch, tokens), target, graph=batch == 1)


def _fp8(batch: int, tokens: int) -> Case:
    name = f"decode over fp8 KV, B={batch}, {tokens // K}K"
    return Case("decode_fp8", name, Decode(batch, tokens, fp8=True), graph=batch == 1)


def _ragged(batch: int, tokens: int, full: int, target: Target | None = None) -> Case:
    heads = f"{full} of {LLAMA.kv_heads} KV heads full"
    name = f"ragged decode, {heads}, B={batch}, {tokens // K}K"
    return Case("ragged_decode", name, Decode(batch, tokens, full), target, graph=batch == 1)


def _scattered(share: float, run: int, target: Target | None = None) -> Case:
    rows = "single rows" if run == 1 else f"runs of {run}"
    name = f"prefill, {share:.0%} of 32K in {rows}"
    return Case("scattered_prefill", name, Prefill(32 * K, share, run), target)


def _layers(tokens: int, said: str) -> Case:
    """Half of the heads full, in all layers: what RedKnot's SegPagedAttention is measured on."""
    name = f"64 layers, 4 of 8 KV heads full, decode, B=1, {tokens // K}K"
    cited = f"RedKnot, section 5.4: {said} ms on an H800"
    return Case("heads", name, Decode(1, tokens, 4, LAYERS_64), graph=True, cited=cited)


def _local(tokens: int, said: str) -> Case:
    name = f"1 layer, 4 of 8 KV heads full, prefill, all of {tokens // K}K"
    # Its times grow like the context and not like its square.
    cited = f"RedKnot, section 5.4: {said} s for 64 layers on an H800, of rows it does not count"
    return Case("heads", name, Prefill(tokens, local=4), cited=cited)


def _copy(work: Copy) -> Case:
    extra = "" if work.pairing == "half" else f" {work.pairing}"
    extra += " by pages" if work.grouped else ""
    name = f"copy_rerotate, {work.shape.name} {work.dtype}{extra}, {work.mib} MiB"
    # A call of one copy turns K and moves V; a device copy moves both.
    return Case("copy_rerotate", name, work, Target("device copy", 0.92))


CASES: tuple[Case, ...] = (
    _decode(32, 16 * K, Target("FA3", 0.97)),
    _decode(16, 32 * K, Target("FlashInfer NHD", 1.5)),
    _decode(16, 8 * K, Target("FA3", 1.05)),
    _decode(1, 8 * K, Target("", 1.5)),
    _decode(1, 128 * K, Target("FA3", 1.1)),
    _fp8(32, 16 * K),
    _fp8(1, 8 * K),
    _fp8(1, 128 * K),
    _ragged(1, 32 * K, 4, Target("", 1.8)),
    _ragged(1, 128 * K, 4),
    _ragged(16, 32 * K, 4, Target("FA3", 1.05)),
    _ragged(16, 128 * K, 4),
    _ragged(1, 32 * K, 1, Target("FA3", 2.0)),
    _ragged(1, 128 * K, 1, Target("FA3", 2.0)),
    _ragged(16, 32 * K, 1, Target("FA3", 1.35)),
    _ragged(16, 128 * K, 1, Target("", 1.15)),
    _layers(8 * K, "12.6"),
    _layers(32 * K, "12.4"),
    _layers(128 * K, "24.1"),
    _local(8 * K, "0.055"),
    _local(32 * K, "0.12"),
    _local(128 * K, "0.23"),
    Case("prefill", "prefill, all of 8K", Prefill(8 * K), Target("FA3", 0.7)),
    Case("prefill", "prefill, all of 32K", Prefill(32 * K), Target("FA3", 0.7)),
    _scattered(0.05, 1, Target("FA3", 12.0)),
    _scattered(0.10, 1),
    _scattered(0.05, 64, Target("FA3", 1.0)),
    _scattered(0.10, 64),
    _copy(Copy(LLAMA_32, 64)),
    _copy(Copy(LLAMA_32, 512)),
    _copy(Copy(LLAMA_32, 2048)),
    _copy(Copy(LLAMA_32, 512, grouped=True)),
    _copy(Copy(LLAMA_32, 512, pairing="interleaved")),
    _copy(Copy(LLAMA_32, 512, dtype="float16")),
    _copy(Copy(LLAMA_32, 512, dtype="float32")),
    _copy(Copy(QWEN, 512)),
    _copy(Copy(SMOL, 512)),
    Case("write_pages", "write_pages, 64 rows", Write(64), graph=True),
    Case("write_pages", "write_pages, 8K rows", Write(8 * K)),
    Case("write_pages", "write_pages, 4 of 8 KV heads local, 8K rows", Write(8 * K, local=4)),
    Case("rotate_rows", "rotate_rows, 1 row", Rotate(1), graph=True),
    Case("rotate_rows", "rotate_rows, 64 rows", Rotate(64), graph=True),
    Case("rotate_rows", "rotate_rows, 8K rows", Rotate(8 * K)),
    Case("merge_states", "merge_states, 8 parts of 64 rows", Merge(8, 64), graph=True),
    Case("merge_states", "merge_states, 2 parts of 8K rows", Merge(2, 8 * K)),
    Case("score_tokens", "score_tokens, 64 rows over 32K", Score(64, 32 * K)),
    Case("score_tokens", "score_tokens, 1024 rows over 32K", Score(1024, 32 * K)),
)
OPS = tuple(dict.fromkeys(case.op for case in CASES))

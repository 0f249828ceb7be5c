"""Packed pages of a runner: the pool beside the exact one, what stays exact, and how much of each.

The exact pool keeps windows: of each request the sink, which all rows look at, and the newest
tokens. All heads have that one class, so blocks of what is packed go back to the pool as those
behind any window do. The packed pool is a cache of its own, of larger pages: its blocks are
counted, found again as prefixes and evicted like exact ones. Their bytes lie in one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from kvweave import ops
from kvweave.cache import HeadClassMap, KvCache, KvRequest
from kvweave.errors import InvalidArgument, PoolFull, Unsupported
from kvweave.packed_page import PAGE_TOKENS
from kvweave.plan import Rows
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.exact_firsts import ExactFirsts, firsts_counts
from kvweave.runner.kv.final_documents import FinalDocuments
from kvweave.runner.kv.final_texts import FinalTexts
from kvweave.runner.kv.packed_heads import PackedHeads
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.pool_bases import PoolBases
from kvweave.runner.kv.tables import Int32, send, send_index
from kvweave.runner.kv.text_memory import TextMemory
from kvweave.runner.model.layer_spec import LayerSpec
from kvweave.runner.model.model_spec import ModelSpec

SINK_TOKENS = PAGE_TOKENS
"""Tokens at the start of a text that are read exactly. Their packed page is never read; it is there
for what follows to be found behind it."""

RECENT_TOKENS = 128
"""The newest tokens, the row's own among them, that a decode step reads exactly: two pages of them,
so that a page has long been full when the first of its tokens is read packed."""

CHUNK_TOKENS, MOST_CHUNK_TOKENS = 2048, 16_384
"""Rows of a prompt that are computed at once where the caller names no number, at least and at
most: exact pages hold so many before they are packed."""

SCRATCH_TOKENS = 32_768
"""Packed tokens that a chunk of a prompt has unpacked at once, of one layer."""

EXACT_SHARE = 16
"""The exact pool has room for one token of so many."""

ExactPool = tuple[KvCache, torch.Tensor]
"""A cache and its pages [pages, 2, P, D]."""

_DEVICE_DIMS = (64, 128)

BOUND_BYTES = 12
"""Of bounds a channel: the least, the greatest and the mean key, in f32."""

_BOUNDED_BLOCKS = 16
"""Packed blocks that are unpacked at once, of all layers, for their bounds."""


@dataclass(frozen=True)
class PackedPool:
    """The packed blocks of one runner: `cache` counts them, `pages` are they.

    A block has the pages of all layers and KV heads for `PAGE_TOKENS` tokens. `layers`: how a
    decode step of the runner attends in each. `exact`: the pages [pages, 2, P, D] that they are
    packed from. `bases`: in which, of a format that has any.
    `heads`: which read what of them. `bounds` f32 [pages, 3, D], as `ops.bound_packed` makes them
    of exact keys, where any of them choose pages: of blocks by their numbers in `cache`, wherever
    they lie. `chunk_tokens`: see `PoolSizes.chunk`. `aside`:
    where a prompt's layers are packed while it is computed; None: behind its rows. `final`: texts
    that are packed by strategies of their own, where there may be any, and `documents` whose they
    are. `readers`: who reads blocks at the moment, each with its `request` of the books. `firsts`:
    the first tokens of documents, where these stay exact.
    """

    layers: Sequence[LayerSpec]
    packing: Packing
    cache: KvCache
    pages: ops.PackedPages
    exact: torch.Tensor
    bases: PoolBases | None
    heads: PackedHeads
    bounds: torch.Tensor | None = None
    chunk_tokens: int = CHUNK_TOKENS
    aside: Aside | None = None
    final: FinalTexts | None = None
    firsts: ExactFirsts | None = None
    readers: WeakSet[Any] = field(default_factory=WeakSet)
    documents: FinalDocuments | None = field(init=False)

    def __post_init__(self) -> None:
        documents = None
        if self.final is not None:
            documents = FinalDocuments(self.final, self.readers, PAGE_TOKENS)
        object.__setattr__(self, "documents", documents)

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.pages.data.device

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.cache.shape.kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.cache.shape.head_dim

    @property
    def block_pages(self) -> int:
        """Pages of a block: ranked by layer, then KV head."""
        return self.cache.shape.layers * self.kv_heads

    @property
    def converted_pages(self) -> int:
        """Pages of a block that are packed and unpacked at once: all of them."""
        return self.block_pages

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_pages * self.pages.format.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, of bases and first tokens that there is room for, and of the rest.

        That are bounds, and the memory for texts that are packed finally.
        """
        memory = None if self.final is None else self.final.memory
        parts = (self.pages.data, self.bases, self.bounds, memory, self.firsts)
        return sum(part.nbytes for part in parts if part is not None)

    def stats(self) -> dict[str, Any]:
        """Counts of blocks as `KvCache.stats` has them, `block_bytes`, and `held_bytes` of them.

        `basis_bytes` of one basis, `own_bases` that documents have, of `own_bases_most`. Of texts
        that are packed finally `final_blocks`, which are held, some of them, `final_cached`, for as
        long as nobody needs their room, `final_bytes`, the most that a KV head of a layer loses,
        `most_lost`, and how many lose more than the bound, `over_bound`. `firsts`: how many
        beginnings of documents are kept exactly, of `firsts_most`, in `first_bytes` each.
        """
        counts, final = self.cache.stats(), self.final
        known = {"final_blocks": 0, "final_bytes": 0, "most_lost": 0.0, "over_bound": 0}
        known["final_cached"] = 0 if self.documents is None else self.documents.cached_blocks
        if final is not None:
            counts |= {name: counts[name] - final.kept_back for name in ("total", "held")}
            known |= {"final_blocks": final.blocks, "final_bytes": final.nbytes}
            known["most_lost"] = max((text.most_lost for text in final.texts), default=0.0)
            known["over_bound"] = sum(text.over_bound for text in final.texts)
        counts |= known
        held = (counts["held"] - counts["final_blocks"]) * self.block_bytes + counts["final_bytes"]
        bases = self.bases
        known = {**counts, "block_bytes": self.block_bytes, "held_bytes": held}
        known |= {"basis_bytes": 0, "own_bases": 0, "own_bases_most": 0}
        if bases is not None:
            known |= {"basis_bytes": bases.basis_bytes, "own_bases": bases.held()}
            known["own_bases_most"] = bases.most_own
        return known | firsts_counts(self.firsts)

    @property
    def first_tokens(self) -> int:
        """How many tokens at the beginning of documents are exact beside their pages."""
        return 0 if self.firsts is None else self.firsts.tokens

    def pack(self, packs: Int32, places: Rows, basis: int | None = None, left_out: int = 0) -> None:
        """Packs exact pages, rows as `ops.pack_pages` takes them; None: in the shared basis.

        This may be made of them first, but for so many tokens at the beginning of the first row.
        `places` [N]: which pages of their texts they are.
        """
        named, packs, bases = packs, self.placed(packs), self.bases
        if bases is not None:
            if basis is None:
                some = bases.wanted(places)
                if some.any():
                    known = on_host(self.exact, packs[some], self.block_pages)
                    bases.add(*known, places[some], left_out if some[0] else 0)
                basis = bases.shared
            bases.assign(packs[:, 0], basis)
        (table,) = send(self.device, packs)
        ops.pack_pages(self.exact, self.pages, table, pages=self.block_pages)
        if self.bounds is not None and packs is not named:
            (table,) = send(self.device, named)
        self.bound_exact(self.exact, table)

    def bound(self, blocks: Int32, tokens: int) -> None:
        """Bounds of the blocks [N] of a text that came packed: of the keys that they stand for."""
        if self.bounds is None:
            return
        for first in range(0, len(blocks), _BOUNDED_BLOCKS):
            some = blocks[first : first + _BOUNDED_BLOCKS]
            size = self.block_pages
            exact = size * np.arange(1, len(some) + 1, dtype=np.int32)
            held = np.clip(tokens - PAGE_TOKENS * (first + np.arange(len(some))), 0, PAGE_TOKENS)
            shape = (size * (len(some) + 1), 2, PAGE_TOKENS, self.head_dim)
            pages = torch.zeros(shape, dtype=self.exact.dtype, device=self.device)
            packs = np.column_stack((some, held, exact)).astype(np.int32)
            self.unpack(packs, pages)
            (table,) = send(self.device, packs)
            self.bound_exact(pages, table)

    def bound_exact(self, exact: torch.Tensor, packs: ops.Table, pages: int | None = None) -> None:
        """Bounds of what is packed from exact pages, of so many pages a block; None: of all."""
        if self.bounds is not None:
            known = {"pages": pages or self.converted_pages, "page_tokens": PAGE_TOKENS}
            ops.bound_packed(exact, self.bounds, packs, **known)

    def rows(self, blocks: Int32) -> Int32:
        """Where the pages of blocks [N] lie: the first of each."""
        return blocks if self.final is None else self.final.rows(blocks)

    @property
    def text_memory(self) -> TextMemory:
        """Where texts lie that are packed finally, of a pool that has a strategy."""
        assert self.final is not None
        return self.final.memory

    @property
    def final_formats(self) -> tuple[ops.PackedFormat, ...]:
        """What texts may be packed in finally: the candidates of a strategy, then its fallback."""
        strategy, of = self.packing.strategy, self.pages.format
        if strategy is None:
            return ()
        candidates, fallback = strategy.formats(of.head_dim, of.page_tokens, of.scales)
        return (*candidates, fallback)

    def placed(self, table: Int32) -> Int32:
        """A table [N, n] of packed blocks, in its first column, with where their pages lie."""
        if self.final is None:
            return table
        found: Int32 = table.copy()
        found[:, 0] = self.rows(table[:, 0])
        return found

    def unpack(self, packs: Int32, into: torch.Tensor) -> None:
        """Writes what blocks stand for into exact pages, all layers and KV heads."""
        if self.final is not None:
            final = self.final.are_final(packs[:, 0])
            self.final.unpack(packs[final], into)
            packs = self.placed(packs[~final])
        if not len(packs):
            return
        (table,) = send(self.device, packs)
        ops.unpack_pages(self.pages, into, table, pages=self.block_pages)

    def unpack_layer(self, layer: int, packs: Int32, into: torch.Tensor, in_basis: bool) -> None:
        """Writes one layer of what blocks stand for into exact ones of a page a KV head.

        `in_basis`: as `ops.unpack_pages` has it, of blocks that `bases_of` knows.
        """
        heads = self.kv_heads
        if self.final is not None:
            final = self.final.are_final(packs[:, 0])
            self.final.unpack(packs[final], into, (layer * heads, (layer + 1) * heads))
            packs = self.placed(packs[~final])
        if not len(packs):
            return
        packed, there = self.of_layer(layer, packs[:, 0])
        (table,) = send(self.device, np.column_stack((there, packs[:, 1:])).astype(np.int32))
        ops.unpack_pages(packed, into, table, pages=heads, in_basis=in_basis, in_order=False)

    def bases_of(self, blocks: Int32) -> Int32:
        """The basis of each block [N] by its number in the pool, −1 of a final text's."""
        assert self.bases is not None
        if self.final is None:
            return self.bases.numbers(blocks)
        found = np.full(len(blocks), -1, np.int32)
        own = ~self.final.are_final(blocks)
        found[own] = self.bases.numbers(self.final.rows(blocks[own]))
        return found

    def more_bytes(self, request: KvRequest) -> int:
        """Bytes that a request shares beside blocks in the pool's format.

        They are of documents' own bases, and of the strategies that they are packed by; those that
        save some have less than 0.
        """
        blocks = request.entries()[:, 0]
        if not len(blocks):
            return 0
        if self.final is not None:
            return self.final.more_bytes(blocks, self.block_bytes)
        return 0 if self.bases is None else self.bases.own_bytes(blocks)

    def of_layer(self, layer: int, blocks: Int32) -> tuple[ops.PackedPages, Int32]:
        """One layer's pages of blocks [N], as blocks [N] of one page a KV head.

        What has a basis is known to it by its rank among the pages of a whole block, so those pages
        are copied, beside as much of their bases as is this layer's.
        """
        heads, bases = self.kv_heads, self.bases
        first: Int32 = blocks + np.int32(layer * heads)
        if bases is None:
            return self.pages, first
        numbers, which = np.unique(bases.numbers(blocks), return_inverse=True)
        of = np.zeros(1 + heads * len(blocks), np.int32)
        of[1:] = np.repeat(which, heads)
        # Behind a null block of one page.
        pages = np.zeros(len(of), np.int32)
        pages[1:] = (first[:, None] + np.arange(heads, dtype=np.int32)).reshape(-1)
        tables = send(self.device, pages, numbers, of)
        at, some, basis_of = (torch.as_tensor(table) for table in tables)
        data = bases.bases.data[:, layer * heads : (layer + 1) * heads].index_select(0, some)
        known = ops.PackedBases(data, basis_of)
        made = ops.PackedPages(self.pages.data.index_select(0, at), self.pages.format, known)
        return made, 1 + heads * np.arange(len(blocks), dtype=np.int32)

    def expect_room(self, tokens: int) -> None:
        """Raises `PoolFull` for more tokens than the pool could hold if it held nothing else."""
        blocks = len(self.pages.data) // self.block_pages - 1
        if -(-tokens // PAGE_TOKENS) > blocks:
            raise PoolFull(
                f"packed pages: expected up to {blocks * PAGE_TOKENS} tokens, got {tokens}"
            )

    def found_prefix(self, tokens: Rows, namespace: str, regime: int) -> int:
        """Tokens at the start of a prompt that are cached in whole pages, without its last one."""
        found = self.cache.match_prefix(tokens, namespace, regime=regime)
        return min(found, len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS

    @property
    def token_bytes(self) -> int:
        """Bytes of a token of one layer in exact pages."""
        return 2 * self.kv_heads * self.head_dim * self.exact.dtype.itemsize

    def read(
        self, layer: int, of: LayerSpec, rope: ops.RopeTable, reach: ops.Reach | None
    ) -> ops.PackedKv:
        """One layer's packed KV as rows read it by a reach."""
        heads = self.kv_heads
        return ops.PackedKv(self.pages, layer, heads, of.scale, rope, None, of.softcap, reach)


def on_host(exact: torch.Tensor, packs: Int32, pages: int) -> tuple[torch.Tensor, Int32]:
    """As `by_themselves`, on the host."""
    cache, copied = by_themselves(exact, packs, pages)
    return cache.cpu(), copied


def by_themselves(exact: torch.Tensor, packs: Int32, pages: int) -> tuple[torch.Tensor, Int32]:
    """Exact pages that packs name, in a cache of their own, and packs of these.

    The packed blocks are those of a pool of their own, one behind the other.
    """
    blocks, which = np.unique(packs[:, 2:], return_inverse=True)
    known = blocks[blocks > 0]
    skipped = len(blocks) - len(known)
    index = np.zeros(1 + pages * len(known), np.int32)
    index[1:] = (known[:, None] + np.arange(pages, dtype=np.int32)).reshape(-1)
    copied = packs.copy()
    copied[:, 0] = 1 + pages * np.arange(len(packs))
    ranks = which.reshape(len(packs), -1) - skipped
    copied[:, 2:] = np.where(ranks < 0, 0, 1 + pages * ranks)
    return exact.index_select(0, send_index(exact.device, index)), copied


def format_of(spec: ModelSpec, page_tokens: int, packing: Packing) -> ops.PackedFormat:
    """What a packed page of a model is.

    # Errors
    `InvalidArgument` for exact pages that do not make up a packed one; `Unsupported` for layers
    with a sliding window, and for what the kernels do not read.
    """
    check_pages(page_tokens, [layer.window for layer in spec.layers], packing)
    return format_on(packing, spec.head_dim, spec.dtype, spec.device)


def strategy_formats(spec: ModelSpec, packing: Packing) -> tuple[ops.PackedFormat, ...]:
    """The formats that documents of a model may be packed in finally; none without a strategy.

    # Errors
    As `format_on` and `Strategy.formats`.
    """
    if packing.strategy is None:
        return ()
    scales = "f16" if spec.dtype == torch.float16 else "bf16"
    candidates, fallback = packing.strategy.formats(spec.head_dim, PAGE_TOKENS, scales)
    formats = *candidates, fallback
    for of in formats:
        format_on(Packing(of), spec.head_dim, spec.dtype, spec.device)
    return formats


def check_pages(page_tokens: int, windows: Sequence[int | None], packing: Packing) -> None:
    """Refuses exact pages, and `windows` of a model's layers, that nothing is packed from.

    # Errors
    As `format_of`.
    """
    named = packing.named
    if page_tokens < 1 or PAGE_TOKENS % page_tokens:
        raise InvalidArgument(
            f"page_tokens: expected a divisor of {PAGE_TOKENS} beside kv_dtype={named}, "
            f"got {page_tokens}"
        )
    sliding = [at for at, window in enumerate(windows) if window is not None]
    if sliding:
        raise Unsupported(
            f"kv_dtype: expected a model without sliding windows beside {named}, "
            f"got one in layer {sliding[0]}"
        )


def format_on(
    packing: Packing, head_dim: int, dtype: torch.dtype, device: torch.device
) -> ops.PackedFormat:
    """What a packed page of heads of so many channels is, for rows of a dtype on a device.

    # Errors
    `Unsupported` for what the kernels do not read.
    """
    named = packing.named
    of = packing.pages(head_dim, PAGE_TOKENS, "f16" if dtype == torch.float16 else "bf16")
    if device.type == "cuda":
        if dtype == torch.float32:
            raise Unsupported(f"kv_dtype: expected bf16 or f16 beside {named} on {device}")
        if of.kind == "top-r" and of.numbers == "bf16" and dtype != torch.bfloat16:
            raise Unsupported(
                f"kv_dtype: expected a model in bf16, or numbers of fp8 or int4, beside {named} on "
                f"{device}, got a model in f16"
            )
        if head_dim not in _DEVICE_DIMS:
            raise Unsupported(
                f"kv_dtype: expected a head dim of {' or '.join(map(str, _DEVICE_DIMS))} beside "
                f"{named} on {device}, got {head_dim}"
            )
    return of


def exact_windows(layers: int, kv_heads: int, fingerprint: str = "any") -> HeadClassMap:
    """The one class of all heads in the exact pool: sink and newest tokens."""
    window = {"kind": "window", "sink": SINK_TOKENS, "recent": RECENT_TOKENS}
    heads = [
        {"layer": layer, "head": head, "class": window, "reach": "local", "stability": "stable"}
        for layer in range(layers)
        for head in range(kv_heads)
    ]
    known = {"model_fingerprint": fingerprint, "kv_heads": kv_heads}
    sizes = {"schema_version": 1, "layers": layers, "heads": heads}
    return HeadClassMap.from_json(json.dumps({**known, **sizes}))

"""Packed pages of a runner: the pool beside the exact one, what stays exact, and how much of each.

The exact pool keeps windows: of each request the sink, which all rows look at, and the newest
tokens. All heads have that one class, so blocks of what is packed go back to the pool as those
behind any window do. The packed pool is a cache of its own, of larger pages: its blocks are
counted, found again as prefixes and evicted like exact ones. Their bytes lie in one tensor.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.cache import HeadClassMap, KvCache, KvShape
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, PoolFull, Unsupported
from kvweave.plan import Rows
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.packed_heads import PackedHeads
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.pool_bases import (
    FIRST_OWN,
    OWN_SHARE,
    PoolBases,
    basis_bytes,
    basis_shape,
    check_basis,
)
from kvweave.runner.kv.tables import Int32, send, send_index
from kvweave.runner.model.layer_spec import LayerSpec
from kvweave.runner.model.model_spec import KV_DTYPES, ModelSpec

PAGE_TOKENS = 64
"""Tokens of a packed page: what channels of keys pay for their scales by."""

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
    of exact keys, where any of them choose pages. `chunk_tokens`: see `PoolSizes.chunk`. `aside`:
    where a prompt's layers are packed while it is computed; None: behind its rows.
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
        """Bytes of all of them, of the bases that there is room for, and of bounds."""
        parts = (self.pages.data, self.bases, self.bounds)
        return sum(part.nbytes for part in parts if part is not None)

    def stats(self) -> dict[str, Any]:
        """Counts of blocks as `KvCache.stats` has them, `block_bytes`, and `held_bytes` of them.

        `basis_bytes` of one basis, `own_bases` that documents have, of `own_bases_most`.
        """
        counts = self.cache.stats()
        held, bases = counts["held"] * self.block_bytes, self.bases
        known = {**counts, "block_bytes": self.block_bytes, "held_bytes": held}
        known |= {"basis_bytes": 0, "own_bases": 0, "own_bases_most": 0}
        if bases is not None:
            most = len(bases.bases.data) - FIRST_OWN
            known |= {"basis_bytes": bases.basis_bytes, "own_bases": bases.held()}
            known["own_bases_most"] = most
        return known

    def pack(self, packs: Int32, basis: int | None = None) -> None:
        """Packs exact pages, rows as `ops.pack_pages` takes them; None: in the shared basis."""
        bases = self.bases
        if bases is not None:
            if basis is None:
                if bases.wants_moments:
                    bases.add(*on_host(self.exact, packs, self.block_pages))
                basis = bases.shared
            bases.assign(packs[:, 0], basis)
        (table,) = send(self.device, packs)
        ops.pack_pages(self.exact, self.pages, table, pages=self.block_pages)
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

    def unpack(self, packs: Int32, into: torch.Tensor) -> None:
        """Writes what blocks stand for into exact pages, all layers and KV heads."""
        (table,) = send(self.device, packs)
        ops.unpack_pages(self.pages, into, table, pages=self.block_pages)

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
        blocks = self.cache.stats()["arena_pages"] // self.block_pages - 1
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


def check_pages(page_tokens: int, windows: Sequence[int | None], packing: Packing) -> None:
    """Refuses exact pages, and `windows` of a model's layers, that nothing is packed from.

    # Errors
    As `format_of`.
    """
    named = packing.format
    if page_tokens < 1 or PAGE_TOKENS % page_tokens:
        raise InvalidArgument(
            f"page_tokens: expected a divisor of {PAGE_TOKENS} beside kv_dtype={named!r}, "
            f"got {page_tokens}"
        )
    sliding = [at for at, window in enumerate(windows) if window is not None]
    if sliding:
        raise Unsupported(
            f"kv_dtype: expected a model without sliding windows beside {named!r}, "
            f"got one in layer {sliding[0]}"
        )


def format_on(
    packing: Packing, head_dim: int, dtype: torch.dtype, device: torch.device
) -> ops.PackedFormat:
    """What a packed page of heads of so many channels is, for rows of a dtype on a device.

    # Errors
    `Unsupported` for what the kernels do not read.
    """
    named = packing.format
    if device.type == "cuda":
        if dtype == torch.float32:
            raise Unsupported(f"kv_dtype: expected bf16 or f16 beside {named!r} on {device}")
        if head_dim not in _DEVICE_DIMS:
            raise Unsupported(
                f"kv_dtype: expected a head dim of {' or '.join(map(str, _DEVICE_DIMS))} beside "
                f"{named!r} on {device}, got {head_dim}"
            )
    return packing.pages(head_dim, PAGE_TOKENS, "f16" if dtype == torch.float16 else "bf16")


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


@dataclass(frozen=True)
class PoolSizes:
    """How large the two pools of a model are, by the tokens that they have room for.

    `exact` and `packed`: geometries, of which the former is cut into `windows`. `page_bytes`: of a
    packed page and its bounds, where it has any, and `basis_bytes` of a basis. `chunk_tokens`: rows
    of a prompt that are computed at once, where the caller says so. `has_own`: whether documents
    may have bases of their own.
    """

    exact: KvShape
    packed: KvShape
    windows: HeadClassMap
    page_bytes: int
    basis_bytes: int
    chunk_tokens: int | None
    has_own: bool = True

    def exact_blocks(self, tokens: int) -> int:
        """Blocks of the exact pool beside packed pages of so many tokens.

        It has a share of them, and no less than a chunk of a prompt and two requests' windows take.
        """
        window = SINK_TOKENS + RECENT_TOKENS
        least = min(tokens, self.chunk_tokens or CHUNK_TOKENS) + 2 * window + PAGE_TOKENS
        return self.exact.blocks_for_tokens(max(tokens // EXACT_SHARE, least)) + 1

    def chunk(self, tokens: int) -> int:
        """Rows of a prompt that are computed at once, in pools of so many tokens.

        A chunk unpacks all that lies before it, so fewer of them cost less: half of the share that
        exact pages have is theirs, and windows of other requests keep the rest.
        """
        share = tokens // (2 * EXACT_SHARE) // PAGE_TOKENS * PAGE_TOKENS
        return self.chunk_tokens or min(max(CHUNK_TOKENS, share), MOST_CHUNK_TOKENS)

    def packed_pages(self, tokens: int) -> int:
        """Pages of the packed pool."""
        return self.packed.pages_for_blocks(self.packed_blocks(tokens))

    def packed_blocks(self, tokens: int) -> int:
        """Its blocks, the null block among them."""
        return self.packed.blocks_for_tokens(tokens) + 1

    def bases(self, tokens: int) -> int:
        """Bases: those of no document, and of as many documents as may have their own at once."""
        if not self.basis_bytes:
            return 0
        if not self.has_own:
            return FIRST_OWN
        packed = self.packed_pages(tokens) * self.page_bytes
        return FIRST_OWN + packed // (OWN_SHARE * self.basis_bytes)

    def total_bytes(self, tokens: int) -> int:
        """Bytes of both pools with room for so many tokens, bases among them."""
        exact = self.exact.pages_for_blocks(self.exact_blocks(tokens), self.windows)
        packed = self.packed_pages(tokens) * self.page_bytes
        return exact * self.exact.page_bytes + packed + self.bases(tokens) * self.basis_bytes

    def tokens_within(self, arena_bytes: int) -> int:
        """The most tokens, in whole pages, for which both pools take no more bytes.

        # Errors
        `InvalidArgument` for bytes that hold no page beside what is exact.
        """
        most = max(0, arena_bytes) // (self.page_bytes * self.packed.layers * self.packed.kv_heads)

        def taken(blocks: int) -> int:
            return self.total_bytes(blocks * PAGE_TOKENS)

        blocks = bisect_right(range(most + 1), arena_bytes, key=taken) - 1
        if blocks < 1:
            raise InvalidArgument(
                f"arena_bytes: expected at least {taken(1)} beside packed pages, got {arena_bytes}"
            )
        return blocks * PAGE_TOKENS


def make_packed_pool(
    spec: ModelSpec,
    page_tokens: int,
    packing: Packing,
    make_exact: Callable[[int, HeadClassMap], ExactPool],
    chunk_tokens: int | None,
    rooms: tuple[int | None, int],
    heads: HeadClassMap | None,
    **settings: Any,
) -> tuple[ExactPool, PackedPool]:
    """The exact pool, made of so many blocks and a head map, and the packed one beside it.

    `rooms`: bytes of both together, or None, and tokens otherwise. `heads`: what heads read, if
    not all. `settings` are `KvCache`'s own.

    # Errors
    As `format_of`, `PoolSizes`, `PoolBases` and `PackedHeads`; `InvalidArgument` for a basis beside
    a format that has none; `OutOfMemory` for what the device cannot hold.
    """
    of, (arena_bytes, tokens) = format_of(spec, page_tokens, packing), rooms
    geometry, dtype = (len(spec.layers), spec.kv_heads, spec.head_dim), KV_DTYPES[spec.dtype]
    per_block = len(spec.layers) * spec.kv_heads
    one = basis_bytes(of, per_block)
    check_basis(packing, of, per_block)
    exact_shape = KvShape(*geometry, page_tokens, dtype)
    reads = PackedHeads(exact_shape, heads, spec.fingerprint, SINK_TOKENS, RECENT_TOKENS)
    page_bytes = of.page_bytes + (BOUND_BYTES * spec.head_dim if reads.budgets else 0)
    sizes = PoolSizes(
        exact_shape,
        KvShape(*geometry, PAGE_TOKENS, dtype),
        exact_windows(len(spec.layers), spec.kv_heads, spec.fingerprint),
        page_bytes,
        one,
        chunk_tokens,
    )
    if arena_bytes is not None:
        tokens = sizes.tokens_within(arena_bytes)
    exact = make_exact(sizes.exact_blocks(tokens), sizes.windows)
    cache = KvCache(sizes.packed, blocks=sizes.packed_blocks(tokens), memory=False, **settings)
    count = sizes.packed_pages(tokens)
    wanted = f"{count * page_bytes + sizes.bases(tokens) * one} bytes on {spec.device}"

    @needs_memory("packed pages", wanted)
    def made() -> tuple[ops.PackedPages, torch.Tensor | None]:
        bases = bounds = None
        if one:
            shape = basis_shape(of, per_block)
            bases = torch.zeros((sizes.bases(tokens), *shape), device=spec.device)
        if reads.budgets:
            bounds = torch.zeros((count, 3, spec.head_dim), device=spec.device)
        return ops.PackedPages.zeros(count, of, spec.device, bases=bases), bounds

    pages, bounds = made()
    bases = None
    if pages.bases is not None:
        bases = PoolBases(pages.bases, of, per_block, packing.basis)
    known = spec.layers, packing, cache, pages, exact[1], bases, reads, bounds
    aside = Aside(spec.device) if packing.beside else None
    return exact, PackedPool(*known, sizes.chunk(tokens), aside)

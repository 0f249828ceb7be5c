"""Packed pages of a runner: the pool beside the exact one, what stays exact, and how much of each.

The exact pool keeps windows: of each request the sink, which all rows look at, and the newest
tokens. All heads have that one class, so blocks of what is packed go back to the pool as those
behind any window do. The packed pool is a cache of its own, of larger pages: its blocks are
counted, found again as prefixes and evicted like exact ones. Their bytes lie in one tensor.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvweave import ops
from kvweave.cache import HeadClassMap, KvCache, KvShape
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, PoolFull, Unsupported
from kvweave.plan import Rows
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

CHUNK_TOKENS = 2048
"""Rows of a prompt that are computed at once where the caller names no number: exact pages hold so
many before they are packed."""

SCRATCH_TOKENS = 8192
"""Packed tokens that a chunk of a prompt has unpacked at once, of one layer."""

EXACT_SHARE = 16
"""The exact pool has room for one token of so many."""

ExactPool = tuple[KvCache, torch.Tensor]
"""A cache and its pages [pages, 2, P, D]."""

_DEVICE_DIMS = (64, 128)


@dataclass(frozen=True)
class PackedPool:
    """The packed blocks of one runner: `cache` counts them, `pages` are they.

    A block has the pages of all layers and KV heads for `PAGE_TOKENS` tokens. `exact`: the pages
    [pages, 2, P, D] that they are packed from.
    """

    spec: ModelSpec
    cache: KvCache
    pages: ops.PackedPages
    exact: torch.Tensor

    @property
    def block_pages(self) -> int:
        """Pages of a block: ranked by layer, then KV head."""
        return len(self.spec.layers) * self.spec.kv_heads

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_pages * self.pages.format.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.pages.data.nbytes

    def stats(self) -> dict[str, Any]:
        """Counts of blocks as `KvCache.stats` has them, `block_bytes`, and `held_bytes` of them."""
        counts = self.cache.stats()
        held = counts["held"] * self.block_bytes
        return {**counts, "block_bytes": self.block_bytes, "held_bytes": held}

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
        return 2 * self.spec.kv_heads * self.spec.head_dim * self.spec.dtype.itemsize

    def read(self, layer: int, of: LayerSpec, rope: ops.RopeTable) -> ops.PackedKv:
        """One layer's packed KV as rows read it."""
        heads = self.spec.kv_heads
        return ops.PackedKv(self.pages, layer, heads, of.scale, rope, None, of.softcap)


def format_of(spec: ModelSpec, page_tokens: int) -> ops.PackedFormat:
    """What a packed page of a model is.

    # Errors
    `InvalidArgument` for exact pages that do not make up a packed one; `Unsupported` for layers
    with a sliding window, and for what the kernels do not read.
    """
    if page_tokens < 1 or PAGE_TOKENS % page_tokens:
        raise InvalidArgument(
            f"page_tokens: expected a divisor of {PAGE_TOKENS} beside kv_dtype='int4', "
            f"got {page_tokens}"
        )
    sliding = [at for at, layer in enumerate(spec.layers) if layer.window is not None]
    if sliding:
        raise Unsupported(
            "kv_dtype: expected a model without sliding windows beside 'int4', "
            f"got one in layer {sliding[0]}"
        )
    if spec.device.type == "cuda":
        if spec.dtype == torch.float32:
            raise Unsupported(f"kv_dtype: expected bf16 or f16 beside 'int4' on {spec.device}")
        if spec.head_dim not in _DEVICE_DIMS:
            raise Unsupported(
                f"kv_dtype: expected a head dim of {' or '.join(map(str, _DEVICE_DIMS))} beside "
                f"'int4' on {spec.device}, got {spec.head_dim}"
            )
    scales = "f16" if spec.dtype == torch.float16 else "bf16"
    return ops.PackedFormat("int4", spec.head_dim, PAGE_TOKENS, scales)


def exact_windows(spec: ModelSpec) -> HeadClassMap:
    """The one class of all heads in the exact pool: sink and newest tokens."""
    window = {"kind": "window", "sink": SINK_TOKENS, "recent": RECENT_TOKENS}
    heads = [
        {"layer": layer, "head": head, "class": window, "reach": "local", "stability": "stable"}
        for layer in range(len(spec.layers))
        for head in range(spec.kv_heads)
    ]
    known = {"model_fingerprint": spec.fingerprint, "kv_heads": spec.kv_heads}
    sizes = {"schema_version": 1, "layers": len(spec.layers), "heads": heads}
    return HeadClassMap.from_json(json.dumps({**known, **sizes}))


@dataclass(frozen=True)
class PoolSizes:
    """How large the two pools of a model are, by the tokens that they have room for.

    `exact` and `packed`: geometries, of which the former is cut into `windows`. `page_bytes`: of a
    packed page. `chunk_tokens`: rows of a prompt that are computed at once.
    """

    exact: KvShape
    packed: KvShape
    windows: HeadClassMap
    page_bytes: int
    chunk_tokens: int

    def exact_blocks(self, tokens: int) -> int:
        """Blocks of the exact pool beside packed pages of so many tokens.

        It has a share of them, and no less than a chunk of a prompt and two requests' windows take.
        """
        window = SINK_TOKENS + RECENT_TOKENS
        least = min(tokens, self.chunk_tokens) + 2 * window + PAGE_TOKENS
        return self.exact.blocks_for_tokens(max(tokens // EXACT_SHARE, least)) + 1

    def packed_pages(self, tokens: int) -> int:
        """Pages of the packed pool."""
        return self.packed.pages_for_blocks(self.packed_blocks(tokens))

    def packed_blocks(self, tokens: int) -> int:
        """Its blocks, the null block among them."""
        return self.packed.blocks_for_tokens(tokens) + 1

    def total_bytes(self, tokens: int) -> int:
        """Bytes of both pools with room for so many tokens."""
        exact = self.exact.pages_for_blocks(self.exact_blocks(tokens), self.windows)
        return exact * self.exact.page_bytes + self.packed_pages(tokens) * self.page_bytes

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
                f"arena_bytes: expected at least {taken(1)} beside kv_dtype='int4', "
                f"got {arena_bytes}"
            )
        return blocks * PAGE_TOKENS


def make_packed_pool(
    spec: ModelSpec,
    page_tokens: int,
    make_exact: Callable[[int, HeadClassMap], ExactPool],
    chunk_tokens: int | None,
    rooms: tuple[int | None, int],
    **settings: Any,
) -> tuple[ExactPool, PackedPool]:
    """The exact pool, made of so many blocks and a head map, and the packed one beside it.

    `rooms`: bytes of both together, or None, and tokens otherwise. `settings` are `KvCache`'s own.

    # Errors
    As `format_of` and `PoolSizes`; `OutOfMemory` for what the device cannot hold.
    """
    of, (arena_bytes, tokens) = format_of(spec, page_tokens), rooms
    geometry, dtype = (len(spec.layers), spec.kv_heads, spec.head_dim), KV_DTYPES[spec.dtype]
    sizes = PoolSizes(
        KvShape(*geometry, page_tokens, dtype),
        KvShape(*geometry, PAGE_TOKENS, dtype),
        exact_windows(spec),
        of.page_bytes,
        chunk_tokens or CHUNK_TOKENS,
    )
    if arena_bytes is not None:
        tokens = sizes.tokens_within(arena_bytes)
    exact = make_exact(sizes.exact_blocks(tokens), sizes.windows)
    cache = KvCache(sizes.packed, blocks=sizes.packed_blocks(tokens), memory=False, **settings)
    count = sizes.packed_pages(tokens)
    wanted = f"{count * of.page_bytes} bytes on {spec.device}"
    pages = needs_memory("packed pages", wanted)(ops.PackedPages.zeros)(count, of, spec.device)
    return exact, PackedPool(spec, cache, pages, exact[1])

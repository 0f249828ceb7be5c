"""The arena where the model is: host memory of the cache's own, or one tensor on a GPU.

Beside it lies the pool of packed pages, where a runner keeps any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from kvweave.arguments import whole
from kvweave.cache import HeadClassMap, KvCache, KvShape
from kvweave.device_memory import arena_pages
from kvweave.errors import InvalidArgument
from kvweave.runner.kv.packed_pool import ExactPool, PackedPool
from kvweave.runner.kv.packed_room import make_packed_pool
from kvweave.runner.kv.packing import Packing
from kvweave.runner.model.model_spec import KV_DTYPES, ModelSpec


def make_cache(
    spec: ModelSpec,
    page_tokens: int,
    *,
    arena_bytes: int | None = None,
    blocks: int | None = None,
    heads: HeadClassMap | None = None,
    **settings: Any,
) -> tuple[KvCache, torch.Tensor]:
    """A cache for a model and all its pages [pages, 2, P, D], on the model's device.

    The arena has `arena_bytes`, or room for `blocks` blocks of every head group. `settings` are
    `KvCache`'s own.

    # Errors
    `InvalidArgument` for an arena too small, `OutOfMemory` for one that the device cannot hold.
    """
    shape = KvShape(
        len(spec.layers), spec.kv_heads, spec.head_dim, page_tokens, KV_DTYPES[spec.dtype]
    )
    return make_cache_of(
        shape,
        spec.dtype,
        spec.device,
        arena_bytes=arena_bytes,
        blocks=blocks,
        heads=heads,
        **settings,
    )


def make_cache_of(
    shape: KvShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    arena_bytes: int | None = None,
    blocks: int | None = None,
    heads: HeadClassMap | None = None,
    **settings: Any,
) -> tuple[KvCache, torch.Tensor]:
    """`make_cache` for KV of a shape, whose dtype is that of the model."""
    if device.type == "cpu":
        cache = KvCache(shape, arena_bytes=arena_bytes, blocks=blocks, heads=heads, **settings)
        return cache, from_dlpack(cache.arena)
    if arena_bytes is not None:
        count = arena_bytes // shape.page_bytes
    else:
        count = shape.pages_for_blocks(blocks or 0, heads)
    sizes = (max(0, count), 2, shape.page_tokens, shape.head_dim)
    pages = arena_pages(sizes, dtype, device)
    return KvCache(shape, external=pages, heads=heads, **settings), pages


def make_pools(
    spec: ModelSpec,
    page_tokens: int,
    *,
    packing: Packing | None,
    chunk_tokens: int | None,
    arena_bytes: int | None,
    max_tokens: int | None,
    heads: HeadClassMap | None,
    **settings: Any,
) -> tuple[KvCache, torch.Tensor, PackedPool | None]:
    """A runner's cache and pages, as `make_cache`, and its packed pool where it has any.

    Together they hold `max_tokens`, or take `arena_bytes`.

    # Errors
    As `make_cache` and `make_packed_pool`; `InvalidArgument` for both sizes, or one that is none.
    """
    if arena_bytes is not None and max_tokens is not None:
        raise InvalidArgument("arena: expected arena_bytes or max_tokens, got both")
    if arena_bytes is not None:
        whole("arena_bytes", arena_bytes)
    tokens = 32768 if max_tokens is None else whole("max_tokens", max_tokens, 1)
    settings["fingerprint"] = spec.fingerprint
    if packing is None:
        # A page without tokens is refused with the shape.
        blocks = -(-tokens // max(page_tokens, 1)) + 1 if arena_bytes is None else None
        cache, pages = make_cache(
            spec, page_tokens, arena_bytes=arena_bytes, blocks=blocks, heads=heads, **settings
        )
        return cache, pages, None

    def exact(blocks: int, windows: HeadClassMap) -> ExactPool:
        return make_cache(spec, page_tokens, blocks=blocks, heads=windows, **settings)

    rooms = arena_bytes, tokens
    made, packed = make_packed_pool(
        spec, page_tokens, packing, exact, chunk_tokens, rooms, heads, **settings
    )
    return *made, packed

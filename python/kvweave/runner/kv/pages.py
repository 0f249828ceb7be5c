"""The arena where the model is: host memory of the cache's own, or one tensor on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from kvweave.cache import HeadClassMap, KvCache, KvShape
from kvweave.device_memory import arena_pages
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
    if spec.device.type == "cpu":
        cache = KvCache(shape, arena_bytes=arena_bytes, blocks=blocks, heads=heads, **settings)
        return cache, from_dlpack(cache.arena)
    if arena_bytes is not None:
        count = arena_bytes // shape.page_bytes
    else:
        count = shape.pages_for_blocks(blocks or 0, heads)
    sizes = (max(0, count), 2, page_tokens, spec.head_dim)
    pages = arena_pages(sizes, spec.dtype, spec.device)
    return KvCache(shape, external=pages, heads=heads, **settings), pages

"""Exact pages of one layer, of no arena: where its tokens are unpacked or brought together."""

from __future__ import annotations

import numpy as np
import torch

from kvweave.runner.kv.tables import Int32


def pages_of_layer(
    like: torch.Tensor, kv_heads: int, page_tokens: int, layer: int, blocks: int
) -> torch.Tensor:
    """Pages, not yet written, for so many blocks of a layer, behind a null block.

    Numbers are those of an arena [pages, 2, P, D], and lie on its device. Pages of the layers
    before have room, which nobody touches: a layer turns keys by frequencies of its own, and is
    known by where its pages lie.
    """
    sizes = kv_heads * (blocks + 1 + layer), 2, page_tokens, like.shape[3]
    return torch.empty(sizes, dtype=like.dtype, device=like.device)


def blocks_of_layer(kv_heads: int, blocks: int) -> Int32:
    """The numbers i32 [N] of the blocks of `pages_of_layer`, of one page a KV head."""
    return kv_heads * np.arange(1, blocks + 1, dtype=np.int32)

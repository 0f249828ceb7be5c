"""What computing a prompt takes at the shape of Llama-3.1-8B, in its layers."""

from __future__ import annotations

LAYERS, WIDTH, FEED_FORWARD = 32, 4096, 14336
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128

_ROW = 2 * LAYERS * WIDTH * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + 3 * FEED_FORWARD)
_PAIR = 4 * LAYERS * HEADS * HEAD_DIM


def flops_of_prefix(tokens: int) -> int:
    """FLOPs of the first so many tokens: each row's products, and each pair of row and key."""
    return _ROW * tokens + _PAIR * (tokens * (tokens + 1) // 2)

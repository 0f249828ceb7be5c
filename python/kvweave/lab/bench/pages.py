"""Pages filled by hand, blocks in random order, for cases that measure one op."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave.ops import RopeTable

PAGE = 16


@dataclass(frozen=True)
class Shape:
    """A model's KV geometry: L layers, H query heads, G KV heads, D head dim."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float = 1e5

    @property
    def block_pages(self) -> int:
        """Pages in a block: one for each layer and KV head."""
        return self.layers * self.kv_heads

    def rope(self) -> RopeTable:
        """Rotary frequencies of every layer, half pairing."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        table = np.tile(self.theta**-exponents, (self.layers, 1)).astype(np.float32)
        return RopeTable(table, "half")


def empty_pages(shape: Shape, blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeroed pages [n, 2, P, D] for that many blocks and the null block before them."""
    pages = (blocks + 1) * shape.block_pages
    return torch.zeros(pages, 2, PAGE, shape.head_dim, dtype=dtype)


def shuffled_blocks(shape: Shape, blocks: int, seed: int) -> npt.NDArray[np.int32]:
    """Block numbers i32 [blocks] (first page of each) in random order."""
    order = np.random.default_rng(seed).permutation(blocks) + 1
    return (order * shape.block_pages).astype(np.int32)


def entries_of(blocks: npt.NDArray[np.int32], tokens: int) -> npt.NDArray[np.int32]:
    """Entries [N, 5] of a request that holds those blocks for positions [0, tokens)."""
    position = np.arange(0, tokens, PAGE, dtype=np.int32)
    end = np.minimum(PAGE, tokens - position)
    zero = np.zeros_like(position)
    return np.stack((blocks[: len(position)], zero, end, position, zero), axis=1).astype(np.int32)


def slots_of(blocks: npt.NDArray[np.int32], tokens: int) -> npt.NDArray[np.int32]:
    """Slots [tokens, 2] of positions [0, tokens)."""
    positions = np.arange(tokens)
    return np.stack((blocks[positions // PAGE], positions % PAGE), axis=1).astype(np.int32)

"""Packed pages: keys and values in few bits, as ops are told of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave._native import PackedFormat, Reach, RopeTable
from kvweave.ops.dispatch import expect_tensors, invalid


@dataclass(frozen=True)
class PackedPages:
    """Packed pages of one format: `data` u8 [pages, format.page_bytes], contiguous.

    As in the arena, a block is as many pages as it has (layer, KV head) pairs, its number that of
    its first page, and block 0 the null block.
    """

    data: torch.Tensor
    format: PackedFormat

    @staticmethod
    def zeros(pages: int, format: PackedFormat, device: torch.device | str = "cpu") -> PackedPages:
        """So many pages of zeros."""
        shape = (pages, format.page_bytes)
        return PackedPages(torch.zeros(shape, dtype=torch.uint8, device=device), format)


@dataclass(frozen=True)
class PackedKv:
    """One layer's keys and values in packed pages, and how rows read them: as `PagedKv` says it.

    Positions of rows and entries count tokens as over exact pages, so what is packed and what is
    exact (the sink, the newest tokens) can be attended apart and put together by `merge_states`.
    """

    pages: PackedPages
    layer: int
    kv_heads: int
    scale: float
    rope: RopeTable
    window: int | None = None
    softcap: float | None = None
    reach: Reach | None = None


def expect_packed(pages: PackedPages) -> PackedPages:
    """The pages; `InvalidArgument` for anything else."""
    if not isinstance(pages, PackedPages):
        raise invalid("packed pages", "PackedPages", f"an object of type {type(pages).__name__}")
    expect_tensors(data=pages.data)
    return pages

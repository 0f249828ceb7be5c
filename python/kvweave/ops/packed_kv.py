"""Packed pages: keys and values in few bits, as ops are told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvweave._native import PackedFormat, Reach, RopeTable
from kvweave.ops.dispatch import OnDevice, expect_tensors, invalid, on_device

Preset = Literal["int4", "int8", "quarter-bf16", "half-int4", "planes-3", "planes-2.5"]

_PLANES_BITS = {"planes-3": 3.0, "planes-2.5": 2.5}


def packed_format(
    name: Preset, head_dim: int, page_tokens: int = 64, scales: str = "bf16"
) -> PackedFormat:
    """A named format for D channels.

    "int4": a scale a channel of keys and a token of values (KIVI, section 3). "quarter-bf16": the
    quarter of a vector that is largest in its text's basis, in bf16, as MosaicKV's evaluation has
    it (section 6.1). "half-int4": the larger half, in four bits with a scale a vector; the format
    to choose where INT4 has too many bytes. "int8": as INT4, in codes of 8 bits. "planes-3" and
    "planes-2.5": codes of 8, 4, 2 or no bits along the directions of a text's basis, so many bits a
    channel on average.

    # Errors
    `InvalidArgument` for another name or sizes that a format has not.
    """
    if name in ("int4", "int8"):
        return PackedFormat(name, head_dim, page_tokens, scales)
    if name in _PLANES_BITS:
        size = round(_PLANES_BITS[name] * 2 * head_dim / 8)
        return PackedFormat("planes", head_dim, page_tokens, scales, token_bytes=size)
    if name == "quarter-bf16":
        kept = head_dim // 4
        return PackedFormat("top-r", head_dim, page_tokens, scales, kept=kept, numbers="bf16")
    if name == "half-int4":
        kept = head_dim // 2
        return PackedFormat("top-r", head_dim, page_tokens, scales, kept=kept, numbers="int4")
    known = "int4, int8, quarter-bf16, half-int4, planes-3 or planes-2.5"
    raise invalid("packed format", known, repr(name)[:40])


@dataclass(frozen=True)
class PackedBases:
    """The bases of texts, and which of them each packed block was packed in.

    `data` f32 [bases, pages of a block, 2, rows, D], as `Moments.basis` makes them: of each page,
    for its keys, then its values, a mean and C orthonormal directions in a basis of top-r pages,
    2D + 2 rows in one of planes. `of` i32 [packed pages]: at the first page of a block the number
    of its basis. A basis stays as it is for as long as a page is packed in it.

    For pages on CUDA `data` lies there. `of` may lie there too, which a captured graph needs: then
    nobody looks at it before a kernel does, which takes a block without a basis for one without
    tokens, and packs none.
    """

    data: torch.Tensor
    of: torch.Tensor


@dataclass(frozen=True)
class PackedPages:
    """Packed pages of one format: `data` u8 [pages, format.page_bytes], contiguous.

    As in the arena, a block is as many pages as it has (layer, KV head) pairs, its number that of
    its first page, and block 0 the null block. Top-r pages and planes have `bases`, others none.
    """

    data: torch.Tensor
    format: PackedFormat
    bases: PackedBases | None = None

    @staticmethod
    def zeros(
        pages: int,
        format: PackedFormat,
        device: torch.device | str = "cpu",
        *,
        bases: torch.Tensor | None = None,
    ) -> PackedPages:
        """So many pages of zeros; with `bases`, all in the first of them until `of` says more."""
        data = torch.zeros((pages, format.page_bytes), dtype=torch.uint8, device=device)
        if bases is None:
            return PackedPages(data, format)
        of = torch.zeros(pages, dtype=torch.int32, device=device)
        return PackedPages(data, format, PackedBases(bases.to(device), of))

    @property
    def native_bases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The bases as the native module takes them on the host."""
        return None if self.bases is None else (self.bases.data, self.bases.of)

    def bases_on(self, device: torch.device) -> tuple[torch.Tensor, OnDevice] | None:
        """The bases as it takes them on CUDA."""
        if self.bases is None:
            return None
        named = {"basis of each packed page": self.bases.of}
        return self.bases.data, on_device(device, **named).popitem()[1]


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
    if pages.bases is not None:
        if not isinstance(pages.bases, PackedBases):
            raise invalid("bases", "PackedBases", f"an object of type {type(pages.bases).__name__}")
        expect_tensors(bases=pages.bases.data, of=pages.bases.of)
    return pages

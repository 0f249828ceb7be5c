"""What packed pages of a format make of a text's keys and values, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvweave import ops
from kvweave.runner import Packing
from packed_texts import random_bases, rounded

PAGE = 64

Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values f64 [G, T, D] of a text, whose pages begin with its first token."""

Meaning = Callable[[int, Layer], Layer]
"""What pages of a layer, by its number, make of a text."""


def _int4(scales: str, _layer: int, of: Layer) -> Layer:
    keys = [rounded(part, 1, scales)[0] for part in of[0].split(PAGE, 1)]
    return torch.cat(keys, 1), rounded(of[1], -1, scales)[0]


def int4(scales: str = "bf16") -> Meaning:
    """INT4 pages, by arithmetic of the tests' own."""
    return partial(_int4, scales)


def of_format(form: ops.PackedFormat, basis: torch.Tensor) -> Meaning:
    """Pages of a format in a basis f32 [pages, 2, C + 1, D], by the ops.

    That these bytes mean what they should is tested with the ops.
    """

    def meaning(layer: int, of: Layer) -> Layer:
        heads, tokens, dim = of[0].shape
        count = -(-tokens // PAGE)
        exact = torch.zeros(1 + heads * count, 2, PAGE, dim)
        room = exact[1:].view(count, heads, 2, PAGE, dim)
        for side, part in enumerate(of):
            for page, some in enumerate(part.split(PAGE, 1)):
                room[page, :, side, : some.shape[1]] = some.float()
        packs = np.zeros((count, 3), np.int32)
        packs[:, 0] = packs[:, 2] = 1 + heads * np.arange(count)
        packs[:, 1] = np.minimum(PAGE, tokens - PAGE * np.arange(count))
        some = basis[None, layer * heads : (layer + 1) * heads].contiguous()
        packed = ops.PackedPages.zeros(len(exact), form, bases=some)
        ops.pack_pages(exact, packed, packs, pages=heads)
        ops.unpack_pages(packed, exact, packs, pages=heads)
        sides = room.permute(2, 1, 0, 3, 4).reshape(2, heads, -1, dim)[:, :, :tokens].double()
        return sides[0], sides[1]

    return meaning


def random_packing(name: str, pages: int, head_dim: int, seed: int = 1) -> tuple[Packing, Meaning]:
    """A rotated format of bf16 scales in a random basis of blocks of so many pages."""
    form = ops.packed_format(name, head_dim, PAGE)
    basis = random_bases(torch.Generator().manual_seed(seed), form, pages, 1)[0]
    return Packing(name, basis), of_format(form, basis)

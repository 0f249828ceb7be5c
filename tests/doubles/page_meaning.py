"""What packed pages of a format make of a text's keys and values, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvweave import ops
from kvweave.runner import Packing
from packed_texts import LARGEST, drawn_bases, rounded

PAGE = 64

Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values f64 [G, T, D] of a text, whose pages begin with its first token."""

Meaning = Callable[[int, Layer], Layer]
"""What pages of a layer, by its number, make of a text."""


def _of_codes(most: int, scales: str, _layer: int, of: Layer) -> Layer:
    keys = [rounded(part, 1, scales, most)[0] for part in of[0].split(PAGE, 1)]
    return torch.cat(keys, 1), rounded(of[1], -1, scales, most)[0]


def int4(scales: str = "bf16") -> Meaning:
    """INT4 pages, by arithmetic of the tests' own."""
    return partial(_of_codes, 15, scales)


def of_format(form: ops.PackedFormat, basis: torch.Tensor | None = None) -> Meaning:
    """Pages of a format, those that have one in a basis f32 [pages, 2, rows, D].

    By arithmetic of the tests' own, but for top-r pages: that their bytes mean what they should is
    tested with the ops.
    """
    if basis is None:
        return partial(_of_codes, LARGEST[form.kind], form.scales)
    return partial(_of_planes, basis) if form.kind == "planes" else _of_top_r(form, basis)


def _of_planes(basis: torch.Tensor, layer: int, of: Layer) -> Layer:
    heads, _, dim = of[0].shape
    meant = []
    for side, x in zip(basis[layer * heads :][:heads].double().unbind(1), of, strict=True):
        mean, bits, steps, measures = side.split((1, 1, dim, dim), 1)
        largest = 2**bits - 1
        codes = ((x - mean) @ measures.mT + largest / 2).round().clamp(torch.zeros(()), largest)
        meant.append(mean + (codes - largest / 2) @ steps)
    return meant[0], meant[1]


def _of_top_r(form: ops.PackedFormat, basis: torch.Tensor) -> Meaning:
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


UNNAMED = {
    "pairs": (4, 2, 4, "bf16"),
    "truncated fours": (4, 4, 3, "bf16"),
    "truncated fp8": (2, 1, 3, "fp8"),
}
"""Formats without a name: one of so many channels is kept, in groups, of so many quarters."""


def form_of(name: str, head_dim: int) -> ops.PackedFormat:
    """A format that `ops.packed_format` or `UNNAMED` knows."""
    if name not in UNNAMED:
        return ops.packed_format(name, head_dim, PAGE)
    of, group, quarters, numbers = UNNAMED[name]
    sizes = {"kept": head_dim // of, "group": group, "channels": quarters * head_dim // 4}
    return ops.PackedFormat("top-r", head_dim, PAGE, **sizes, numbers=numbers)


def random_packing(name: str, pages: int, head_dim: int, seed: int = 1) -> tuple[Packing, Meaning]:
    """A format of bf16 scales, where it has one in a random basis of blocks of so many pages."""
    form, basis = form_of(name, head_dim), None
    if form.basis_rows is not None:
        basis = drawn_bases(torch.Generator().manual_seed(seed), form, pages, 1)[0]
    return Packing(form if name in UNNAMED else name, basis), of_format(form, basis)

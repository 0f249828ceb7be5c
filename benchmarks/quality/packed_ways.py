"""The ways of packing that `packed_front` measures: what each makes of keys and values, and bytes.

Vectors are f32 [2, N, T, D]: keys and values of N pages of a block and T tokens of whole pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Literal

import torch

from benchmarks.quality import packed_arithmetic as arithmetic
from benchmarks.quality.packed_arithmetic import PAGE
from benchmarks.quality.packed_bases import Moments, in_planes, rotated
from kvweave import ops

Kind = Literal["exact", "bf16", "fp8", "codes", "turned codes", "top-r", "planes", "mask",
               "by loss"]  # fmt: skip
Basis = Literal["none", "identity", "largest channels", "hadamard", "own", "own, not centred",
                "calibrated", "calibrated, unweighted"]  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to pack: a kind and what it has; kept channels as a share of them."""

    name: str
    kind: Kind
    basis: Basis = "none"
    bits: float = 16
    """Of a number: of codes, or of planes on average."""
    kept: float = 1.0
    group: int = 1
    numbers: str = "bf16"
    channels: float = 1.0
    """The share of a basis's directions, the first ones, that have numbers at all."""
    bound: float = 0.0
    """By loss: what the smallest of MosaicKV's strategies may lose of Σ |x|², by layer and head."""
    blocks: float = 1.0
    """Of the packed blocks, the share that a row and KV head reads: those of the highest score."""

    @property
    def packing(self) -> Way:
        """What is packed, whatever it is called and however much of it is read."""
        return replace(self, name="", blocks=1.0)

    def format(self, head_dim: int) -> ops.PackedFormat | None:
        """The pages of this way, if there are any."""
        if self.kind == "codes" and self.bits in (4, 8):
            return ops.PackedFormat(f"int{self.bits:.0f}", head_dim, PAGE)
        if self.kind == "top-r":
            kept = round(self.kept * head_dim)
            sizes = {"group": self.group, "channels": round(self.channels * head_dim)}
            return ops.PackedFormat(
                "top-r", head_dim, PAGE, kept=kept, numbers=self.numbers, **sizes
            )
        if self.kind == "planes":
            return ops.PackedFormat(
                "planes", head_dim, PAGE, token_bytes=self.token_bytes(head_dim)
            )
        return None

    def token_bytes(self, head_dim: int) -> int:
        """Of planes: bytes of a token's codes."""
        return round(self.bits * head_dim / 4)

    def page_bytes(self, head_dim: int) -> float:
        """Bytes a token and KV head."""
        if self.kind in ("exact", "bf16"):
            return 4.0 * head_dim
        if self.kind == "fp8":
            return 2.0 * head_dim
        if self.kind == "codes":
            return 2 * head_dim * self.bits / 8 + 4 * head_dim / PAGE + 4
        if self.kind == "turned codes":
            return 2 * head_dim * self.bits / 8 + 8
        if self.kind == "mask":
            kept = round(self.kept * head_dim)
            values = head_dim * self.bits / 8 + (4 if self.bits < 16 else 0)
            return kept * self.bits / 8 + (4 * kept / PAGE if self.bits < 16 else 0) + values
        if self.kind == "planes":
            return PAGE / 4 / PAGE + self.token_bytes(head_dim)
        kept = round(self.kept * head_dim)
        bits, scale = {"bf16": (16, 0), "fp8": (8, 2), "int4": (4, 2)}[self.numbers]
        bitmap = ceil(round(self.channels * head_dim) / self.group / 8)
        return 2 * (bitmap + kept * bits / 8 + scale)

    def basis_bytes(self, head_dim: int) -> float:
        """Bytes of a basis of a text's own, f32, a layer and KV head."""
        if not self.basis.startswith("own"):
            return 0.0
        directions = round(self.channels * head_dim)
        rows = 2 * head_dim + 2 if self.kind == "planes" else directions + 1
        return 8.0 * rows * head_dim


STRATEGIES = sorted(
    (
        Way("", "top-r", kept=kept, group=group, channels=channels)
        for kept, group, channels in product((0.125, 0.25, 0.375), (1, 2, 4), (0.75, 1.0))
    ),
    key=lambda way: way.page_bytes(128),
)
"""MosaicKV's candidates (section 5.5) in bf16, the smallest first: `ops.top_r_candidates`."""


def read_in_few_blocks(way: Way) -> Way:
    """The same, read with block selection."""
    return replace(way, name=f"{way.name}, a quarter of blocks", blocks=0.25)


def front() -> tuple[Way, ...]:
    """All ways, each read as a whole and with block selection."""
    codes = [Way(f"INT{bits}", "codes", bits=bits) for bits in (8, 4, 3, 2)]
    turned = [Way(f"INT{bits}, Hadamard", "turned codes", "hadamard", bits) for bits in (4, 3)]
    masks = [
        Way("40 % of keys' channels in bf16 (ThinK)", "mask", kept=0.4),
        Way("50 % of keys' channels, INT4 (ThinK)", "mask", kept=0.5, bits=4),
    ]
    quarter = [
        Way(f"25 % bf16{more}", "top-r", basis, kept=0.25, group=group)
        for more, basis, group in (
            (", own basis, not centred (MosaicKV)", "own, not centred", 1),
            (", own basis", "own", 1),
            (", groups of 2, own basis", "own", 2),
            (", groups of 4, own basis", "own", 4),
            (", calibrated basis", "calibrated", 1),
            (", no rotation (Mustafar)", "identity", 1),
        )
    ]
    fixed = [
        Way(f"25 % bf16, the same channels of all vectors{more}", "top-r", basis,
            kept=0.25, channels=0.25)
        for more, basis in (("", "largest channels"), (", own basis", "own, not centred"))
    ]  # fmt: skip
    by_loss = [
        Way(f"strategies that lose {bound:g} at most (MosaicKV)", "by loss", "own, not centred",
            bound=bound)
        for bound in (0.1, 0.03)
    ]  # fmt: skip
    few_bits = [
        Way(f"{share:.0%}".replace("%", " %") + f" {numbers}{more}", "top-r", basis,
            kept=share, group=group, numbers=numbers)
        for share, numbers, more, basis, group in (
            (0.5, "fp8", ", calibrated basis", "calibrated", 1),
            (0.75, "int4", ", calibrated basis", "calibrated", 1),
            (0.5, "int4", ", own basis", "own", 1),
            (0.5, "int4", ", own basis, not centred", "own, not centred", 1),
            (0.5, "int4", ", calibrated basis", "calibrated", 1),
            (0.5, "int4", ", Hadamard", "hadamard", 1),
            (0.5, "int4", ", no rotation", "identity", 1),
            (0.5, "int4", ", groups of 2, calibrated basis", "calibrated", 2),
            (0.25, "int4", ", calibrated basis", "calibrated", 1),
        )
    ]  # fmt: skip
    planes = [
        Way(f"planes, {bits:g} bits, {basis} basis", "planes", basis, bits)
        for bits, basis in (
            (4, "calibrated"), (3, "calibrated"), (3, "own"), (2.5, "calibrated"), (2.5, "own"),
            (2.5, "calibrated, unweighted"), (2, "calibrated"),
        )
    ]  # fmt: skip
    whole = (Way("bf16", "bf16"), Way("fp8", "fp8"), *codes, *turned, *masks, *fixed, *quarter,
             *by_loss, *few_bits, *planes)  # fmt: skip
    return (*whole, *(read_in_few_blocks(way) for way in (Way("exact", "exact"), *whole)))


class Bases:
    """The bases of one model: those that no text is needed for, calibrated ones, and a text's."""

    def __init__(self, calibration: Moments) -> None:
        self.calibration = calibration
        self._planes: dict[tuple[Basis, int], torch.Tensor] = {}

    def of_text(self, way: Way, own: Moments) -> torch.Tensor | None:
        """What a way packs a text of such moments in, f32 [2, N, rows, D]; None for no basis."""
        if way.basis in ("none", "hadamard") and way.kind != "top-r":
            return None
        moments = own if way.basis.startswith("own") else self.calibration
        if way.kind == "planes":
            return self._in_planes(way, moments)
        if way.basis in ("identity", "hadamard"):
            basis = self._everywhere(way.basis)
        elif way.basis == "largest channels":
            basis = largest_channels(own)
        else:
            basis = rotated(moments, centred="not centred" not in way.basis)
        return basis[:, :, : round(way.channels * basis.shape[-1]) + 1]

    def _in_planes(self, way: Way, moments: Moments) -> torch.Tensor:
        size = way.token_bytes(moments.sums.shape[-1])
        key = (way.basis, size)
        made = self._planes.get(key)
        if made is None or moments is not self.calibration:
            made = in_planes(moments, size, weighted="unweighted" not in way.basis)
        if moments is self.calibration:
            self._planes[key] = made
        return made

    def _everywhere(self, basis: Basis) -> torch.Tensor:
        sums = self.calibration.sums
        dim = sums.shape[-1]
        directions = torch.eye(dim) if basis == "identity" else hadamard(dim)
        one = torch.cat((torch.zeros(1, dim), directions)).to(sums.device)
        return one.expand(*sums.shape[:2], -1, -1).contiguous()


def largest_channels(own: Moments) -> torch.Tensor:
    """No rotation: channels as they are, those of the largest squares first [2, N, D + 1, D]."""
    order = torch.diagonal(own.products, dim1=-2, dim2=-1).argsort(-1, descending=True)
    channels = torch.nn.functional.one_hot(order, order.shape[-1]).float()
    return torch.cat((torch.zeros_like(channels[:, :, :1]), channels), 2)


def hadamard(dim: int) -> torch.Tensor:
    """Sylvester's matrix [D, D] over √D; D is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / dim**0.5


def made_of(kv: torch.Tensor, way: Way, basis: torch.Tensor | None, own: Moments) -> torch.Tensor:
    """What a way makes of vectors, by torch."""
    k, v = kv
    bits = int(way.bits)
    if way.kind == "exact":
        return kv
    if way.kind == "bf16":
        return kv.bfloat16().float()
    if way.kind == "fp8":
        return torch.stack((arithmetic.fp8(k), arithmetic.fp8(v)))
    if way.kind == "codes":
        return torch.stack((arithmetic.key_codes(k, bits), arithmetic.value_codes(v, bits)))
    if way.kind == "turned codes":
        directions = hadamard(kv.shape[-1]).to(kv.device)
        return arithmetic.turned_codes(kv.flatten(0, 1), bits, directions).view_as(kv)
    if way.kind == "mask":
        weights = torch.diagonal(own.queries, dim1=-2, dim2=-1) * torch.diagonal(
            own.products[0], dim1=-2, dim2=-1
        )
        k = arithmetic.masked(k, weights, round(way.kept * kv.shape[-1]))
        if bits < 16:
            return torch.stack((arithmetic.key_codes(k, bits), arithmetic.value_codes(v, bits)))
        return torch.stack((k, v)).bfloat16().float()
    assert basis is not None
    if way.kind == "planes":
        return torch.stack([arithmetic.planes(x, part) for x, part in zip(kv, basis, strict=True)])
    kept = round(way.kept * kv.shape[-1])
    return torch.stack([arithmetic.top_r(x, part, kept, way.group, way.numbers)
                        for x, part in zip(kv, basis, strict=True)])  # fmt: skip


def made_by_loss(kv: torch.Tensor, way: Way, basis: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Of each layer and head what the smallest strategy makes that loses no more than the bound,
    of keys or of values, else the one that loses least; and the bytes a token, their mean."""
    dim = kv.shape[-1]
    sizes = torch.tensor([one.page_bytes(dim) for one in STRATEGIES], device=kv.device)
    made, losses = [], []
    for one in STRATEGIES:
        kept, rows = round(one.kept * dim), round(one.channels * dim) + 1
        back = torch.stack([arithmetic.top_r(x, part[:, :rows], kept, one.group, one.numbers)
                            for x, part in zip(kv, basis, strict=True)])  # fmt: skip
        lost = (back - kv).double().square().sum((2, 3)) / kv.double().square().sum((2, 3))
        made.append(back)
        losses.append(lost.amax(0))
    loss = torch.stack(losses)
    below = torch.where(loss <= way.bound, sizes[:, None].double(), torch.inf)
    best = torch.where(below.isfinite().any(0), below.argmin(0), loss.argmin(0))
    chosen = torch.stack(made).movedim(2, 0)[torch.arange(len(best)), best]
    return chosen.movedim(0, 1), float(sizes[best].mean())


def made_by_pages(
    kv: torch.Tensor, of: ops.PackedFormat, basis: torch.Tensor | None
) -> torch.Tensor:
    """What packed pages of a format make of vectors: `pack_pages`, then `unpack_pages`."""
    pages = in_pages(kv)
    bases = None if basis is None else basis.transpose(0, 1)[None].contiguous()
    packed = ops.PackedPages.zeros(len(pages), of, bases=bases)
    packs, block = packs_of(pages, kv.shape[1]), kv.shape[1]
    ops.pack_pages(pages, packed, packs, pages=block)
    back = torch.zeros_like(pages)
    ops.unpack_pages(packed, back, packs, pages=block)
    return out_of_pages(back, kv.shape[1])


def in_pages(kv: torch.Tensor) -> torch.Tensor:
    """Vectors in exact pages [1 + N · T / PAGE, 2, PAGE, D], block by block behind page 0."""
    blocks = kv.unflatten(2, (-1, PAGE)).permute(2, 1, 0, 3, 4).flatten(0, 1)
    return torch.cat((torch.zeros_like(blocks[:1]), blocks))


def out_of_pages(pages: torch.Tensor, block: int) -> torch.Tensor:
    """The way back, of blocks of so many pages."""
    return pages[1:].unflatten(0, (-1, block)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def packs_of(pages: torch.Tensor, block: int) -> torch.Tensor:
    """Every block as a packed one of the same number."""
    first = 1 + block * torch.arange((len(pages) - 1) // block, dtype=torch.int32)
    return torch.stack((first, torch.full_like(first, PAGE), first), 1)

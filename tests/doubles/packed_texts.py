"""Text in packed pages and what it means, by arithmetic of the tests' own in f64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from paged import causal_mask, dense_attention, rope_table, rotated
from versions import CPU, REFERENCE, RUNNABLE, Version

SCALES = {"bf16": torch.bfloat16, "f16": torch.float16}
LARGEST = {"int4": 15, "int8": 255}
"""The largest code, by kinds that are packed in no basis."""
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest numbers of dtype that are not above x f64, as f64."""
    near = x.to(dtype)
    lower = torch.nextafter(near, torch.tensor(-torch.inf, dtype=dtype))
    return torch.where(near.double() <= x, near, lower).double()


def steps(
    x: torch.Tensor, axis: int, dtype: torch.dtype, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero and scale of numbers x f64 along an axis: f64 but for the rounding to dtype."""
    zero = down(x.amin(axis, keepdim=True), dtype)
    return zero, -down((zero - x.amax(axis, keepdim=True)) / most, dtype)


def rounded(
    x: torch.Tensor, axis: int, scales: str, most: int = 15
) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes of 0 to `most` make of x f64 along an axis, and how far it may be from x."""
    zero, scale = steps(x, axis, SCALES[scales], most)
    codes = torch.where(scale > 0, ((x - zero) / scale).round(), 0.0).clamp(0, most)
    return zero + scale * codes, scale


@dataclass
class Text:
    """Exact pages of a layer with G heads, and the packed ones that they became."""

    cache: torch.Tensor
    packed: ops.PackedPages
    packs: np.ndarray
    k: torch.Tensor
    v: torch.Tensor

    @property
    def pages(self) -> int:
        return self.k.shape[1]

    def entries(self) -> np.ndarray:
        """Of the packed blocks, one after the other."""
        ends = np.cumsum(self.packs[:, 1])
        rows = [
            (row[0], 0, row[1], end - row[1], 0) for row, end in zip(self.packs, ends, strict=True)
        ]
        return np.array(rows, np.int32).reshape(-1, 5)


def text_of(
    generator: torch.Generator,
    tokens: int,
    *,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 16,
    of: ops.PackedFormat,
    version: Version | None = None,
    bases: torch.Tensor | None = None,
) -> Text:
    """Random tokens with outliers in some channels, in shuffled blocks of exact pages; packed.

    Of top-r pages and planes `bases` are drawn from, block by block.
    """
    dim, whole = of.head_dim, of.page_tokens
    blocks = whole // page_tokens
    count = -(-tokens // whole)
    factor = 1 + 9.0 * (torch.rand(dim, generator=generator) < 0.1)
    offset = 3 * torch.randn(dim, generator=generator)
    k = torch.randn(tokens, kv_heads, dim, generator=generator) * factor + offset
    v = torch.randn(tokens, kv_heads, dim, generator=generator)
    k, v = k.to(dtype), v.to(dtype)
    order = 1 + kv_heads * torch.randperm(count * blocks, generator=generator).numpy()
    cache = torch.full((1 + kv_heads * count * blocks, 2, page_tokens, dim), torch.nan, dtype=dtype)
    packs = np.zeros((count, 2 + blocks), np.int32)
    packs[:, 0] = 1 + kv_heads * torch.randperm(count, generator=generator).numpy()
    packs[:, 1] = np.minimum(whole, tokens - whole * np.arange(count))
    packs[:, 2:] = order.reshape(count, blocks)
    for token in range(tokens):
        block = int(packs[token // whole, 2 + token % whole // page_tokens])
        at = slice(block, block + kv_heads), token % page_tokens
        cache[at[0], 0, at[1]], cache[at[0], 1, at[1]] = k[token], v[token]
    packed = ops.PackedPages.zeros(1 + kv_heads * count, of, bases=bases)
    packed.data.fill_(0xA5)
    if bases is not None:
        packed.bases.of.random_(len(bases), generator=generator)
    if version is not None:
        version.pack_pages(cache, packed, packs, pages=kv_heads)
    return Text(cache, packed, packs, k.double(), v.double())


def on_cuda(of: ops.PackedPages) -> ops.PackedPages:
    """The same pages on the GPU, and their bases if they have any."""
    bases = of.bases
    if bases is not None:
        bases = ops.PackedBases(bases.data.cuda(), bases.of.cuda())
    return ops.PackedPages(of.data.cuda(), of.format, bases)


def meant(text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V f64 [T, G, D] that the packed pages stand for, by this file's own arithmetic."""
    of = text.packed.format
    parts = [rounded(part, 0, of.scales)[0] for part in text.k.split(of.page_tokens)]
    return torch.cat(parts), rounded(text.v, -1, of.scales)[0]


def pages_of(text: Text, version: Version, *, in_basis: bool = False) -> torch.Tensor:
    """What `unpack_pages` writes into exact pages f32 as large as packed ones, each in its block.

    Infinity is left in slots that it does not write.
    """
    of = text.packed.format
    cache = torch.full((len(text.packed.data), 2, of.page_tokens, of.head_dim), torch.inf)
    packs = np.stack([text.packs[:, 0], text.packs[:, 1], text.packs[:, 0]], 1)
    version.unpack_pages(text.packed, cache, packs, pages=text.pages, in_basis=in_basis)
    return cache


def read_back(
    text: Text, version: Version, *, in_basis: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V f32 [T, G, D] as `unpack_pages` writes them, in pages as large as packed ones."""
    cache = pages_of(text, version, in_basis=in_basis)
    rows = [
        cache[block : block + text.pages, :, :tokens].permute(1, 2, 0, 3)
        for block, tokens in text.packs[:, :2].tolist()
    ]
    behind = [
        cache[block : block + text.pages, :, tokens:]
        for block, tokens in text.packs[:, :2].tolist()
    ]
    assert all((slots == torch.inf).all() for slots in behind), "other slots stay as they are"
    k, v = torch.cat(rows, 1)
    return k, v


def random_bases(
    generator: torch.Generator, of: ops.PackedFormat, pages: int, count: int = 2
) -> torch.Tensor:
    """So many bases [count, pages, 2, C + 1, D]: means, and directions that are orthonormal."""
    shape = (count, pages, 2, of.head_dim, of.head_dim)
    turned = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q
    means = torch.randn((*shape[:3], 1, of.head_dim), generator=generator, dtype=torch.float64)
    return torch.cat((means, turned[..., : of.channels, :]), -2).float().contiguous()


def drawn_bases(
    generator: torch.Generator, of: ops.PackedFormat, pages: int, count: int = 2
) -> torch.Tensor:
    """Random bases of top-r pages or of planes, whichever a format is."""
    draw = random_planes if of.kind == "planes" else random_bases
    return draw(generator, of, pages, count)


def random_planes(
    generator: torch.Generator, of: ops.PackedFormat, pages: int, count: int = 2
) -> torch.Tensor:
    """Bases of planes [count, pages, 2, 2D + 2, D]: random bits, steps along orthonormal lines."""
    dim, made = of.head_dim, []
    for _ in range(count * pages):
        left, bits = of.token_bytes, []
        for _ in range(2):
            groups = []
            for size in torch.randint(0, 4, (dim // 4,), generator=generator).tolist():
                bytes_ = (4, 2, 1, 0)[size]
                groups += [8 >> size if bytes_ else 0] if bytes_ <= left else [0]
                left -= bytes_ if bytes_ <= left else 0
            bits.append(sorted(groups, reverse=True))
        made.append(bits)
    bits = torch.tensor(made, dtype=torch.float64).repeat_interleave(4, -1)
    bits = bits.reshape(count, pages, 2, 1, dim)
    basis = random_bases(generator, ops.PackedFormat("top-r", dim, kept=dim), pages, count).double()
    step = 4.0 / 2 ** (bits.mT / 2) * (0.5 + torch.rand(bits.mT.shape, generator=generator))
    mean, lines = basis[..., :1, :], basis[..., 1:, :]
    return torch.cat((mean, bits, lines * step, lines / step), -2).float().contiguous()


def put_odd(text: Text, odd: Sequence[tuple[int, int, float]]) -> None:
    """Puts numbers into the exact pages of a text: each at a token, in a channel."""
    of = text.packed.format
    for token, channel, number in odd:
        block = int(text.packs[token % len(text.k) // of.page_tokens, 2])
        text.cache[block, token % 2, token % 16, channel % of.head_dim] = number


def expect_same_bytes(text: Text) -> None:
    """That all versions pack a text into the same bytes, and unpack them alike."""
    of, pages, made = text.packed.format, text.pages, []
    for version in RUNNABLE:
        data = torch.full_like(text.packed.data, 0x5A)
        packed = ops.PackedPages(data, of, text.packed.bases)
        version.pack_pages(text.cache, packed, text.packs, pages=pages)
        back = torch.zeros_like(text.cache)
        version.unpack_pages(packed, back, text.packs, pages=pages)
        made.append((data, back))
    for data, back in made[1:]:
        assert torch.equal(data, made[0][0])
        torch.testing.assert_close(back, made[0][1], rtol=0, atol=0, equal_nan=True)
    written = torch.zeros(len(made[0][0]), dtype=torch.bool)
    blocks = torch.from_numpy(text.packs[:, 0]).long()
    written[torch.cat([blocks + page for page in range(pages)])] = True
    assert (made[0][0][~written] == 0x5A).all(), "nothing else is written"


def check_attention(
    generator: torch.Generator,
    of: ops.PackedFormat,
    kv_heads: int,
    group: int,
    lengths: list[int],
    version: Version,
    *,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    delta: int,
    bases: torch.Tensor | None = None,
) -> None:
    """A batch of requests, the second page of each moved by delta, against f64 attention."""
    texts = [
        text_of(generator, n, kv_heads=kv_heads, of=of, version=CPU, bases=bases) if n else None
        for n in lengths
    ]
    held, entries, data, numbers = 0, [], [], []
    for text in texts:
        if text is not None:
            rows = text.entries()
            rows[:, 0] += held
            rows[1:2, 4] = delta
            held += len(text.packed.data)
            data.append(text.packed.data)
            numbers += [] if bases is None else [text.packed.bases.of]
        entries.append(rows if text is not None else np.zeros((0, 5), np.int32))
    pages = ops.PackedPages.zeros(max(held, 1), of, bases=bases)
    if data:
        torch.cat(data, out=pages.data)
    if numbers:
        torch.cat(numbers, out=pages.bases.of)
    heads = kv_heads * group
    q = torch.randn(len(lengths), heads, of.head_dim, generator=generator).to(dtype)
    positions = np.array([max(n - 1, 0) for n in lengths], np.int32)
    offsets = np.cumsum([0, *(len(rows) for rows in entries)]).astype(np.int32)
    rope = rope_table(1, of.head_dim)
    scale = of.head_dim**-0.5
    kv = ops.PackedKv(pages, 0, kv_heads, scale, rope, window, softcap)
    out, lse = version.attend_packed(
        q, positions, np.concatenate(entries), kv, entry_offsets=offsets
    )
    inv_freq = torch.from_numpy(rope.inv_freq[0])
    for b, text in enumerate(texts):
        if text is None:
            assert (out[b] == 0).all()
            assert (lse[b] == -torch.inf).all()
            continue
        k, v = (part.double() for part in read_back(text, REFERENCE))
        moved = slice(of.page_tokens, 2 * of.page_tokens)
        k[moved] = rotated(k[moved], inv_freq, torch.full((len(k[moved]),), delta))
        mask = causal_mask(torch.tensor([lengths[b] - 1]), lengths[b], window)
        wanted, of_lse, _ = dense_attention(q[b : b + 1], k, v, mask, scale, softcap)
        limit = CLOSE[dtype]
        size = float(wanted.abs().max().clamp_min(1))
        torch.testing.assert_close(
            out[b : b + 1].double(), wanted, rtol=limit, atol=limit * size, check_dtype=False
        )
        spread = float(of_lse.abs().max().clamp_min(1))
        torch.testing.assert_close(
            lse[b : b + 1].double(), of_lse, rtol=limit, atol=limit * spread, check_dtype=False
        )

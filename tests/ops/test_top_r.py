"""Top-r pages: every version against f64 arithmetic on numbers of the test's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basis_formats import ODD_NUMBERS, top_r_formats
from kvweave import ops
from packed_texts import (
    check_attention,
    expect_same_bytes,
    put_odd,
    random_bases,
    read_back,
    text_of,
)
from paged import rope_table
from versions import RUNNABLE, VERSIONS

HOST = [version for version in RUNNABLE if version.device == "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


FORMATS = top_r_formats([16, 64, 80, 128], [16, 48, 64])


def in_basis(text, bases: torch.Tensor, side: int, x: torch.Tensor) -> torch.Tensor:
    """Numbers f64 [T, G, C] of x [T, G, D] in the bases of their blocks."""
    of, whole = text.packed.bases.of, text.packed.format.page_tokens
    parts = []
    for row, part in zip(text.packs, x.double().split(whole), strict=True):
        basis = bases[of[row[0]], :, side].double()
        centred = part - basis[None, :, 0]
        parts.append(torch.einsum("tgd,gcd->tgc", centred, basis[:, 1:]))
    return torch.cat(parts)


def lengths(text, bases: torch.Tensor, side: int, x: torch.Tensor) -> torch.Tensor:
    """Lengths f64 [T, G] of x [T, G, D] from the means of their blocks."""
    of, whole = text.packed.bases.of, text.packed.format.page_tokens
    means = [bases[of[row[0]], :, side, 0].expand(whole, -1, -1) for row in text.packs]
    return (x.double() - torch.cat(means)[: len(x)]).norm(dim=-1)


@settings(max_examples=60)
@given(
    of=FORMATS,
    tokens=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    page_tokens=st.sampled_from([1, 8, 16]),
    version=st.sampled_from(HOST),
    seed=st.integers(0, 2**20),
)
def test_of_each_vector_the_most_energy_is_kept(
    of, tokens, kv_heads, dtype, page_tokens, version, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bases = random_bases(generator, of, kv_heads)
    given = {"kv_heads": kv_heads, "dtype": dtype, "page_tokens": page_tokens, "bases": bases}
    text = text_of(generator, tokens, of=of, version=version, **given)
    read = read_back(text, version)
    for side, (got, exact) in enumerate(zip(read, (text.k, text.v), strict=True)):
        wanted, found = (in_basis(text, bases, side, x) for x in (exact, got))
        energy = wanted.square().unflatten(-1, (-1, of.group)).sum(-1)
        best = energy.topk(of.kept // of.group).indices
        kept = torch.zeros_like(energy).scatter_(-1, best, 1.0).repeat_interleave(of.group, -1)
        largest = (wanted * kept).abs().amax(-1, keepdim=True)
        step = {"bf16": 2**-8 * wanted.abs(), "fp8": 2**-4 * wanted.abs() + largest * 2**-16}
        near = step.get(of.numbers, largest / 15) * 1.02 + largest * 1e-4
        away = (found - wanted * kept).abs()
        # Where f32 finds other groups to have the most, they have as much.
        odd = (away > near).any(-1)
        assert odd.double().mean() < 0.02 or odd.sum() <= 2
        # Directions are rounded to 16 bits.
        rounded = 2**-15 * lengths(text, bases, side, exact)
        lost = (found - wanted).square().sum(-1)
        least = (wanted * (1 - kept)).square().sum(-1)
        room = (near.square() * kept).sum(-1)
        assert (
            lost.sqrt() <= 1.02 * (least + room).sqrt() + 1e-3 * largest[..., 0] + rounded
        ).all()


@settings(max_examples=60)
@given(
    of=FORMATS,
    tokens=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    odd=ODD_NUMBERS,
    alike=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_all_versions_write_the_same_bytes(of, tokens, dtype, odd, alike, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    bases = random_bases(generator, of, 2)
    if alike:
        # Ties everywhere: all groups have the same energy.
        bases[..., 0, :], bases[..., 1:, :] = 0.0, torch.eye(of.head_dim)[: of.channels]
    text = text_of(generator, tokens, dtype=dtype, of=of, bases=bases)
    if alike:
        text.cache[1:] = text.cache[1:].isnan().to(dtype) * 2 - 1
    put_odd(text, odd)
    expect_same_bytes(text)


@settings(max_examples=60)
@given(
    of=FORMATS,
    heads=st.sampled_from([(1, 1), (2, 2), (1, 5), (3, 1)]),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(0.5, 50),
    delta=st.integers(-40, 40),
    version=st.sampled_from(HOST),
    seed=st.integers(0, 2**20),
)
def test_attending_is_unpacking_and_attending(
    of, heads, lengths, dtype, window, softcap, delta, version, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    check_attention(
        generator,
        of,
        *heads,
        lengths,
        version,
        dtype=dtype,
        window=window,
        softcap=softcap,
        delta=delta,
        bases=random_bases(generator, of, heads[0]),
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_all_channels_in_bf16_are_dense_within_one_rounding(generator, version, dim) -> None:
    of = ops.PackedFormat("top-r", dim, 64, kept=dim)
    plain = torch.cat((torch.zeros(1, dim), torch.eye(dim))).expand(1, 2, 2, -1, -1).contiguous()
    text = text_of(generator, 90, of=of, version=version, bases=plain, dtype=torch.bfloat16)
    for got, exact in zip(read_back(text, version), (text.k, text.v), strict=True):
        away = (got - exact.float()).abs()
        assert (away <= 2**-23 * exact.abs().amax(-1, keepdim=True)).all()
        assert (away == 0).float().mean() > 0.999, "the very numbers of bf16"
    text = text_of(generator, 90, of=of, version=version, bases=plain)
    for got, exact in zip(read_back(text, version), (text.k, text.v), strict=True):
        away, largest = (got - exact).abs(), exact.abs().amax(-1, keepdim=True)
        assert (away <= 2**-8 * exact.abs() + 2**-22 * largest).all(), "one rounding"
    turned = random_bases(generator, of, 2)
    text = text_of(generator, 90, of=of, version=version, bases=turned)
    read = read_back(text, version)
    for side, (got, exact) in enumerate(zip(read, (text.k, text.v), strict=True)):
        size = in_basis(text, turned, side, exact).norm(dim=-1)
        away = (got.double() - exact).norm(dim=-1)
        assert (away <= 2**-8 * size).all(), "a rotation keeps lengths, and so does rounding"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("numbers", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_what_is_not_finite_is_nan_of_its_vector(generator, version, numbers, number) -> None:
    of = ops.PackedFormat("top-r", 64, 32, "f16", kept=16, numbers=numbers)
    bases = random_bases(generator, of, 2)
    text = text_of(generator, 32, of=of, bases=bases)
    text.packed.data.zero_()
    first, second = (int(block) for block in text.packs[0, 2:4])
    text.cache[first, 0, 3, 10] = number
    text.cache[second + 1, 1, 4, 20] = number
    version.pack_pages(text.cache, text.packed, text.packs, pages=2)
    k, v = read_back(text, version)
    wanted = torch.zeros(2, 32, 2, 64, dtype=torch.bool)
    wanted[0, 3, 0], wanted[1, 20, 1] = True, True
    if number == 3.4e38 and numbers == "bf16":
        # The rotated numbers are smaller than the largest that bf16 has.
        assert torch.stack((k, v)).isfinite().all()
    else:
        assert torch.equal(torch.stack((k, v)).isnan(), wanted)


@pytest.mark.parametrize("version", HOST, ids=lambda version: version.name)
def test_bytes_of_any_kind_are_read_as_if_unpacked(generator, version) -> None:
    """Bitmaps with too many bits or none: nothing is read outside a page."""
    of = ops.PackedFormat("top-r", 80, 16, kept=20, group=2, channels=44, numbers="int4")
    bases = random_bases(generator, of, 1)
    packed = ops.PackedPages.zeros(9, of, bases=bases)
    packed.data.random_(256, generator=generator)
    packed.data[5:] = 0xFF
    # A vector has 3 + 10 + 2 bytes; scales of .05 leave what is compared within f32.
    scales = packed.data.unflatten(1, (2, 16 * 15))[..., 16 * 13 :].view(torch.bfloat16)
    scales.fill_(0.05)
    entries = np.array([[page, 0, 16, 16 * page - 16, 0] for page in range(1, 9)], np.int32)
    q, positions = torch.randn(1, 2, 80, generator=generator), np.array([70], np.int32)
    kv = ops.PackedKv(packed, 0, 1, 0.125, rope_table(1, 80))
    offsets = np.array([0, 8], np.int32)
    out, lse = version.attend_packed(q, positions, entries, kv, entry_offsets=offsets)
    cache = torch.zeros(9, 2, 16, 80)
    packs = np.array([[page, 16, page] for page in range(1, 9)], np.int32)
    version.unpack_pages(packed, cache, packs, pages=1)
    wanted, of_lse = version.attend_decode(
        q,
        positions,
        entries,
        cache,
        0,
        entry_offsets=offsets,
        kv_heads=1,
        scale=0.125,
        rope=rope_table(1, 80),
    )
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, of_lse, rtol=1e-4, atol=1e-4)


def test_bytes_are_the_formula() -> None:
    bits = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5}
    for dim in (64, 128, 256):
        for numbers, size in bits.items():
            for group in (1, 2, 4):
                kept = {"kept": dim // 4, "group": group, "numbers": numbers}
                of = ops.PackedFormat("top-r", dim, 64, **kept)
                vector = dim // group // 8 + size * dim / 4 + 2 * (numbers != "bf16")
                assert of.page_bytes == 128 * vector
                assert ops.PackedPages.zeros(7, of).data.nbytes == 7 * of.page_bytes
    of_bf16 = 4 * 64 * 128
    quarter = [ops.PackedFormat("top-r", 128, kept=32, group=group) for group in (1, 2, 4)]
    assert [round(of_bf16 / of.page_bytes, 2) for of in quarter] == [3.2, 3.56, 3.76]
    assert ops.packed_format("quarter-bf16", 128) == quarter[0]
    assert of_bf16 / ops.packed_format("half-int4", 128).page_bytes >= 5
    assert ops.packed_format("int4", 128) == ops.PackedFormat("int4", 128)
    assert (quarter[1].kept, quarter[1].group, quarter[1].channels) == (32, 2, 128)
    assert 'kept=32, group=2, channels=128, numbers="bf16"' in repr(quarter[1])

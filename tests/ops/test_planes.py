"""Planes: every version against f64 arithmetic on numbers of the test's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basis_formats import ODD_NUMBERS, plane_formats
from kvweave import InvalidArgument, ops
from packed_texts import (
    check_attention,
    expect_same_bytes,
    put_odd,
    random_planes,
    read_back,
    text_of,
)
from paged import rope_table
from versions import RUNNABLE

HOST = [version for version in RUNNABLE if version.device == "cpu"]
"""Attention on CUDA, whose queries are of 16 bits, is in tests/cuda/test_cuda_top_r.py."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = {"ids": lambda version: version.name}


FORMATS = plane_formats([16, 64, 80, 128], [16, 48, 64])


def in_steps(text, bases: torch.Tensor, side: int, x: torch.Tensor) -> torch.Tensor:
    """Numbers of steps f64 [T, G, D] of x [T, G, D] in the bases of their blocks."""
    of, whole, dim = text.packed.bases.of, text.packed.format.page_tokens, x.shape[-1]
    parts = []
    for row, part in zip(text.packs, x.double().split(whole), strict=True):
        basis = bases[of[row[0]], :, side].double()
        parts.append(torch.einsum("tgd,gcd->tgc", part - basis[None, :, 0], basis[:, dim + 2 :]))
    return torch.cat(parts)


def bits_of(text, bases: torch.Tensor, side: int) -> torch.Tensor:
    """Of each token and KV head the bits of its channels [T, G, D]."""
    of, whole = text.packed.bases.of, text.packed.format.page_tokens
    rows = [bases[of[row[0]], :, side, 1].expand(whole, -1, -1) for row in text.packs]
    return torch.cat(rows)[: len(text.k)].double()


@settings(max_examples=60)
@given(
    of=FORMATS,
    tokens=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    page_tokens=st.sampled_from([1, 8, 16]),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**20),
)
def test_of_each_channel_the_nearest_code_is_stored(
    of, tokens, kv_heads, dtype, page_tokens, version, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bases = random_planes(generator, of, kv_heads)
    given = {"kv_heads": kv_heads, "dtype": dtype, "page_tokens": page_tokens, "bases": bases}
    text = text_of(generator, tokens, of=of, version=version, **given)
    for side, (got, exact) in enumerate(
        zip(read_back(text, version), (text.k, text.v), strict=True)
    ):
        wanted, found = (in_steps(text, bases, side, x) for x in (exact, got))
        bits = bits_of(text, bases, side)
        half = (2**bits - 1) / 2
        # Numbers are hundreds of steps, which f32 sums to so much.
        near = 1e-3 + 3e-5 * wanted.abs().amax(-1, keepdim=True)
        assert (found[bits == 0].abs() <= near.expand_as(bits)[bits == 0]).all()
        codes = found + half
        assert ((codes - codes.round()).abs() <= near)[bits > 0].all()
        assert ((found.abs() <= half + near) | (bits == 0)).all()
        away = (found - wanted.clamp(-half, half)).abs()
        assert ((away <= 0.5 + near) | (bits == 0)).all()


@settings(max_examples=60)
@given(
    of=FORMATS,
    tokens=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    odd=ODD_NUMBERS,
    seed=st.integers(0, 2**20),
)
def test_all_versions_write_the_same_bytes(of, tokens, dtype, odd, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    bases = random_planes(generator, of, 2)
    text = text_of(generator, tokens, dtype=dtype, of=of, bases=bases)
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
        bases=random_planes(generator, of, heads[0]),
    )


@pytest.mark.parametrize("version", HOST, **NAMES)
@pytest.mark.parametrize("bits", [2, 0])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_nan_of_its_vector(generator, version, bits, number) -> None:
    of = ops.PackedFormat("planes", 64, 32, token_bytes=32)
    bases = random_planes(generator, of, 2)
    bases[..., 1, :] = bits
    text = text_of(generator, 32, of=of, bases=bases)
    text.packed.data.zero_()
    first, second = (int(block) for block in text.packs[0, 2:4])
    text.cache[first, 0, 3, 10] = number
    text.cache[second + 1, 1, 4, 20] = number
    version.pack_pages(text.cache, text.packed, text.packs, pages=2)
    wanted = torch.zeros(2, 32, 2, 64, dtype=torch.bool)
    wanted[0, 3, 0], wanted[1, 20, 1] = True, True
    assert torch.equal(torch.stack(read_back(text, version)).isnan(), wanted)
    out, lse = version.attend_packed(
        torch.randn(2, 4, 64, generator=generator),
        np.array([31, 2], np.int32),
        np.concatenate((text.entries(), text.entries())),
        ops.PackedKv(text.packed, 0, 2, 0.125, rope_table(1, 64)),
        entry_offsets=np.array([0, 1, 2], np.int32),
    )
    assert out[0].isnan().all(), "a key of one KV head and a value of the other"
    assert lse[0, :2].isnan().all()
    assert lse[0, 2:].isfinite().all()
    assert out[1].isfinite().all(), "row 1 sees neither"


@pytest.mark.parametrize("version", HOST, **NAMES)
def test_bytes_of_any_kind_are_read_as_if_unpacked(generator, version) -> None:
    of = ops.PackedFormat("planes", 80, 16, token_bytes=50)
    bases = random_planes(generator, of, 1, count=1)
    packed = ops.PackedPages.zeros(9, of, bases=bases)
    packed.data.random_(256, generator=generator)
    packed.data[:, :4] = 0
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
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, of_lse, rtol=1e-3, atol=1e-3)


def test_bytes_are_the_formula() -> None:
    for dim in (64, 128, 256):
        for name, bits in (("planes-3", 3), ("planes-2.5", 2.5)):
            of = ops.packed_format(name, dim)
            assert of.token_bytes == 2 * dim * bits / 8
            assert of.page_bytes == 64 * of.token_bytes + 16
            assert ops.PackedPages.zeros(7, of).data.nbytes == 7 * of.page_bytes
            assert 4 * 64 * dim / of.page_bytes > {3: 5.2, 2.5: 6.2}[bits]
    of = ops.PackedFormat("planes", 64, 80, token_bytes=33)
    assert of.page_bytes == 32 + 80 * 33
    assert (of.kind, of.numbers, of.kept, of.channels) == ("planes", "planes", 64, 64)
    assert "token_bytes=33" in repr(of)


def test_formats_that_are_none_are_refused() -> None:
    for size, message in (
        ({}, "token_bytes: expected a number, got none"),
        ({"token_bytes": 0}, "token_bytes: expected 1 to 128"),
        ({"token_bytes": 129}, "token_bytes: expected 1 to 128"),
        ({"token_bytes": 40, "kept": 16}, "kind: expected top-r"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            ops.PackedFormat("planes", 64, **size)
    with pytest.raises(InvalidArgument, match="kind: expected planes for bytes of a token"):
        ops.PackedFormat("int8", 64, token_bytes=40)


@pytest.mark.parametrize("version", HOST, **NAMES)
@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ([8] * 4 + [3] * 4 + [0] * 56, "bits of a basis: expected fours of channels"),
        ([8] * 2 + [4] * 2 + [0] * 60, "bits of a basis"),
        ([2] * 4 + [4] * 4 + [0] * 56, "bits of a basis"),
        ([float("nan")] * 64, "bits of a basis"),
        ([8] * 20 + [0] * 44, "in 32 bytes, got 40 bytes"),
    ],
)
def test_bases_whose_codes_have_no_room_are_refused(generator, version, bits, message) -> None:
    of = ops.PackedFormat("planes", 64, 32, token_bytes=32)
    bases = random_planes(generator, of, 2)
    text = text_of(generator, 32, of=of, bases=bases)
    bases[1, 1, :, 1] = torch.tensor(bits, dtype=torch.float32)
    before = text.packed.data.clone()
    with pytest.raises(InvalidArgument, match=message):
        version.pack_pages(text.cache, text.packed, text.packs, pages=2)
    with pytest.raises(InvalidArgument, match=message):
        version.unpack_pages(text.packed, text.cache, text.packs, pages=2)
    assert torch.equal(text.packed.data, before)
    of_top_r = ops.PackedBases(bases[..., :65, :].contiguous(), text.packed.bases.of)
    packed = ops.PackedPages(text.packed.data, of, of_top_r)
    with pytest.raises(InvalidArgument, match="bases: expected shape"):
        version.pack_pages(text.cache, packed, text.packs, pages=2)
    # A format tells before anything is packed.
    with pytest.raises(InvalidArgument, match=message):
        of.check_bases(bases)
    with pytest.raises(InvalidArgument, match="bases: expected shape"):
        of.check_bases(of_top_r.data)


def test_a_format_knows_its_bases(generator) -> None:
    for of, rows in (
        (ops.PackedFormat("planes", 64, token_bytes=32), 130),
        (ops.PackedFormat("top-r", 64, kept=16, channels=40), 41),
    ):
        assert of.basis_rows == rows
        of.check_bases(torch.zeros(2, 3, 2, rows, 64))
        for wrong in (torch.zeros(2, 3, 2, rows), torch.zeros(2, 3, 2, rows, 64).double()):
            with pytest.raises(InvalidArgument, match="bases: expected"):
                of.check_bases(wrong)
    for kind in ("int4", "int8"):
        of = ops.PackedFormat(kind, 64)
        assert of.basis_rows is None
        with pytest.raises(InvalidArgument, match="bases: expected none for"):
            of.check_bases(torch.zeros(2, 3, 2, 65, 64))

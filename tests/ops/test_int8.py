"""INT8 pages: INT4's steps with codes to 255, against f64 arithmetic of the tests' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import Unsupported, ops
from packed_texts import SCALES, check_attention, read_back, rounded, text_of
from paged import rope_table
from versions import RUNNABLE, needs_cuda

HOST = [version for version in RUNNABLE if version.device == "cpu"]
FORMATS = st.builds(
    ops.PackedFormat,
    st.just("int8"),
    st.sampled_from([16, 64, 80, 128]),
    st.sampled_from([16, 48, 64]),
    st.sampled_from(list(SCALES)),
)


@settings(max_examples=40)
@given(
    of=FORMATS,
    tokens=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    version=st.sampled_from(HOST),
    seed=st.integers(0, 2**20),
)
def test_a_packed_page_is_what_f64_makes_of_it(of, tokens, kv_heads, dtype, version, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = text_of(generator, tokens, kv_heads=kv_heads, dtype=dtype, of=of, version=version)
    k, v = read_back(text, version)
    for got, exact, axis in ((k, text.k, 0), (v, text.v, -1)):
        parts = exact.split(of.page_tokens if axis == 0 else len(exact))
        wanted = [rounded(part, axis, of.scales, 255) for part in parts]
        scale = torch.cat([size.expand_as(part) for part, size in wanted])
        near = torch.cat([part for part, _ in wanted])
        away = (got.double() - near).abs()
        assert (away <= 1.001 * scale + 1e-6 * near.abs()).all()
        assert (away > 1e-6 * near.abs() + 1e-30).double().mean() < 0.02
        assert ((got.double() - exact).abs() <= 0.51 * scale + 1e-6 * exact.abs()).all()


@settings(max_examples=30)
@given(
    of=FORMATS,
    tokens=st.integers(1, 100),
    odd=st.lists(
        st.tuples(
            st.integers(0, 99),
            st.integers(0, 127),
            st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e4, 1e-7]),
        ),
        max_size=6,
    ),
    seed=st.integers(0, 2**20),
)
def test_all_versions_write_the_same_bytes(of, tokens, odd, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = text_of(generator, tokens, of=of)
    for token, channel, number in odd:
        block = int(text.packs[token % tokens // of.page_tokens, 2])
        text.cache[block, token % 2, token % 16, channel % of.head_dim] = number
    made = []
    for version in HOST:
        packed = ops.PackedPages(torch.full_like(text.packed.data, 0x5A), of)
        version.pack_pages(text.cache, packed, text.packs, pages=2)
        made.append(packed.data)
    assert all(torch.equal(bytes_, made[0]) for bytes_ in made)


@settings(max_examples=30)
@given(
    of=FORMATS,
    heads=st.sampled_from([(1, 1), (2, 2), (1, 5)]),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.integers(1, 80),
    delta=st.integers(-40, 40),
    version=st.sampled_from(HOST),
    seed=st.integers(0, 2**20),
)
def test_attending_is_unpacking_and_attending(
    of, heads, lengths, dtype, window, delta, version, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = {"dtype": dtype, "window": window, "softcap": None, "delta": delta}
    check_attention(generator, of, *heads, lengths, version, **given)


def test_bytes_are_the_formula() -> None:
    for dim in (64, 128, 256):
        of = ops.packed_format("int8", dim)
        assert of == ops.PackedFormat("int8", dim, 64)
        assert of.page_bytes == 128 * dim + 4 * dim + 4 * 64
        assert ops.PackedPages.zeros(5, of).data.nbytes == 5 * of.page_bytes
        assert (of.kind, of.numbers, of.kept, of.token_bytes) == ("int8", "int8", dim, None)


@needs_cuda
@pytest.mark.parametrize("name", ["int8", "planes-3"])
def test_a_device_refuses_them_by_name(name) -> None:
    of = ops.packed_format(name, 64, 32)
    packed = ops.PackedPages.zeros(3, of, "cuda")
    cache = torch.zeros(5, 2, 16, 64, device="cuda")
    with pytest.raises(Unsupported, match=f"got {of.kind}"):
        ops.pack_pages(cache, packed, np.array([[1, 32, 1, 3]], np.int32), pages=2)
    with pytest.raises(Unsupported, match=f"got {of.kind}"):
        ops.attend_packed(
            torch.zeros(1, 4, 64, device="cuda").bfloat16(),
            np.array([31], np.int32),
            np.array([[1, 0, 32, 0, 0]], np.int32),
            ops.PackedKv(packed, 0, 2, 1.0, rope_table(1, 64)),
            entry_offsets=np.array([0, 1], np.int32),
        )

"""INT4 and INT8 pages: every version of every op against f64 arithmetic of the test's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import ops
from packed_texts import LARGEST, SCALES, check_attention, meant, read_back, rounded, text_of
from paged import dense_attention, rope_table
from versions import RUNNABLE, VERSIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = st.builds(
    ops.PackedFormat,
    st.sampled_from(list(LARGEST)),
    st.sampled_from([16, 32, 64, 80, 96, 128, 256]),
    st.sampled_from([16, 32, 48, 64, 128]),
    st.sampled_from(list(SCALES)),
)


@settings(max_examples=60)
@given(
    of=FORMATS,
    tokens=st.integers(1, 200),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    page_tokens=st.sampled_from([1, 8, 16]),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**20),
)
def test_a_packed_page_is_what_f64_makes_of_it(
    of, tokens, kv_heads, dtype, page_tokens, version, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = {"kv_heads": kv_heads, "dtype": dtype, "page_tokens": page_tokens, "of": of}
    text = text_of(generator, tokens, version=version, **given)
    k, v = read_back(text, version)
    for got, exact, axis in ((k, text.k, 0), (v, text.v, -1)):
        parts = exact.split(of.page_tokens if axis == 0 else len(exact))
        wanted = [rounded(part, axis, of.scales, LARGEST[of.kind]) for part in parts]
        near = torch.cat([part for part, _ in wanted])
        scale = torch.cat([size.expand_as(part) for part, size in wanted])
        # Where f32 decides a tie otherwise, the other code is as near.
        away = (got.double() - near).abs()
        assert (away <= 1.001 * scale + 1e-6 * near.abs()).all()
        assert (away > 1e-6 * near.abs() + 1e-30).double().mean() < LARGEST[of.kind] / 1e4 + 0.01
        assert ((got.double() - exact).abs() <= 0.501 * scale + 1e-6 * exact.abs()).all()


@settings(max_examples=40)
@given(
    of=FORMATS,
    tokens=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    odd=st.lists(
        st.tuples(
            st.integers(0, 149),
            st.integers(0, 255),
            st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e4, 1e-7]),
        ),
        max_size=6,
    ),
    seed=st.integers(0, 2**20),
)
def test_all_versions_write_the_same_bytes(of, tokens, dtype, odd, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = text_of(generator, tokens, dtype=dtype, of=of)
    for token, channel, number in odd:
        block = int(text.packs[token % tokens // of.page_tokens, 2])
        text.cache[block, token % 2, token % 16, channel % of.head_dim] = number
    made = []
    for version in RUNNABLE:
        packed = ops.PackedPages(torch.full_like(text.packed.data, 0x5A), of)
        version.pack_pages(text.cache, packed, text.packs, pages=2)
        made.append(packed.data)
    assert all(torch.equal(bytes_, made[0]) for bytes_ in made)
    written = torch.zeros(len(made[0]), dtype=torch.bool)
    written[torch.from_numpy(np.concatenate([text.packs[:, 0], text.packs[:, 0] + 1])).long()] = (
        True
    )
    assert (made[0][~written] == 0x5A).all(), "nothing else is written"


@settings(max_examples=60)
@given(
    kind=st.sampled_from(list(LARGEST)),
    shape=st.sampled_from(
        [(16, 1, 1), (64, 2, 2), (64, 4, 1), (128, 2, 4), (128, 1, 9), (96, 1, 3)]
    ),
    page_tokens=st.sampled_from([16, 48, 64, 128]),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    scales=st.sampled_from(list(SCALES)),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(0.5, 50),
    delta=st.integers(-40, 40),
    version=st.sampled_from([v for v in RUNNABLE if v.device == "cpu"]),
    seed=st.integers(0, 2**20),
)
def test_attending_is_unpacking_and_attending(
    kind, shape, page_tokens, lengths, scales, dtype, window, softcap, delta, version, seed
) -> None:
    head_dim, kv_heads, group = shape
    of = ops.PackedFormat(kind, head_dim, page_tokens, scales)
    check_attention(
        torch.Generator().manual_seed(seed),
        of,
        kv_heads,
        group,
        lengths,
        version,
        dtype=dtype,
        window=window,
        softcap=softcap,
        delta=delta,
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scales", list(SCALES))
def test_packed_and_exact_tokens_merge_into_attention_over_all(generator, version, scales) -> None:
    """The oldest tokens packed, the newest exact: what a decode step over both does."""
    dtype = SCALES[scales]
    of = ops.PackedFormat("int4", 64, 64, scales)
    text = text_of(generator, 224, dtype=dtype, of=of, version=version)
    entries = text.entries()[:3]
    tail = text.packs[3]
    exact = [(block, 0, 16, 192 + 16 * i, 0) for i, block in enumerate(tail[2 : 2 + tail[1] // 16])]
    q = torch.randn(1, 4, 64, generator=generator).to(dtype)
    positions, rope = np.array([223], np.int32), rope_table(1, 64)
    old = version.attend_packed(
        q,
        positions,
        entries,
        ops.PackedKv(text.packed, 0, 2, 0.125, rope),
        entry_offsets=np.array([0, 3], np.int32),
    )
    new = version.attend_decode(
        q,
        positions,
        np.array(exact, np.int32),
        text.cache,
        0,
        entry_offsets=np.array([0, len(exact)], np.int32),
        kv_heads=2,
        scale=0.125,
        rope=rope,
    )
    out, lse = version.merge_states(torch.stack([old[0], new[0]]), torch.stack([old[1], new[1]]))
    k, v = meant(text)
    k[192:], v[192:] = text.k[192:], text.v[192:]
    mask = torch.ones(1, 224, dtype=torch.bool)
    wanted, of_lse, _ = dense_attention(q, k, v, mask, 0.125)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-5, atol=2**-5)
    torch.testing.assert_close(lse.double(), of_lse, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("number", [0.0, 1.0, -3.25, 1e-3, 4e4])
@pytest.mark.parametrize(("kind", "scales"), [("int4", "bf16"), ("int4", "f16"), ("int8", "f16")])
def test_what_is_constant_comes_back_exactly(version, kind, scales, number) -> None:
    of = ops.PackedFormat(kind, 64, 64, scales)
    exact = torch.tensor(number).to(SCALES[scales])
    cache = torch.full((9, 2, 16, 64), float(exact))
    packed = ops.PackedPages.zeros(3, of)
    packs = np.array([[1, 64, 1, 3, 5, 7]], np.int32)
    version.pack_pages(cache, packed, packs, pages=2)
    back = torch.zeros_like(cache)
    version.unpack_pages(packed, back, packs, pages=2)
    assert (back[1:] == float(exact)).all()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_nan_of_what_shares_their_steps(generator, version, number) -> None:
    of = ops.PackedFormat("int4", 64, 32)
    text = text_of(generator, 32, of=of)
    first, second = (int(block) for block in text.packs[0, 2:4])
    text.cache[first, 0, 3, 10] = number
    text.cache[second + 1, 1, 4, 20] = number
    version.pack_pages(text.cache, text.packed, text.packs, pages=2)
    k, v = read_back(text, version)
    wanted = torch.zeros(32, 2, 64, dtype=torch.bool)
    wanted[:, 0, 10] = True
    assert torch.equal(k.isnan(), wanted)
    wanted = torch.zeros(32, 2, 64, dtype=torch.bool)
    wanted[20, 1] = True
    assert torch.equal(v.isnan(), wanted)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", list(LARGEST))
def test_nan_reaches_those_who_read_it_and_nobody_else(generator, version, kind) -> None:
    of = ops.PackedFormat(kind, 64, 32)
    text = text_of(generator, 64, dtype=torch.bfloat16, of=of)
    text.cache[int(text.packs[1, 2]), 0, 0, 5] = torch.nan
    text.cache[int(text.packs[0, 3]) + 1, 1, 15, 5] = torch.nan
    version.pack_pages(text.cache, text.packed, text.packs, pages=2)
    q = torch.randn(2, 4, 64, generator=generator).bfloat16()
    entries = text.entries()
    # One request reads 31 tokens of the first page, the other one all of both.
    rows = np.concatenate([entries[:1], entries])
    rows[0, 2] = 31
    out, lse = version.attend_packed(
        q,
        np.array([31, 63], np.int32),
        rows,
        ops.PackedKv(text.packed, 0, 2, 0.125, rope_table(1, 64)),
        entry_offsets=np.array([0, 1, 3], np.int32),
    )
    assert out[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert out[1].isnan().all(), "head 0 by its key, head 1 by its value"
    assert lse[1, :2].isnan().all()
    assert lse[1, 2:].isfinite().all()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reach_gives_each_head_its_table_and_window(generator, version) -> None:
    of = ops.PackedFormat("int4", 64, 16)
    text = text_of(generator, 100, dtype=torch.bfloat16, of=of, version=version)
    q = torch.randn(1, 4, 64, generator=generator).bfloat16()
    entries = text.entries()
    rows = np.concatenate([entries, entries[[0, 4, 5, 6]]])
    reach = ops.Reach(2, np.array([[0, 1, 0, 0], [1, 0, 20, 4]], np.int32))
    kv = ops.PackedKv(text.packed, 0, 2, 0.125, rope_table(1, 64), reach=reach)
    positions, offsets = np.array([99], np.int32), np.array([0, 7, 11], np.int32)
    out, _ = version.attend_packed(q, positions, rows, kv, entry_offsets=offsets)
    k, v = meant(text)
    keys = torch.arange(100)
    seen = [torch.ones(1, 100, dtype=torch.bool), ((keys > 79) | (keys < 4))[None]]
    for head, (mask, rank) in enumerate(zip(seen, (1, 0), strict=True)):
        part = q[:, 2 * head : 2 * head + 2]
        wanted, _, _ = dense_attention(part, k[:, [rank]], v[:, [rank]], mask, 0.125)
        got = out[:, 2 * head : 2 * head + 2].double()
        torch.testing.assert_close(got, wanted, rtol=2**-5, atol=2**-5)


def test_bytes_are_the_formula() -> None:
    for tokens, dim in ((16, 128), (64, 64), (64, 128), (128, 256)):
        of = ops.PackedFormat("int4", dim, tokens)
        assert of.page_bytes == tokens * dim + 4 * dim + 4 * tokens
        assert ops.PackedPages.zeros(7, of).data.nbytes == 7 * of.page_bytes
    for dim in (64, 128, 256):
        assert 4 * 64 * dim / ops.PackedFormat("int4", dim).page_bytes >= 3.5
        of = ops.packed_format("int8", dim)
        assert of == ops.PackedFormat("int8", dim, 64)
        assert of.page_bytes == 128 * dim + 4 * dim + 4 * 64
        assert ops.PackedPages.zeros(5, of).data.nbytes == 5 * of.page_bytes
        assert (of.kind, of.numbers, of.kept, of.token_bytes) == ("int8", "int8", dim, None)
    assert ops.PackedFormat("int4", 64) == ops.PackedFormat("int4", 64, 64, "bf16")
    assert ops.PackedFormat("int4", 64) != ops.PackedFormat("int4", 64, 64, "f16")

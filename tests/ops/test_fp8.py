"""fp8 caches: every version of every op against f64 arithmetic on what the stored numbers mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from kvweave import InvalidArgument, ops
from paged import causal_mask, dense_attention, rope_table, rotated
from versions import RUNNABLE, VERSIONS

FP8 = torch.float8_e4m3fn
ROWS = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
SCALES = (0.37, 2.5)
NAN, LARGEST, SIGN = 0x7F, 0x7E, 0x80
NUMBERS = torch.arange(NAN, dtype=torch.uint8).view(FP8).double()
"""What is not negative, by its bits."""


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Bits of the e4m3 numbers nearest to x in f64, of two the even one; too large is largest."""
    size = x.double().abs().nan_to_num(0).clamp(max=448)
    above = torch.searchsorted(NUMBERS, size).clamp(1, LARGEST)
    below = above - 1
    to_below, to_above = size - NUMBERS[below], NUMBERS[above] - size
    tie = torch.where(below % 2 == 0, below, above)
    bits = torch.where(to_below < to_above, below, torch.where(to_below > to_above, above, tie))
    bits = torch.where(x.isnan(), NAN, torch.where(torch.signbit(x), bits | SIGN, bits))
    return bits.to(torch.uint8)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """NaN has many bits and one meaning."""
    bits = x.contiguous().view(torch.uint8).clone()
    bits[bits & NAN == NAN] = NAN
    return bits


@dataclass
class Request:
    """T tokens of one layer in an fp8 arena, and what they mean: K, V f64 [T, G, D]."""

    pages: torch.Tensor
    entries: np.ndarray
    slots: np.ndarray
    k: torch.Tensor
    v: torch.Tensor
    scales: tuple[float, float]

    def settings(self, **more: object) -> dict:
        _, kv_heads, head_dim = self.k.shape
        given = {"kv_heads": kv_heads, "scale": head_dim**-0.5, "rope": rope_table(1, head_dim)}
        return {**given, "kv_scales": self.scales, **more}


def stored(
    generator: torch.Generator,
    tokens: int,
    *,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_tokens: int = 16,
    scales: tuple[float, float] = SCALES,
) -> Request:
    shape = kvweave.KvShape(1, kv_heads, head_dim, page_tokens, "fp8_e4m3")
    cache = kvweave.KvCache(shape, blocks=tokens // page_tokens + 2)
    pages = torch.from_dlpack(cache.arena)
    pages.view(torch.uint8).fill_(NAN)
    request = cache.admit(np.arange(tokens, dtype=np.int32), reuse="none")
    slots = request.slots(np.arange(tokens, dtype=np.int32))
    rows = torch.randn(2, tokens, kv_heads, head_dim, generator=generator)
    ops.write_pages(pages, 0, rows[0], rows[1], slots, kv_scales=scales, backend="reference")
    block, slot = torch.from_numpy(slots).long().T
    read = [
        torch.stack([pages[block + head, part, slot].double() for head in range(kv_heads)], 1)
        for part in (0, 1)
    ]
    k, v = (x * torch.tensor(scale).double() for x, scale in zip(read, scales, strict=True))
    return Request(pages, request.entries(), slots, k, v, scales)


def near(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    limit = CLOSE[dtype]
    size = float(wanted.abs().max().clamp_min(1))
    torch.testing.assert_close(got.double(), wanted.double(), rtol=limit, atol=limit * size)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_is_rounded_as_torch_rounds(version, dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    rows = every.view(1024, 1, 64)
    pages = torch.zeros(66, 2, 16, 64).to(FP8)
    at = np.arange(1024)
    slots = np.stack([1 + at // 16, at % 16], 1).astype(np.int32)
    version.write_pages(pages, 0, rows, rows.flip(0), slots)
    # torch does not saturate: what is beyond 448 is NaN there.
    wanted = rows.float().clamp(-448, 448).to(FP8).view(-1, 16, 64)
    assert torch.equal(bits_of(pages[1:65, 0]), bits_of(wanted))
    assert torch.equal(bits_of(pages[1:65, 1]), bits_of(wanted.flip(0, 1)))
    assert (pages[[0, 65]].view(torch.uint8) == 0).all(), "nothing else is written"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0, 1 / 3, 1e-4, 7e3, 1e-30, 1e38])
def test_quotients_are_rounded_once(generator, version, dtype, scale) -> None:
    """Where two numbers are as near, and a little to either side, the quotient decides."""
    scale = float(torch.tensor(scale))
    ties = (NUMBERS[1:] + NUMBERS[:-1]) / 2 * scale
    exact = ties.to(dtype)
    step = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    around = [
        exact,
        (exact.double() * (1 + step)).to(dtype),
        (exact.double() * (1 - step)).to(dtype),
    ]
    more = (600 * scale * torch.randn(3 * 128, generator=generator)).to(dtype)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40], dtype=dtype)
    x = torch.cat([*around, *(-part for part in around), more, special])
    x = torch.cat([x, x.new_zeros(-len(x) % 16)]).view(-1, 1, 8).repeat(1, 2, 1)
    pages = torch.zeros(4 * len(x), 2, 4, 8).to(FP8)
    at = np.arange(len(x))
    slots = np.stack([2 + 2 * (at // 4), at % 4], 1).astype(np.int32)
    version.write_pages(pages, 0, x, x, slots, kv_scales=(scale, 2 * scale))
    block, slot = torch.from_numpy(slots).long().T
    for part, factor in ((0, scale), (1, float(torch.tensor(2 * scale)))):
        wanted = nearest(x[:, 0].double() / factor)
        assert torch.equal(bits_of(pages[block, part, slot]), wanted)


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 90),
    shape=st.sampled_from(
        [(8, 1), (16, 3), (64, 4), (72, 2), (96, 1), (128, 4), (128, 9), (256, 2)]
    ),
    page_tokens=st.sampled_from([8, 12, 16, 32]),
    dtype=st.sampled_from(ROWS),
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(0.5, 50),
    scales=st.tuples(st.floats(0.01, 4), st.floats(0.01, 4)),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**16),
)
def test_attention_is_that_of_what_is_meant(
    tokens, shape, page_tokens, dtype, window, softcap, scales, version, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head_dim, group = shape
    case = stored(generator, tokens, head_dim=head_dim, page_tokens=page_tokens, scales=scales)
    rows = torch.randint(0, tokens, (min(tokens, 9),), generator=generator).int()
    q = torch.randn(len(rows), 2 * group, head_dim, generator=generator).to(dtype)
    chosen = case.settings(window=window, softcap=softcap)
    mask = causal_mask(rows, tokens, window)
    wanted, lse, weights = dense_attention(q, case.k, case.v, mask, chosen["scale"], softcap)
    got, got_lse = version.attend_prefill(q, rows, case.entries, case.pages, 0, **chosen)
    near(got, wanted, dtype)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-4, atol=1e-4)
    mass = version.score_tokens(q, rows, case.entries, case.pages, 0, **chosen)
    torch.testing.assert_close(mass.double(), weights.sum((0, 1)), rtol=2e-4, atol=2e-5)
    # The same rows as a batch of decode steps.
    entries = np.concatenate([case.entries] * len(rows))
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * len(case.entries)
    got, got_lse = version.attend_decode(
        q, rows, entries, case.pages, 0, entry_offsets=offsets, **chosen
    )
    near(got, wanted, dtype)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_pages_are_shared_at_other_positions(generator, version, dtype, head_dim, pairing) -> None:
    """A key of an entry with delta is turned by it; only q is rounded, never the key again."""
    case = stored(generator, 100, head_dim=head_dim)
    deltas = np.array([[0, -20, 7000, 3][i % 4] for i in range(len(case.entries))], np.int32)
    entries = case.entries.copy()
    entries[:, 4] = deltas
    rope = rope_table(1, head_dim, pairing)
    turn = torch.from_numpy(deltas.repeat(16)[:100])
    k = rotated(case.k, torch.from_numpy(rope.inv_freq)[0], turn, pairing)
    rows = np.array([99, 41, 64], np.int32)
    q = torch.randn(3, 8, head_dim, generator=generator).to(dtype)
    mask = causal_mask(torch.from_numpy(rows), 100)
    wanted, lse, weights = dense_attention(q, k, case.v, mask, head_dim**-0.5)
    chosen = case.settings(rope=rope)
    slack = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for op, more in (
        (version.attend_prefill, {}),
        (version.attend_decode, {"entry_offsets": np.arange(4, dtype=np.int32) * len(entries)}),
    ):
        table = np.concatenate([entries] * 3) if more else entries
        out, got = op(q, rows, table, case.pages, 0, **chosen, **more)
        near(out, wanted, dtype)
        torch.testing.assert_close(got.double(), lse, rtol=slack, atol=slack)
    mass = version.score_tokens(q, rows, entries, case.pages, 0, **chosen)
    torch.testing.assert_close(mass.double(), weights.sum((0, 1)), rtol=slack, atol=slack)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ROWS)
def test_heads_with_a_reach(generator, version, dtype) -> None:
    """Tables, windows and sinks do not ask what the cache holds; strided q is read where it is."""
    case = stored(generator, 200, head_dim=128)
    reach = ops.Reach(2, np.array([[0, 0, 0, 0], [1, 1, 48, 5]], np.int32))
    tables = np.concatenate([case.entries, case.entries])
    offsets = np.array([0, len(case.entries), len(tables)], np.int32)
    rows = torch.tensor([199, 150], dtype=torch.int32)
    q = torch.randn(2, 8, 2 * 128, generator=generator).to(dtype)[..., 128:]
    full, local = causal_mask(rows, 200), causal_mask(rows, 200, 48)
    local |= torch.arange(200) < 5
    parts = [
        dense_attention(
            q[:, 4 * g : 4 * g + 4], case.k[:, g : g + 1], case.v[:, g : g + 1], mask, 0.1
        )
        for g, mask in ((0, full), (1, local))
    ]
    wanted = torch.cat([out for out, _, _ in parts], 1)
    chosen = case.settings(scale=0.1, reach=reach, entry_offsets=offsets)
    out, _ = version.attend_prefill(q, rows.numpy(), tables, case.pages, 0, **chosen)
    near(out, wanted, dtype)
    twice = {"entry_offsets": np.array([0, 13, 26, 39, 52], np.int32)}
    out, _ = version.attend_decode(
        q, rows.numpy(), np.concatenate([tables] * 2), case.pages, 0, **{**chosen, **twice}
    )
    near(out, wanted, dtype)
    mass = version.score_tokens(q, rows.numpy(), tables, case.pages, 0, **chosen)
    weights = sum(part.sum((0, 1)) for _, _, part in parts)
    torch.testing.assert_close(mass.double(), weights, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_bytes_are_copied_and_turned_keys_rounded_once_more(generator, version) -> None:
    bits = torch.randint(0, 256, (8, 2, 16, 64), generator=generator, dtype=torch.uint8)
    rope = rope_table(1, 64)
    pages = bits.clone().view(FP8)
    version.copy_rerotate(pages, np.array([[2, 3, 4, 5, 9, 0]], np.int32), rope, kv_heads=2)
    wanted = bits.clone()
    wanted[4:6, :, 5:14] = bits[2:4, :, 3:12]
    assert torch.equal(pages.view(torch.uint8), wanted), "NaN and -0 too"

    bits &= 0xFE  # no NaN
    bits[2, 0, 3] = torch.tensor([LARGEST, SIGN | LARGEST]).repeat_interleave(32)
    pages = bits.clone().view(FP8)
    version.copy_rerotate(pages, np.array([[2, 0, 6, 0, 16, 77]], np.int32), rope, kv_heads=2)
    turn = torch.full((2,), 77)
    keys = bits[2:4, 0].view(FP8).double()
    turned = rotated(keys, torch.from_numpy(rope.inv_freq)[0], turn)
    got, exact = bits_of(pages[6:8, 0]), nearest(turned)
    # Two f32 products may end on the other side of a tie.
    assert (got != exact).sum() <= 2
    assert ((got.int() & NAN) - (exact.int() & NAN)).abs().max() <= 1
    assert torch.equal(pages[6:8, 1].view(torch.uint8), bits[2:4, 1])
    assert torch.equal(pages[:6].view(torch.uint8), bits[:6])
    assert ((turned.abs() > 464) & (got & NAN == LARGEST)).any(), "some turns saturate"


@pytest.mark.parametrize("version", VERSIONS)
def test_bounds_are_of_what_is_meant(generator, version) -> None:
    k = 3 * torch.randn(20, 2, 64, generator=generator)
    k[7, 1, 5] = torch.nan
    pages, values = torch.zeros(10, 2, 16, 64).to(FP8), torch.full((10, 3, 64), -9.0)
    slots = np.array([[2, i] for i in range(16)] + [[6, i] for i in range(4)], np.int32)
    held = np.array([[2, 0, 16], [6, 1, 4]], np.int32)
    bounds = ops.PageBounds(values, held)
    version.write_pages(pages, 0, k, k, slots, bounds=bounds, kv_scales=SCALES)
    for block, begin, end in held:
        keys = pages[block : block + 2, 0, begin:end].double() * torch.tensor(SCALES[0]).double()
        wanted = torch.stack([keys.amin(1), keys.amax(1), keys.mean(1)], 1).float()
        torch.testing.assert_close(
            values[block : block + 2], wanted, rtol=0, atol=2e-7, equal_nan=True
        )
        assert torch.equal(values[block : block + 2, :2].isnan(), wanted[:, :2].isnan())
    assert (values[[0, 1, 4, 5, 8, 9]] == -9).all()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_reach_those_who_read_them(generator, version, byte) -> None:
    case = stored(generator, 60, head_dim=128)
    block, slot = (int(x) for x in case.slots[30])
    rows = np.array([29, 30, 59], np.int32)
    for part in (0, 1):
        pages = case.pages.clone()
        pages.view(torch.uint8)[block, part, slot, 5] = byte
        q = torch.randn(3, 4, 128, generator=generator)
        out, lse = version.attend_prefill(q, rows, case.entries, pages, 0, **case.settings())
        hit = out[1:, :2] if part == 0 else out[1:, :2, 5]
        assert hit.isnan().all()
        assert out[0].isfinite().all()
        assert out[:, 2:].isfinite().all(), "the other KV head"
        assert torch.equal(lse[1:, :2].isnan().all(), torch.tensor(part == 0))
        for dtype in (torch.bfloat16, torch.float16):
            entries = np.concatenate([case.entries[:1], case.entries])
            offsets = np.array([0, 1, len(entries)], np.int32)
            out, _ = version.attend_decode(
                q[:2].to(dtype), np.array([15, 59], np.int32), entries, pages, 0,
                entry_offsets=offsets, **case.settings(),
            )  # fmt: skip
            assert out[0].isfinite().all(), "another request"
            assert (out[1, :2] if part == 0 else out[1, :2, 5]).isnan().all()


@pytest.mark.parametrize("version", VERSIONS)
def test_what_kernels_do_not_read_may_be_anything(generator, version) -> None:
    """Unused slots are NaN; every number is read as itself, whichever kernel reads it."""
    for head_dim in (64, 96, 128, 256):
        pages = torch.full((3, 2, 16, head_dim), NAN, dtype=torch.uint8)
        entries, row = np.array([[1, 3, 4, 0, 0]], np.int32), np.zeros(1, np.int32)
        pages[1, 0, 3] = SIGN  # the key is -0
        settings = {"kv_heads": 1, "scale": 1.0, "rope": rope_table(1, head_dim)}
        for first in range(0, 256, head_dim):
            bits = (torch.arange(head_dim) + first).clamp(max=255).to(torch.uint8)
            bits[bits & NAN == NAN] = 0
            pages[1, 1, 3] = bits
            wanted = bits.view(FP8).float()
            for dtype in ROWS:
                q, cache = torch.ones(1, 8, head_dim, dtype=dtype), pages.view(FP8)
                out, lse = version.attend_prefill(q, row, entries, cache, 0, **settings)
                assert (out.float() == wanted).all()
                assert (lse == 0).all()
                offsets = np.array([0, 1], np.int32)
                out, lse = version.attend_decode(
                    q, row, entries, cache, 0, entry_offsets=offsets, **settings
                )
                assert (out.float() == wanted).all()
                assert (lse == 0).all()


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_scales_are_above_0_and_finite(generator, version, wrong) -> None:
    case = stored(generator, 20)
    before = case.pages.clone()
    q, rows = torch.zeros(2, 4, 64), np.array([3, 19], np.int32)
    for what, scales in (("key", (wrong, 1.0)), ("value", (1.0, wrong))):
        chosen = case.settings(kv_scales=scales)
        words = f"{what} scale: expected a finite number above 0"
        with pytest.raises(InvalidArgument, match=words):
            version.attend_prefill(q, rows, case.entries, case.pages, 0, **chosen)
        with pytest.raises(InvalidArgument, match=words):
            version.score_tokens(q, rows, case.entries, case.pages, 0, **chosen)
        k = torch.zeros(20, 2, 64)
        with pytest.raises(InvalidArgument, match=words):
            version.write_pages(case.pages, 0, k, k, case.slots, kv_scales=scales)
    assert torch.equal(case.pages.view(torch.uint8), before.view(torch.uint8))
    chosen = case.settings(scale=1e30, kv_scales=(1e30, 1.0))
    with pytest.raises(InvalidArgument, match="scale · key scale"):
        version.attend_prefill(q, rows, case.entries, case.pages, 0, **chosen)


@pytest.mark.parametrize("version", VERSIONS)
def test_scales_are_for_fp8_caches(generator, version) -> None:
    case = stored(generator, 20)
    pages = case.pages.float()
    q, rows = torch.zeros(2, 4, 64), np.array([3, 19], np.int32)
    with pytest.raises(InvalidArgument, match="scales: expected none beside a cache that is not"):
        version.attend_prefill(q, rows, case.entries, pages, 0, **case.settings())
    k = torch.zeros(20, 2, 64)
    with pytest.raises(InvalidArgument, match="scales: expected none beside a cache that is not"):
        version.write_pages(pages, 0, k, k, case.slots, kv_scales=SCALES)
    ones = case.settings(kv_scales=(1.0, 1.0))
    assert version.attend_prefill(q, rows, case.entries, pages, 0, **ones)


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_are_of_wider_numbers(generator, version) -> None:
    case = stored(generator, 20)
    rows = np.array([3, 19], np.int32)
    allowed = "expected float32, bfloat16 or float16, got"
    for wrong in (torch.float64, FP8):
        q = torch.zeros(2, 4, 64).to(wrong)
        with pytest.raises(InvalidArgument, match=f"q: {allowed}"):
            version.attend_prefill(q, rows, case.entries, case.pages, 0, **case.settings())
        k = torch.zeros(20, 2, 64).to(wrong)
        with pytest.raises(InvalidArgument, match=f"k: {allowed}"):
            version.write_pages(case.pages, 0, k, k, case.slots)
    k = torch.zeros(20, 2, 64)
    with pytest.raises(InvalidArgument, match="v: expected float32, got bfloat16"):
        version.write_pages(case.pages, 0, k, k.bfloat16(), case.slots)
    out, q = torch.zeros(2, 4, 64), torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="out: expected bfloat16, got float32"):
        version.attend_prefill(q, rows, case.entries, case.pages, 0, out=out, **case.settings())
    strided = torch.zeros(8, 2, 16, 128).to(FP8)[..., ::2]
    with pytest.raises(InvalidArgument, match="cache: expected C-contiguous strides"):
        version.attend_prefill(q, rows, case.entries, strided, 0, **case.settings())
    outs = torch.zeros(2, 2, 4, 64).to(FP8)
    with pytest.raises(InvalidArgument, match=f"outs: {allowed}"):
        version.merge_states(outs, torch.zeros(2, 2, 4))


def test_shapes_count_one_byte_an_element() -> None:
    small, wide = (kvweave.KvShape(4, 2, 64, 16, dtype) for dtype in ("fp8_e4m3", torch.bfloat16))
    assert small == kvweave.KvShape(4, 2, 64, 16, FP8)
    assert small.dtype == "fp8_e4m3"
    assert 2 * small.page_bytes == wide.page_bytes
    assert 2 * small.token_bytes == wide.token_bytes
    mine = torch.zeros(40, 2, 16, 64).to(FP8)
    cache = kvweave.KvCache(small, external=mine)
    assert cache.arena is mine
    with pytest.raises(
        InvalidArgument, match="expected float8_e4m3fn, got uint8|expected a tensor"
    ):
        kvweave.KvCache(small, external=mine.view(torch.uint8))

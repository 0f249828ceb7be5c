"""Pages in a basis on CUDA, top-r and planes: sizes and bytes that tests on a host have not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basis_formats import plane_formats, top_r_formats
from kvweave import InvalidArgument, Unsupported, ops
from packed_texts import SCALES, Text, check_attention, drawn_bases, on_cuda, text_of
from paged import rope_table
from versions import CPU, CUDA, RUNNABLE, needs_cuda

pytestmark = needs_cuda

ON_CUDA = [version for version in RUNNABLE if version.device != "cpu"] or [None]
CLOSE = {"rtol": 2**-6, "atol": 2**-6}


SIZES = [64, 128], [16, 48, 64, 128]
FORMATS = plane_formats(*SIZES) | top_r_formats(*SIZES)
"""Any format in a basis that CUDA attends to."""


def rows_of(of: ops.PackedFormat) -> torch.dtype:
    """Of queries: numbers of bf16 meet those of bf16."""
    return torch.bfloat16 if of.numbers == "bf16" else SCALES[of.scales]


def tables(*rows: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.asarray(row, np.int32)).cuda() for row in rows]


def on_host(text: Text, q: torch.Tensor, entries: np.ndarray, position: int, heads: int):
    """What a row says of the entries on the host."""
    kv = ops.PackedKv(text.packed, 0, heads, 0.1, rope_table(1, q.shape[-1]))
    ends, at = np.array([0, len(entries)], np.int32), np.array([position], np.int32)
    return ops.attend_packed(q, at, entries, kv, entry_offsets=ends)


@settings(max_examples=200)
@given(
    of=FORMATS,
    heads=st.sampled_from([(2, 2), (4, 1), (2, 4), (1, 9), (3, 8)]),
    lengths=st.lists(st.integers(0, 900), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.floats(0.5, 50),
    delta=st.integers(-40, 40),
    version=st.sampled_from(ON_CUDA),
    seed=st.integers(0, 2**20),
)
def test_attending_on_cuda_is_unpacking_and_attending(
    of, heads, lengths, window, softcap, delta, version, seed
) -> None:
    """Each block of a text has one of two bases, and the second block has moved."""
    generator = torch.Generator().manual_seed(seed)
    check_attention(
        generator,
        of,
        *heads,
        lengths,
        version,
        dtype=rows_of(of),
        window=window,
        softcap=softcap,
        delta=delta,
        bases=drawn_bases(generator, of, heads[0]),
    )


@pytest.mark.parametrize("name", ["half-int4", "quarter-bf16", "planes-3"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bases", [1, 3])
def test_long_text_is_shared_out_and_put_together(generator, name, head_dim, bases) -> None:
    """Enough pages that many thread blocks have parts of a head, and more requests beside."""
    of = ops.packed_format(name, head_dim)
    check_attention(
        generator,
        of,
        2,
        4,
        [30_011, 1, 700],
        CUDA,
        dtype=torch.bfloat16,
        window=None,
        softcap=None,
        delta=7,
        bases=drawn_bases(generator, of, 2, bases),
    )


def test_bytes_of_any_kind_are_read_as_if_unpacked(generator) -> None:
    """Bitmaps with too many bits or none: nothing is read outside a page."""
    sizes = {"kept": 20, "group": 2, "channels": 44, "numbers": "int4"}
    of = ops.PackedFormat("top-r", 64, 16, **sizes)
    packed = ops.PackedPages.zeros(9, of, bases=drawn_bases(generator, of, 1))
    packed.data.random_(256, generator=generator)
    packed.data[5:] = 0xFF
    # A vector has 3 + 10 + 2 bytes; scales of .05 leave what is compared within bf16.
    scales = packed.data.unflatten(1, (2, 16 * 15))[..., 16 * 13 :].view(torch.bfloat16)
    scales.fill_(0.05)
    rows = np.array([[page, 0, 16, 16 * page - 16, 0] for page in range(1, 9)], np.int32)
    q = torch.randn(1, 2, 64, generator=generator).bfloat16()
    given = (np.array([127], np.int32), rows)
    offsets = np.array([0, 8], np.int32)
    kv = ops.PackedKv(packed, 0, 1, 0.125, rope_table(1, 64))
    wanted, of_lse = CPU.attend_packed(q, *given, kv, entry_offsets=offsets)
    out, lse = CUDA.attend_packed(q, *given, kv, entry_offsets=offsets)
    torch.testing.assert_close(out, wanted, **CLOSE)
    torch.testing.assert_close(lse, of_lse, **CLOSE)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("numbers", ["bf16", "fp8", "int4", "planes", "no planes"])
def test_nan_reaches_those_rows_alone_that_see_its_token(generator, numbers, side) -> None:
    if numbers in ("planes", "no planes"):
        of = ops.PackedFormat("planes", 64, 32, token_bytes=40)
    else:
        of = ops.PackedFormat("top-r", 64, 32, kept=32, numbers=numbers)
    bases = drawn_bases(generator, of, 2)
    if numbers == "no planes":
        bases[..., 1, :] = 0
    text = text_of(generator, 64, of=of, bases=bases)
    block = int(text.packs[0, 2])
    text.cache[block, side, 9, 3] = torch.nan
    ops.pack_pages(text.cache, text.packed, text.packs, pages=2)
    q = torch.randn(1, 4, 64, generator=generator).bfloat16()
    entries, offsets = tables(text.entries(), [0, 2])
    for window, position, odd in ((None, 8, False), (None, 9, True), (40, 63, False)):
        kv = ops.PackedKv(on_cuda(text.packed), 0, 2, 0.1, rope_table(1, 64), window)
        positions = tables([position])[0]
        out, lse = ops.attend_packed(q.cuda(), positions, entries, kv, entry_offsets=offsets)
        nan = out.isnan().cpu()
        assert bool(nan[:, :2].all()) is odd
        assert not nan[:, 2:].any()
        assert bool(lse.isnan()[:, :2].all()) is (odd and side == 0)
        assert lse[:, 2:].isfinite().all()


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_a_graph_attends_to_what_its_tables_say_then(generator, name) -> None:
    """Captured once; replayed over other pages, entries that point outside, and other bases."""
    of = ops.packed_format(name, 128)
    text = text_of(generator, 600, of=of, version=CPU, bases=drawn_bases(generator, of, 2))
    pages, rope = on_cuda(text.packed), rope_table(1, 128)
    q = torch.randn(1, 8, 128, generator=generator).bfloat16()
    held = text.entries()
    entries, offsets, positions = tables(held, [0, len(held)], [599])
    kv, space, asked = ops.PackedKv(pages, 0, 2, 0.1, rope), ops.Workspace("cuda"), q.cuda()

    def call() -> torch.Tensor:
        named = {"entry_offsets": offsets, "workspace": space}
        return ops.attend_packed(asked, positions, entries, kv, **named)[0]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for rows, position, unknown in ((held, 599, False), (held[::-1].copy(), 340, True)):
        rows[:, 3] = held[:, 3]
        changed = rows.copy()
        changed[3, 0] = 10_000
        entries.copy_(torch.from_numpy(changed))
        positions.fill_(position)
        left = np.delete(rows, 3, 0)
        if unknown:
            # A block with the number of no basis is one without tokens.
            pages.bases.of[int(left[0, 0])] = 2
            left = left[1:]
        graph.replay()
        wanted, _ = on_host(text, q, left, position, 2)
        torch.testing.assert_close(out.cpu(), wanted, **CLOSE)


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_a_call_has_the_same_bits_each_time(generator, name) -> None:
    of = ops.packed_format(name, 128)
    bases = drawn_bases(generator, of, 2)
    text = text_of(generator, 20_000, of=of, dtype=torch.bfloat16, version=CPU, bases=bases)
    entries, offsets, positions = tables(text.entries(), [0, len(text.packs)], [19_999])
    q = torch.randn(1, 8, 128, generator=generator).bfloat16().cuda()
    kv = ops.PackedKv(on_cuda(text.packed), 0, 2, 0.1, rope_table(1, 128))
    results = [
        ops.attend_packed(q, positions, entries, kv, entry_offsets=offsets) for _ in range(20)
    ]
    assert all(torch.equal(out, results[0][0]) for out, _ in results)
    assert all(torch.equal(lse, results[0][1]) for _, lse in results)


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_a_row_without_a_basis_is_skipped_and_refused_where_it_is_known(generator, name) -> None:
    of = ops.packed_format(name, 64)
    bases = drawn_bases(generator, of, 2)
    text = text_of(generator, 128, of=of, bases=bases)
    text.packed.data.fill_(0x5A)
    pages, cache = on_cuda(text.packed), text.cache.cuda()
    first, second = (int(block) for block in text.packs[:, 0])
    pages.bases.of[first] = 2
    ops.pack_pages(cache, pages, tables(text.packs)[0], pages=2)
    data = pages.data.cpu()
    assert (data[first : first + 2] == 0x5A).all()
    ops.pack_pages(text.cache, text.packed, text.packs, pages=2)
    assert torch.equal(data[second : second + 2], text.packed.data[second : second + 2])
    known = ops.PackedPages(pages.data, of, ops.PackedBases(bases.cuda(), pages.bases.of.cpu()))
    kv = ops.PackedKv(known, 0, 2, 0.1, rope_table(1, 64))
    q = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device="cuda")
    at, ends = np.array([127], np.int32), np.array([0, 2], np.int32)
    with pytest.raises(InvalidArgument, match="basis of a packed block: expected a basis from 0"):
        ops.pack_pages(cache, known, text.packs, pages=2)
    with pytest.raises(InvalidArgument, match="basis of a packed block: expected a basis from 0"):
        ops.attend_packed(q, at, text.entries(), kv, entry_offsets=ends)


@pytest.mark.parametrize("bits", [8.0, 3.0, torch.nan])
def test_a_basis_whose_bits_are_no_planes_is_none(generator, bits) -> None:
    """Nobody looks at bases on a device before a kernel does."""
    of = ops.packed_format("planes-3", 64)
    text = text_of(generator, 192, of=of, bases=drawn_bases(generator, of, 2), version=CPU)
    text.packed.bases.of[:] = 0
    odd, entries = int(text.packs[1, 0]), text.entries()
    text.packed.bases.of[odd] = 1
    ops.pack_pages(text.cache, text.packed, text.packs, pages=2)
    pages = on_cuda(text.packed)
    pages.bases.data[1, :, 0, 1] = bits
    kv, q = ops.PackedKv(pages, 0, 2, 0.1, rope_table(1, 64)), torch.randn(1, 4, 64).bfloat16()
    positions, rows, offsets = tables([191], entries, [0, 3])
    out, _ = ops.attend_packed(q.cuda(), positions, rows, kv, entry_offsets=offsets)
    wanted, _ = on_host(text, q, np.delete(entries, 1, 0), 191, 2)
    torch.testing.assert_close(out.cpu(), wanted, **CLOSE)
    pages.data.fill_(0x5A)
    ops.pack_pages(text.cache.cuda(), pages, tables(text.packs)[0], pages=2)
    made = pages.data.cpu()
    assert (made[odd : odd + 2] == 0x5A).all()
    others = [int(block) for block in text.packs[[0, 2], 0]]
    assert all(torch.equal(made[b : b + 2], text.packed.data[b : b + 2]) for b in others)


@pytest.mark.parametrize(
    ("head_dim", "sizes", "dtype", "message"),
    [
        (96, {"numbers": "int4"}, torch.bfloat16, "head_dim: expected 64 or 128"),
        (64, {"numbers": "int4"}, torch.float16, "q: expected bf16, as scales are"),
        (64, {"numbers": "bf16"}, torch.float16, "q: expected bf16, as numbers are"),
        (128, {"numbers": "bf16", "page_tokens": 256, "kept": 128}, torch.bfloat16, "page_tokens"),
    ],
)
def test_what_cuda_does_not_do_is_said(generator, head_dim, sizes, dtype, message) -> None:
    of = ops.PackedFormat("top-r", head_dim, **{"kept": 32, **sizes})
    packed = ops.PackedPages.zeros(3, of, "cuda", bases=drawn_bases(generator, of, 2))
    kv = ops.PackedKv(packed, 0, 2, 1.0, rope_table(1, head_dim))
    q = torch.zeros(1, 4, head_dim, dtype=dtype, device="cuda")
    given = (np.array([15], np.int32), np.array([[1, 0, 16, 0, 0]], np.int32))
    with pytest.raises(Unsupported, match=message):
        ops.attend_packed(q, *given, kv, entry_offsets=np.array([0, 1], np.int32))


def test_pages_without_their_bases_are_refused(generator) -> None:
    of = ops.packed_format("half-int4", 64)
    packed = ops.PackedPages.zeros(3, of, "cuda", bases=drawn_bases(generator, of, 2))
    cache, packs = (
        torch.zeros(9, 2, 16, 64, device="cuda"),
        np.array([[1, 9, 1, 3, 5, 7]], np.int32),
    )
    for bases, message in (
        (None, "bases: expected some"),
        (ops.PackedBases(packed.bases.data.double(), packed.bases.of), "bases: expected float32"),
        (ops.PackedBases(packed.bases.data.cpu(), packed.bases.of), "bases: expected"),
        (ops.PackedBases(packed.bases.data, packed.bases.of[1:]), "basis of each packed page"),
    ):
        given = ops.PackedPages(packed.data, of, bases)
        with pytest.raises(InvalidArgument, match=message):
            ops.pack_pages(cache, given, packs, pages=2)
    plain = ops.PackedPages(packed.data, ops.PackedFormat("int4", 64), packed.bases)
    with pytest.raises(InvalidArgument):
        ops.pack_pages(cache, plain, packs, pages=2)

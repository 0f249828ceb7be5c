"""What pages lose by being packed: beside pages that are packed, unpacked and compared in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from versions import CPU, REFERENCE, Version

DIM, PAGES, SLOTS, PACKED = 64, 3, 16, 32
FORMATS = [
    *(ops.packed_format(name, DIM, PACKED) for name in ("int4", "int8", "half-int4", "planes-3")),
    ops.PackedFormat("top-r", DIM, PACKED, kept=16, group=2, channels=48, numbers="fp8"),
]
VERSIONS = pytest.mark.parametrize("version", [CPU, REFERENCE], ids=lambda version: version.name)


def pages_of(seed: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """Exact pages, and packs of all of them in any order."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // PACKED)
    cache = torch.randn(1 + 2 * blocks * PAGES, 2, SLOTS, DIM, generator=generator).to(dtype)
    order = torch.randperm(2 * blocks, generator=generator).view(-1, 2).numpy()
    packs = np.zeros((blocks, 4), np.int32)
    packs[:, 0] = 1 + PAGES * np.arange(blocks)
    packs[:, 1] = [min(PACKED, tokens - PACKED * at) for at in range(blocks)]
    packs[:, 2:] = 1 + PAGES * order
    packs[packs[:, 1] <= SLOTS, 3] = 0
    return cache, packs


def basis_of(of: ops.PackedFormat, cache: torch.Tensor, packs: np.ndarray) -> torch.Tensor | None:
    if of.basis_rows is None:
        return None
    moments = ops.Moments(of, PAGES)
    moments.add(cache, packs)
    return torch.from_numpy(moments.basis())


def defined(
    cache: torch.Tensor,
    packs: np.ndarray,
    of: ops.PackedFormat,
    basis: torch.Tensor | None,
    roots: torch.Tensor | None,
    left_out: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of all pages, and their packed bytes."""
    bases = None if basis is None else basis[None]
    packed = ops.PackedPages.zeros(1 + PAGES * len(packs), of, bases=bases)
    ops.pack_pages(cache, packed, packs, pages=PAGES)
    back = torch.zeros_like(cache)
    ops.unpack_pages(packed, back, packs, pages=PAGES)
    sums = torch.zeros(2, PAGES, 2, dtype=torch.float64)
    for number, (_, tokens, *sources) in enumerate(packs.tolist()):
        for token in range(0 if number else left_out, tokens):
            page = slice(sources[token // SLOTS], sources[token // SLOTS] + PAGES)
            exact = cache[page, :, token % SLOTS].double()
            error = back[page, :, token % SLOTS].double() - exact
            if roots is not None:
                error[:, 0] = torch.einsum("pd,pde->pe", error[:, 0], roots)
            sums += torch.stack((error.square().sum(-1), exact.square().sum(-1)))
    return sums, packed.data[1:].view(len(packs), PAGES, -1)


@VERSIONS
@given(
    of=st.sampled_from(FORMATS),
    tokens=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ranks=st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=4),
    turned=st.booleans(),
    left_out=st.integers(0, 40),
    seed=st.integers(0, 2**20),
)
def test_losses_and_bytes_are_those_of_pages_that_were_packed(
    version: Version, of, tokens, dtype, ranks, turned, left_out, seed
) -> None:
    cache, packs = pages_of(seed, tokens, dtype)
    basis = basis_of(of, cache, packs)
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(PAGES, DIM, DIM, generator=generator).double() if turned else None
    sums, data = defined(cache, packs, of, basis, roots, left_out)
    some = torch.tensor(ranks)
    given_ = {
        "ranks": np.asarray(ranks, np.int32),
        "basis": None if basis is None else basis[some],
        "roots": None if roots is None else roots[some],
    }
    packed = torch.full((len(packs), len(ranks), of.page_bytes), 0x5A, dtype=torch.uint8)
    for into in (packed, None):
        got = version.pack_losses(
            cache, packs, of, pages=PAGES, left_out=left_out, packed=into, **given_
        )
        torch.testing.assert_close(got, sums[:, some], rtol=1e-9, atol=1e-12)
    assert torch.equal(packed, data[:, some])


@VERSIONS
def test_what_is_not_finite_is_lost_in_its_page_alone(version: Version) -> None:
    for of in FORMATS:
        cache, packs = pages_of(5, 90, torch.float32)
        basis = basis_of(of, cache, packs)
        cache[packs[1, 2] + 1, 0, 3, 7] = torch.nan
        cache[packs[2, 2] + 2, 1, 5, 9] = torch.inf
        lost, _ = version.pack_losses(cache, packs, of, pages=PAGES, basis=basis)
        odd = [[False, False], [True, False], [False, True]]
        assert torch.equal(lost.isnan(), torch.tensor(odd)), of


@VERSIONS
def test_nothing_to_pack_loses_nothing(version: Version) -> None:
    cache, packs = pages_of(6, 40, torch.bfloat16)
    for of in FORMATS:
        basis = basis_of(of, cache, packs)
        known: dict[str, Any] = {"pages": PAGES, "basis": basis}
        assert not version.pack_losses(cache, packs[:0], of, **known).any()
        beyond = version.pack_losses(cache, packs[:1], of, left_out=PACKED, **known)
        assert not beyond.any()


def test_pages_need_not_be_packed_where_they_lie() -> None:
    """Packed blocks count for nothing, whatever their numbers."""
    cache, packs = pages_of(7, 70, torch.float32)
    other = packs.copy()
    other[:, 0] = [-5, 0, 2**31 - 1]
    sums = [ops.pack_losses(cache, each, FORMATS[0], pages=PAGES) for each in (packs, other)]
    assert torch.equal(*sums)


CACHE, PACKS = pages_of(8, 64, torch.float32)
INT4, HALF = FORMATS[0], FORMATS[2]
BASIS = basis_of(HALF, CACHE, PACKS)
assert BASIS is not None
ROOM = torch.zeros(2, PAGES, INT4.page_bytes, dtype=torch.uint8)


@VERSIONS
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": np.asarray([3], np.int32)}, "ranks: expected pages from 0 to below 3, got 3"),
        ({"ranks": np.asarray([-1], np.int32)}, "ranks: expected pages from 0"),
        ({"ranks": np.zeros(0, np.int32)}, "ranks: expected a page at least, got 0"),
        ({"ranks": np.asarray([0])}, "ranks: expected int32"),
        ({"pages": -1}, "pages: expected"),
        ({"pages": 2**20}, "block: expected a block within"),
        ({"left_out": -1}, "left_out: expected"),
        ({"basis": BASIS}, "bases: expected"),
        ({"of": HALF}, "bases: expected"),
        ({"of": HALF, "basis": BASIS[:2]}, "basis: expected shape"),
        ({"of": HALF, "basis": BASIS.double()}, "basis: expected float32"),
        ({"of": HALF, "basis": BASIS.transpose(0, 1)}, "basis: expected"),
        ({"roots": torch.zeros(PAGES, DIM, DIM)}, "roots: expected float64"),
        ({"roots": torch.zeros(PAGES, DIM, 9).double()}, "roots: expected shape"),
        ({"packed": ROOM[:1]}, "packed pages: expected shape"),
        ({"packed": ROOM.float()}, "packed pages: expected uint8"),
        ({"packed": ROOM.numpy()}, "packed pages: expected a tensor of torch"),
        ({"packs": PACKS[:, :3].copy()}, "packs: expected shape"),
        ({"packs": PACKS[0]}, "packs: expected rows"),
        ({"packs": PACKS * np.asarray([1, 0, 1, 1], np.int32)}, "tokens of a packed block"),
        ({"packs": PACKS * np.asarray([1, 1, 99, 1], np.int32)}, "block: expected a block within"),
        ({"cache": CACHE.to(torch.float8_e4m3fn)}, "cache: expected float32"),
        ({"cache": CACHE[..., ::2]}, "cache: expected"),
        ({"backend": "cuda"}, "backend: expected cpu"),
    ],
)
def test_what_does_not_belong_together_is_refused(version: Version, changed, message) -> None:
    given_ = {"cache": CACHE, "packs": PACKS, "of": INT4, "pages": PAGES, "packed": ROOM}
    given_ |= {"packed": None} if {"of", "ranks", "pages"} & changed.keys() else {}
    given_ |= {"backend": version.backend} | changed
    first = [given_.pop(name) for name in ("cache", "packs", "of")]
    with pytest.raises(InvalidArgument, match=message):
        ops.pack_losses(*first, **given_)
    assert not ROOM.any(), "nothing is written"


def test_memory_that_is_read_is_not_written() -> None:
    bytes_of = CACHE.view(-1).view(torch.uint8)[: ROOM.numel()].view(ROOM.shape)
    with pytest.raises(InvalidArgument, match="packed pages: expected memory of its own"):
        ops.pack_losses(CACHE, PACKS, INT4, pages=PAGES, packed=bytes_of)

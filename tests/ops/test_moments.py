"""Bases of texts against numpy's own eigenvectors of numpy's own covariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from packed_texts import read_back, text_of
from versions import CPU

OF = ops.PackedFormat("top-r", 64, 32, kept=16, channels=40)


def check_basis(part: np.ndarray, x: torch.Tensor, centred: bool) -> None:
    """A basis [C + 1, D] holds the mean and the directions of the largest spread of x [T, D]."""
    rows = x.double().numpy()
    mean = rows.mean(0) if centred else np.zeros(rows.shape[1])
    np.testing.assert_allclose(part[0], mean, atol=1e-5)
    directions = part[1:].astype(np.float64)
    np.testing.assert_allclose(directions @ directions.T, np.eye(len(directions)), atol=1e-5)
    spread = (rows - mean).T @ (rows - mean) / len(rows)
    largest = np.linalg.eigvalsh(spread)[::-1][: len(directions)]
    along = np.einsum("cd,de,ce->c", directions, spread, directions)
    np.testing.assert_allclose(along, largest, rtol=1e-4, atol=1e-5 * largest[0])


@settings(max_examples=25)
@given(
    tokens=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    centred=st.booleans(),
    page_tokens=st.sampled_from([1, 16, 32]),
    seed=st.integers(0, 2**20),
)
def test_a_basis_is_the_mean_and_the_largest_spread(
    tokens, dtype, centred, page_tokens, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = text_of(generator, tokens, of=OF, dtype=dtype, page_tokens=page_tokens)
    moments = ops.Moments(OF, 2)
    for row in text.packs:
        moments.add(text.cache, row[None])
    assert (moments.tokens, moments.left_out) == (tokens, 0)
    basis = moments.basis(centred=centred)
    assert basis.shape == (2, 2, 41, 64)
    assert basis.dtype == np.float32
    for side, exact in enumerate((text.k, text.v)):
        for page in range(2):
            check_basis(basis[page, side], exact[:, page], centred)


def test_tokens_at_once_and_one_by_one_are_the_same_bits(generator) -> None:
    text = text_of(generator, 70, of=OF)
    whole, parts = ops.Moments(OF, 2), ops.Moments(OF, 2)
    whole.add(text.cache, text.packs)
    for row in text.packs:
        parts.add(text.cache, row[None])
    assert np.array_equal(whole.basis(), parts.basis())


def test_a_text_of_low_rank_is_kept_whole(generator) -> None:
    """Eight directions and a mean: eight numbers a vector are all there is."""
    of = ops.PackedFormat("top-r", 64, 32, kept=8)
    text = text_of(generator, 96, of=of)
    low = torch.randn(8, 64, generator=generator)
    text.cache.copy_(torch.randn(*text.cache.shape[:-1], 8, generator=generator) @ low + 5.0)
    moments = ops.Moments(of, 2)
    moments.add(text.cache, text.packs)
    bases = torch.from_numpy(moments.basis())[None]
    packed = ops.PackedPages.zeros(len(text.packed.data), of, bases=bases)
    CPU.pack_pages(text.cache, packed, text.packs, pages=2)
    text.packed = packed
    k, v = read_back(text, CPU)
    first = int(text.packs[0, 2])
    near = {"rtol": 2**-7, "atol": 0.1}
    torch.testing.assert_close(k[:16, 0], text.cache[first, 0], **near)
    torch.testing.assert_close(v[:16, 1], text.cache[first + 1, 1], **near)


def test_constant_nothing_and_huge_have_bases(generator) -> None:
    for number in (0.0, 2.5, -3e38):
        moments = ops.Moments(OF, 2)
        if number:
            packs = np.array([[1, 32, 1, 3]], np.int32)
            moments.add(torch.full((5, 2, 16, 64), number), packs)
        basis = moments.basis()
        np.testing.assert_allclose(basis[:, :, 0], number, rtol=1e-6)
        for directions in basis[:, :, 1:].reshape(-1, 40, 64).astype(np.float64):
            np.testing.assert_allclose(directions @ directions.T, np.eye(40), atol=1e-5)


def test_what_is_not_finite_is_left_out(generator) -> None:
    text = text_of(generator, 64, of=OF)
    first = int(text.packs[0, 2])
    text.cache[first, 0, 3, 9] = torch.nan
    text.cache[first + 1, 1, 15, 0] = -torch.inf
    moments = ops.Moments(OF, 2)
    moments.add(text.cache, text.packs)
    assert (moments.tokens, moments.left_out) == (64, 2)
    basis = moments.basis()
    assert np.isfinite(basis).all()
    check_basis(basis[0, 0], torch.cat((text.k[:3, 0], text.k[4:, 0])), centred=True)
    check_basis(basis[1, 0], text.k[:, 1], centred=True)


@pytest.mark.parametrize(
    ("cache", "packs", "message"),
    [
        (torch.zeros(5, 2, 16, 64), [[1, 32, 1, 5]], "block: expected a block within"),
        (torch.zeros(5, 2, 16, 64), [[1, 33, 1, 3]], "tokens of a packed block"),
        (torch.zeros(5, 2, 16, 64), [[1, 32, 1]], "packs: expected shape"),
        (torch.zeros(5, 2, 24, 64), [[1, 32, 1]], "page_tokens: expected a divisor of 32"),
        (torch.zeros(5, 2, 16, 32), [[1, 32, 1, 3]], "cache: expected shape"),
        (torch.zeros(5, 2, 16, 64).to(torch.float8_e4m3fn), [[1, 32, 1, 3]], "cache: expected"),
    ],
)
def test_what_cannot_be_taken_in_is_refused(cache, packs, message) -> None:
    moments = ops.Moments(OF, 2)
    with pytest.raises(InvalidArgument, match=message):
        moments.add(cache, np.array(packs, np.int32))
    assert moments.tokens == 0

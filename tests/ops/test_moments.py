"""Bases of texts against numpy's own eigenvectors of numpy's own covariances."""

from __future__ import annotations

import itertools

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


@pytest.mark.parametrize("centred", [True, False])
def test_a_basis_that_is_not_rotated_has_the_axes(generator, centred) -> None:
    """In the order of their spread; planes have the steps of these channels."""
    planes = ops.PackedFormat("planes", 64, 32, token_bytes=32)
    text = text_of(generator, 40, of=OF)
    for of in (OF, planes):
        moments = ops.Moments(of, 2)
        moments.add(text.cache, text.packs)
        moments.add_queries(torch.randn(9, 2, 64, generator=generator), first=0, kv_heads=2)
        basis = moments.basis(centred=centred, rotated=False)
        for side, exact in enumerate((text.k, text.v)):
            for page in range(2):
                rows = exact[:, page].numpy()
                mean = rows.mean(0) if centred else np.zeros(64)
                spread = np.square(rows - mean).mean(0)
                np.testing.assert_allclose(basis[page, side, 0], mean, atol=1e-5)
                lines = basis[page, side, 2:66] if of is planes else basis[page, side, 1:]
                used = lines[np.abs(lines).max(-1) > 0]
                assert ((used != 0).sum(-1) == 1).all()
                axes = np.abs(used).argmax(-1)
                assert len(set(axes)) == len(axes)
                if of is OF:
                    np.testing.assert_array_equal(used, np.eye(64)[axes])
                    np.testing.assert_array_equal(axes, np.argsort(-spread)[:40])


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


PLANES = ops.PackedFormat("planes", 16, 32, token_bytes=10)
LOST = {8: 1.0e-4, 4: 0.01154, 2: 0.1188, 0: 1.0}
STEP = {8: 0.0308, 4: 0.3352, 2: 0.9957, 0: 0.0}


def least_loss(keys: np.ndarray, values: np.ndarray, size: int) -> float:
    """What channels of such weights lose at least in so many bytes, by trying all of it."""
    choices = list(itertools.product((0, 2, 4, 8), repeat=4))
    bits = np.array([c for c in choices if list(c) == sorted(c, reverse=True)])
    lost = np.vectorize(LOST.get)(bits.repeat(4, 1))
    both = (lost @ keys)[:, None] + (lost @ values)[None]
    return both[(bits.sum(1)[:, None] + bits.sum(1)) * 4 <= 8 * size].min()


@pytest.mark.parametrize("queries", [True, False])
@pytest.mark.parametrize("size", [1, 5, 10, 32])
def test_planes_are_shared_out_where_they_lose_least(generator, size, queries) -> None:
    """Against numpy's own eigenvectors, and all divisions of the bytes."""
    of = ops.PackedFormat("planes", 16, 32, token_bytes=size)
    text = text_of(generator, 150, of=of, dtype=torch.float32)
    moments = ops.Moments(of, 2)
    moments.add(text.cache, text.packs)
    metric = np.eye(16)[None].repeat(2, 0)
    if queries:
        q = torch.randn(70, 6, 16, generator=generator) * torch.logspace(-1, 1, 16)
        for rows in q.split(40):
            moments.add_queries(rows.contiguous(), first=0, kv_heads=2)
        wide = q.double().numpy().reshape(70, 2, 3, 16).transpose(1, 0, 2, 3).reshape(2, -1, 16)
        metric = np.einsum("gnd,gne->gde", wide, wide) / wide.shape[1]
        metric += 0.01 * np.trace(metric, axis1=1, axis2=2)[:, None, None] / 16 * np.eye(16)
        np.testing.assert_allclose(moments.metric, metric, rtol=1e-6)
    else:
        assert moments.metric is None
    basis = moments.basis().astype(np.float64)
    assert basis.shape == (2, 2, 34, 16)
    for page in range(2):
        weights, lost = [], 0.0
        for side, exact in enumerate((text.k, text.v)):
            rows = exact[:, page].numpy()
            mean, bits, steps, measures = np.split(basis[page, side], (1, 2, 18))
            np.testing.assert_allclose(mean[0], rows.mean(0), atol=1e-5)
            spread = np.cov(rows.T, bias=True)
            root = np.eye(16)
            if side == 0:
                values, vectors = np.linalg.eigh(metric[page])
                root = vectors * np.sqrt(values) @ vectors.T
            weights.append(np.linalg.eigvalsh(root @ spread @ root)[::-1])
            used = bits[0] > 0
            np.testing.assert_allclose(
                measures[used] @ steps[used].T, np.eye(used.sum()), atol=1e-3
            )
            # In steps, a channel's spread is that which its code loses least of; none correlate.
            inside = measures[used] @ spread @ measures[used].T
            sizes = np.array([STEP[int(b)] for b in bits[0][used]])
            np.testing.assert_allclose(
                inside * np.outer(sizes, sizes), np.eye(used.sum()), atol=1e-2
            )
        factors = [weights[1].sum() / 16, 1.0] if queries else [1 / w.sum() for w in weights]
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        for side, weight in enumerate(weights):
            lost += np.vectorize(LOST.get)(basis[page, side, 1]) @ weight
        assert basis[page, :, 1].sum() <= 8 * size
        np.testing.assert_allclose(lost, least_loss(*weights, size), rtol=1e-4)


def test_planes_of_nothing_and_of_constants_are_bases(generator) -> None:
    for number in (None, 0.0, 2.5):
        moments = ops.Moments(PLANES, 2)
        if number is not None:
            packs = np.array([[1, 32, 1, 3]], np.int32)
            cache = torch.full((5, 2, 16, 16), number)
            moments.add(cache, packs)
            moments.add_queries(torch.zeros(3, 4, 16), first=0, kv_heads=2)
        basis = moments.basis()
        assert np.isfinite(basis).all()
        if number is not None:
            packed = ops.PackedPages.zeros(3, PLANES, bases=torch.from_numpy(basis)[None])
            back = torch.zeros_like(cache)
            ops.pack_pages(cache, packed, packs, pages=2)
            ops.unpack_pages(packed, back, packs, pages=2)
            torch.testing.assert_close(back[1:], cache[1:])


@pytest.mark.parametrize(
    ("shape", "where", "message"),
    [
        ((3, 4, 16), {"first": 1, "kv_heads": 2}, "kv_heads: expected pages within 2"),
        ((3, 4, 16), {"first": 0, "kv_heads": 0}, "kv_heads: expected pages within 2"),
        ((3, 3, 16), {"first": 0, "kv_heads": 2}, "queries: expected a multiple of 2 heads"),
        ((3, 4, 32), {"first": 0, "kv_heads": 2}, "queries: expected shape"),
        ((3, 4), {"first": 0, "kv_heads": 2}, "queries: expected shape"),
    ],
)
def test_queries_that_cannot_be_taken_in_are_refused(shape, where, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ops.Moments(PLANES, 2).add_queries(torch.zeros(shape), **where)


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


# ---- texts at other positions -----------------------------------------------------------------


def turned(x: torch.Tensor, angles: torch.Tensor, pairing: str) -> torch.Tensor:
    """Vectors [..., D] whose first pairs are turned by angles f64 [n]; the others stay."""
    out, count = x.double().clone(), len(angles)
    pair = (slice(0, count), slice(count, 2 * count))
    if pairing == "interleaved":
        pair = (slice(0, 2 * count, 2), slice(1, 2 * count, 2))
    one, other = (x.double()[..., part] for part in pair)
    out[..., pair[0]] = one * angles.cos() - other * angles.sin()
    out[..., pair[1]] = other * angles.cos() + one * angles.sin()
    return out


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("form", [OF, PLANES])
def test_moved_moments_are_those_of_moved_tokens(form, pairing, generator) -> None:
    """Of two layers of two KV heads whose pairs turn unlike, a quarter of which do not turn."""
    dim, count = form.head_dim, 3 * form.head_dim // 8
    frequencies = torch.rand(3, count, generator=generator) ** 4
    rope = ops.RopeTable(frequencies, pairing)
    blocks = 1 + 4 * np.arange(12).reshape(6, 2)
    packs = np.column_stack((blocks[:, 0], np.full(6, 32), blocks)).astype(np.int32)
    cache = torch.randn(49, 2, 16, dim, generator=generator) + torch.arange(dim) / dim
    queries = torch.randn(40, 4, dim, generator=generator)
    deltas = [0, 3, -7, 100_000]
    moments, wanted = ops.Moments(form, 4), ops.Moments(form, 4)
    moments.add(cache, packs)
    for layer in (0, 1):
        moments.add_queries(queries, first=2 * layer, kv_heads=2)
    before = moments.basis()
    for delta in deltas:
        copy = cache.clone()
        for layer in (0, 1):
            # The layers are the table's second and third.
            angles = delta * frequencies[1 + layer].double()
            pages = (blocks.reshape(-1, 1) + 2 * layer + np.arange(2)).reshape(-1)
            copy[pages, 0] = turned(cache[pages, 0], angles, pairing).float()
            rows = turned(queries, angles, pairing).float()
            wanted.add_queries(rows, first=2 * layer, kv_heads=2)
        wanted.add(copy, packs)
    moved = moments.moved(rope, np.array(deltas, np.int32), kv_heads=2, first_layer=1)
    assert (moved.tokens, moved.left_out) == (6 * 32, 0)
    np.testing.assert_allclose(moved.metric, wanted.metric, rtol=1e-5, atol=1e-5)
    got, other = (torch.from_numpy(each.basis()) for each in (moved, wanted))
    torch.testing.assert_close(got[:, :, 0], other[:, :, 0], rtol=1e-4, atol=1e-5)
    # Directions are the same but for their signs, which products with themselves have not.
    rows = slice(1, None) if form.kind == "top-r" else slice(2 + dim, None)
    pairs = [side[:, :, rows].mT @ side[:, :, rows] for side in (got, other)]
    torch.testing.assert_close(*pairs, rtol=1e-2, atol=1e-2 * float(pairs[1].abs().max()))
    # What was moved stays as it was, and moving by nothing changes nothing.
    np.testing.assert_array_equal(moments.basis(), before)
    same = moments.moved(rope, np.zeros(1, np.int32), kv_heads=2, first_layer=1)
    np.testing.assert_array_equal(same.basis(), before)


def test_moments_of_nothing_are_moved(generator) -> None:
    rope = ops.RopeTable(torch.rand(2, 32, generator=generator))
    moments = ops.Moments(OF, 2)
    moved = moments.moved(rope, np.array([5], np.int32), kv_heads=1, first_layer=0)
    np.testing.assert_array_equal(moved.basis(), moments.basis())
    assert moved.tokens == 0


@pytest.mark.parametrize(
    ("pairs", "deltas", "where", "message"),
    [
        (32, [], {"kv_heads": 1, "first_layer": 0}, "deltas: expected one at least, got 0"),
        (32, [[1]], {"kv_heads": 1, "first_layer": 0}, "deltas: expected shape"),
        (32, [1], {"kv_heads": 0, "first_layer": 0}, "kv_heads: expected a divisor of 2 pages"),
        (32, [1], {"kv_heads": 3, "first_layer": 0}, "kv_heads: expected a divisor of 2 pages"),
        (32, [1], {"kv_heads": 1, "first_layer": 1}, "first_layer: expected 2 layers within 2"),
        (33, [1], {"kv_heads": 1, "first_layer": 0}, "rope: expected at most 64 turned channels"),
    ],
)
def test_moves_that_cannot_be_are_refused(pairs, deltas, where, message) -> None:
    rope = ops.RopeTable(torch.zeros(2, pairs))
    with pytest.raises(InvalidArgument, match=message):
        ops.Moments(OF, 2).moved(rope, np.array(deltas, np.int32), **where)

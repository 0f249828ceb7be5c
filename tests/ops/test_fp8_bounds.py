"""Bounds of pages in e4m3: against a search among all its numbers, and as bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_bounds import fp8_bounds
from kvweave import InvalidArgument, ops
from versions import RUNNABLE, VERSIONS

HEADS, GROUP, DIM, PAGE, BLOCKS = 2, 3, 16, 8, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCORES = ["min-max", "mean"]
FREQUENCIES = np.geomspace(1.0, 0.01, DIM // 2, dtype=np.float32)[None]
ROPE = ops.RopeTable(FREQUENCIES)
HOSTILE = ["normal", "biased", "huge", "tiny", "nan", "infinite", "zeros", "ties"]
LEFT = 0x55
"""A byte of bounds that nobody wrote."""


def keys_of(kind: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """An arena whose keys are hostile in one way."""
    pages = torch.randn((BLOCKS + 1) * HEADS, 2, PAGE, DIM, generator=generator)
    keys, some = pages[:, 0], torch.rand(pages[:, 0].shape, generator=generator) < 0.02
    match kind:
        case "biased":
            keys[..., ::5] += 300.0
        case "huge":
            keys *= 1e38 if dtype == torch.float32 else 2e4
        case "tiny":
            keys *= 1e-43 if dtype == torch.float32 else 1e-7
        case "nan":
            keys[some] = torch.nan
        case "infinite":
            keys[some] = torch.inf
            keys[:, :, 3] = -torch.inf
        case "zeros":
            keys[...] = torch.where(keys > 0, 0.0, -0.0)
        case "ties":
            # Eighths and sixteenths: many lie between two numbers.
            keys.copy_((keys * 16).round() / 16)
    return pages.to(dtype)


def empty(pages: int, score: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds that nobody has written, and their scales."""
    vectors = 2 if score == "min-max" else 1
    values = torch.full((pages, vectors, DIM), LEFT, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return values, torch.full((pages,), LEFT, dtype=torch.uint8)


def expect_bounds(values, scales, page: int, keys: torch.Tensor, score: str) -> None:
    """Compares the bounds of a page with those of its keys [T, D]."""
    wanted, scale = fp8_bounds(keys.float(), score)
    assert int(scales[page]) == scale
    got = values[page].double() * 2.0 ** (scale - 127)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    # Zero and NaN have one form, so that every version has the same bytes.
    assert not torch.isin(values[page].view(torch.uint8), torch.tensor([0x80, 0xFF])).any()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(HOSTILE),
    dtype=st.sampled_from(DTYPES),
    score=st.sampled_from(SCORES),
    spans=st.lists(st.tuples(st.integers(0, PAGE - 1), st.integers(1, PAGE)), min_size=1),
    seed=st.integers(0, 2**16),
    version=st.sampled_from(RUNNABLE),
)
def test_bounds_are_the_nearest_numbers_on_their_side(
    kind, dtype, score, spans, seed, version
) -> None:
    """Of parts of pages, of blocks held several times, where rows say."""
    generator = torch.Generator().manual_seed(seed)
    pages = keys_of(kind, dtype, generator)
    blocks = torch.randint(1, BLOCKS + 1, (len(spans),), generator=generator).tolist()
    held = [
        (block * HEADS, begin, min(begin + count, PAGE))
        for block, (begin, count) in zip(blocks, spans, strict=True)
    ]
    rows = (1 + HEADS * torch.randperm(len(held), generator=generator)).int().numpy()
    values, scales = empty(1 + HEADS * (len(held) + 1), score)
    bounds = ops.PageBounds(values, np.array(held, np.int32), rows, scales)
    version.bound_pages(pages, bounds, pages=HEADS)
    for (block, begin, end), row in zip(held, rows.tolist(), strict=True):
        for head in range(HEADS):
            keys = pages[block + head, 0, begin:end]
            expect_bounds(values, scales, row + head, keys, score)
    for page in (0, *range(1 + HEADS * len(held), len(values))):
        assert (values[page].view(torch.uint8) == LEFT).all()
        assert scales[page] == LEFT


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("version", VERSIONS)
def test_bounds_are_of_what_a_call_has_written(generator, version, score) -> None:
    """Of rows written over several calls, and of an fp8 cache with a scale of its own."""
    for dtype, scale in ((torch.bfloat16, None), (torch.float8_e4m3fn, (0.37, 1.0))):
        pages = torch.zeros((BLOCKS + 1) * HEADS, 2, PAGE, DIM).to(dtype)
        values, scales = empty(len(pages), score)
        for begin, end in ((0, 3), (3, PAGE)):
            k = torch.randn(end - begin, HEADS, DIM, generator=generator)
            k = k.to(torch.bfloat16)
            slots = np.array([(2 * HEADS, slot) for slot in range(begin, end)], np.int32)
            held = np.array([[2 * HEADS, 0, end]], np.int32)
            bounds = ops.PageBounds(values, held, scales=scales)
            version.write_pages(pages, 0, k, k, slots, bounds=bounds, kv_scales=scale)
            for page in range(2 * HEADS, 3 * HEADS):
                stored = pages[page, 0, :end].float()
                expect_scaled(values, scales, page, stored, score, 1.0 if scale is None else 0.37)


def expect_scaled(values, scales, page, stored, score: str, scale: float) -> None:
    """As `expect_bounds`, of bounds times a scale: rounded to f32 before they are to e4m3."""
    factor = float(np.float32(scale))
    if score == "mean":
        exact = (stored.double().mean(0) * factor).float().expand(2, -1)
    else:
        exact = torch.stack((stored.amin(0), stored.amax(0))) * torch.tensor(scale)
    expect_bounds(values, scales, page, exact, score)


# ---- scores ---------------------------------------------------------------------------------


def bounded(keys: torch.Tensor, score: str, version) -> tuple[torch.Tensor, ...]:
    """Bounds of the pages of an arena, exact [pages, 3, D] and in e4m3 with their scales."""
    held = np.array([[HEADS * block, 0, PAGE] for block in range(1, BLOCKS + 1)], np.int32)
    exact = torch.zeros(len(keys), 3, DIM)
    version.bound_pages(keys, ops.PageBounds(exact, held), pages=HEADS)
    values, scales = empty(len(keys), score)
    version.bound_pages(keys, ops.PageBounds(values, held, scales=scales), pages=HEADS)
    return exact, values, scales


def entries_of(deltas: list[int]) -> np.ndarray:
    rows = [(HEADS * (i + 1), 0, PAGE, PAGE * i, delta) for i, delta in enumerate(deltas)]
    return np.array(rows, np.int32)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["normal", "biased", "huge", "tiny", "nan", "infinite", "ties"]),
    dtype=st.sampled_from(DTYPES),
    shared=st.sampled_from(["highest", "sum"]),
    deltas=st.lists(st.sampled_from([0, 0, 5, -3]), min_size=BLOCKS, max_size=BLOCKS),
    seed=st.integers(0, 2**16),
    version=st.sampled_from([version for version in RUNNABLE if version.device == "cpu"]),
)
def test_no_page_scores_less_than_by_exact_bounds(
    kind, dtype, shared, deltas, seed, version
) -> None:
    """To the bit: rounding a product, a sum or a scale never turns greater into less."""
    generator = torch.Generator().manual_seed(seed)
    exact, values, scales = bounded(keys_of(kind, dtype, generator), "min-max", version)
    q = torch.randn(2, HEADS * GROUP, DIM, generator=generator).to(dtype)
    ends = np.array([0, BLOCKS, BLOCKS], np.int32)
    pages = ops.BoundedPages(exact, PAGE, 0, HEADS, 0.25, ROPE, shared=shared)
    in_fp8 = replace(pages, bounds=values, scales=scales)
    given_ = q, entries_of(deltas)
    wanted, _ = version.score_pages(*given_, pages, entry_offsets=ends)
    got, _ = version.score_pages(*given_, in_fp8, entry_offsets=ends)
    # NaN goes before all others, whichever bounds it is by.
    at_least = (got >= wanted) | got.isnan()
    assert at_least.all()
    assert got[wanted.isnan()].isnan().all()
    if kind in ("normal", "ties"):
        # A bound is off by an eighth of itself at most.
        assert float((got - wanted)[0].max()) < 0.25 * float(q.float().abs().sum(-1).max())


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("version", VERSIONS)
def test_scores_are_those_by_the_numbers_that_are_kept(generator, version, score) -> None:
    keys = keys_of("normal", torch.float32, generator)
    _, values, scales = bounded(keys, score, version)
    wide = torch.full((len(keys), 3, DIM), torch.nan)
    wide[:, slice(2, 3) if score == "mean" else slice(0, 2)] = values.float() * (
        2.0 ** (scales.float() - 127)
    ).view(-1, 1, 1)
    q = torch.randn(2, HEADS * GROUP, DIM, generator=generator)
    ends = np.array([0, BLOCKS, BLOCKS], np.int32)
    for options in ({}, {"shared": "sum"}, {"softcap": 2.0}):
        pages = ops.BoundedPages(wide, PAGE, 0, HEADS, 0.25, ROPE, score=score, **options)
        in_fp8 = replace(pages, bounds=values, scales=scales)
        given_ = q, entries_of([0, 5, 0, -3, 0])
        wanted, counts = version.score_pages(*given_, pages, entry_offsets=ends, width=7)
        got, listed = version.score_pages(*given_, in_fp8, entry_offsets=ends, width=7)
        assert torch.equal(counts, listed)
        if version.device == "cpu":
            assert torch.equal(got, wanted)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_no_number_bounds_comes_first(generator, version) -> None:
    keys = keys_of("normal", torch.float32, generator)
    keys[HEADS * 4, 0, 2, 5] = torch.inf
    keys[HEADS * 2, 0, 1, 0] = torch.nan
    _, values, scales = bounded(keys, "min-max", version)
    pages = ops.BoundedPages(values, PAGE, 0, HEADS, 1.0, ROPE, scales=scales)
    q = torch.ones(1, HEADS, DIM)
    ends = np.array([0, BLOCKS], np.int32)
    scores, counts = version.score_pages(q, entries_of([0] * BLOCKS), pages, entry_offsets=ends)
    assert scores[0, 0].isnan().tolist() == [False, True, False, True, False]
    assert not scores[0, 1].isnan().any()
    chosen, _ = version.select_pages(scores[0], counts[0], np.full(HEADS, 2, np.int32))
    assert chosen[0].tolist() == [1, 3]


# ---- what is refused ------------------------------------------------------------------------

FP8, BYTES = torch.float8_e4m3fn, torch.uint8
BAD = [
    ({"scales": None}, "scales of bounds: expected a byte a page beside float8_e4m3fn, got none"),
    ({"values": torch.zeros(12, 3, DIM)}, "scales of bounds: expected none, got some beside fl"),
    ({"values": torch.zeros(12, 3, DIM, dtype=FP8)}, r"bounds: expected shape \[pages, 2=2"),
    ({"values": torch.zeros(12, 2, DIM + 1, dtype=FP8)}, "."),
    ({"values": torch.zeros(2, 12, DIM, dtype=FP8).transpose(0, 1)}, "bounds: expected C-contig"),
    ({"scales": torch.zeros(11, dtype=BYTES)}, "scales: expected shape"),
    ({"scales": torch.zeros(12, 1, dtype=BYTES)}, "scales: expected shape"),
    ({"scales": torch.zeros(24, dtype=BYTES)[::2]}, "scales: expected C-contiguous"),
    ({"scales": torch.zeros(12)}, "scales: expected uint8, got float32"),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
@pytest.mark.parametrize("version", RUNNABLE)
def test_bounds_that_do_not_belong_together_are_refused(version, changes, words) -> None:
    given_ = {"values": torch.zeros(12, 2, DIM, dtype=FP8), "scales": torch.zeros(12, dtype=BYTES)}
    values, scales = (given_ | changes).values()
    pages = torch.ones(12, 2, PAGE, DIM)
    held = np.array([[HEADS, 0, PAGE]], np.int32)
    with pytest.raises(InvalidArgument, match=words):
        version.bound_pages(pages, ops.PageBounds(values, held, scales=scales), pages=HEADS)
    assert scales is None or (scales == 0).all()
    bounded_ = ops.BoundedPages(values, PAGE, 0, HEADS, 1.0, ROPE, scales=scales)
    q, ends = torch.ones(1, HEADS, DIM), np.array([0, 1], np.int32)
    with pytest.raises(InvalidArgument, match="."):
        version.score_pages(q, entries_of([0]), bounded_, entry_offsets=ends, width=1)


@pytest.mark.parametrize("version", RUNNABLE)
def test_bounds_for_another_score_are_refused(version) -> None:
    q, ends = torch.ones(1, HEADS, DIM), np.array([0, 1], np.int32)
    for score, vectors in (("mean", 2), ("min-max", 1)):
        values, scales = empty(12, "min-max" if vectors == 2 else "mean")
        pages = ops.BoundedPages(values, PAGE, 0, HEADS, 1.0, ROPE, score=score, scales=scales)
        words = f"bounds: expected {3 - vectors} vectors a page in fp8, got {vectors}"
        with pytest.raises(InvalidArgument, match=words):
            version.score_pages(q, entries_of([0]), pages, entry_offsets=ends, width=1)

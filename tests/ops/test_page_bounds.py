"""Bounds of pages: min, max and mean of the keys in the slots that are named, in every version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from versions import CPU, RUNNABLE, VERSIONS, needs_cuda

LAYERS, HEADS, DIM, PAGE, BLOCKS = 2, 3, 16, 8, 4
STEP = LAYERS * HEADS
POISON = -12345.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def empty(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """An arena of NaN, as memory that nobody wrote may be, and bounds full of poison."""
    pages = torch.full(((BLOCKS + 1) * STEP, 2, PAGE, DIM), torch.nan, dtype=dtype)
    return pages, torch.full((len(pages), 3, DIM), POISON)


def table(*rows: tuple[int, ...]) -> np.ndarray:
    """Rows that name blocks by 1, 2, 3, …; in the arena a block starts every STEP pages."""
    return np.array([[block * STEP, *rest] for block, *rest in rows], np.int32)


def wanted_of(pages: torch.Tensor, layer: int, held: np.ndarray) -> torch.Tensor:
    bounds = torch.full((len(pages), 3, DIM), POISON)
    for block, begin, end in held.tolist():
        for page in range(block + layer * HEADS, block + (layer + 1) * HEADS):
            keys = pages[page, 0, begin:end].double()
            bounds[page] = torch.stack((keys.amin(0), keys.amax(0), keys.mean(0))).float()
    return bounds


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def rows(count: int, generator: torch.Generator, dtype: torch.dtype = torch.float32):
    return torch.randn(2, count, HEADS, DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("version", VERSIONS)
def test_bounds_of_whole_blocks_are_those_of_each_of_their_layers(version, dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    pages = torch.randn((BLOCKS + 1) * STEP, 2, PAGE, DIM, generator=generator).to(dtype)
    values = torch.full((len(pages), 3, DIM), POISON)
    by_layers, held = values.clone(), table((3, 0, PAGE), (1, 2, 3))
    # float8 has the scales that its keys were divided by.
    scales = (0.5, 2.0) if dtype.itemsize == 1 else None
    nothing = torch.zeros(0, HEADS, DIM, dtype=torch.float32 if scales else dtype)
    nowhere = np.zeros((0, 2), np.int32)
    for layer in range(LAYERS):
        named = {"bounds": ops.PageBounds(by_layers, held), "kv_scales": scales}
        version.write_pages(pages, layer, nothing, nothing, nowhere, **named)
    version.bound_pages(pages, ops.PageBounds(values, held), pages=STEP, kv_scales=scales)
    same(values, by_layers)
    assert (values[:STEP] == POISON).all()
    assert (values[STEP : 2 * STEP] != POISON).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("version", VERSIONS)
def test_bounds_lie_where_rows_say(version, dtype) -> None:
    """Elsewhere than their pages, and in another order; of a layer's heads too."""
    generator = torch.Generator().manual_seed(4)
    pages = torch.randn((BLOCKS + 1) * STEP, 2, PAGE, DIM, generator=generator).to(dtype)
    at, held = torch.full((len(pages), 3, DIM), POISON), table((3, 0, PAGE), (1, 2, 3))
    moved, listed = torch.full((3 * STEP, 3, DIM), POISON), np.array([STEP + 1, 0], np.int32)
    version.bound_pages(pages, ops.PageBounds(at, held), pages=STEP)
    version.bound_pages(pages, ops.PageBounds(moved, held, listed), pages=STEP)
    wanted = torch.full_like(moved, POISON)
    wanted[STEP + 1 : 2 * STEP + 1], wanted[:STEP] = at[3 * STEP : 4 * STEP], at[STEP : 2 * STEP]
    same(moved, wanted)


ROWS = {
    "negative": ([-1, STEP], "rows of bounds: expected at least 0, got -1"),
    "near": ([0, STEP - 1], "rows of bounds: expected 6 apart"),
    "few": ([0], "rows"),
    "beyond": ([0, 2 * STEP + 1], "bounds: expected those of at least"),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("version", [version for version in RUNNABLE if not version.tables_there])
def test_rows_that_bounds_cannot_have_are_refused(version, rows: str) -> None:
    pages, _ = empty()
    values, held = torch.full((3 * STEP, 3, DIM), POISON), table((3, 0, PAGE), (1, 2, 3))
    listed, words = ROWS[rows]
    bounds = ops.PageBounds(values, held, np.array(listed, np.int32))
    with pytest.raises(InvalidArgument, match=words):
        version.bound_pages(pages, bounds, pages=STEP)
    assert (values == POISON).all()


def test_bounds_of_blocks_with_another_number_of_pages_are_refused() -> None:
    pages, values = empty()
    with pytest.raises(InvalidArgument, match="expected"):
        ops.bound_pages(pages, ops.PageBounds(values, table((BLOCKS, 0, 1))), pages=STEP + 1)
    with pytest.raises(InvalidArgument, match="."):
        ops.bound_pages(pages, ops.PageBounds(values, table((1, 0, 1))), pages=0)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_of_16_bits_are_exact(generator, dtype) -> None:
    """Least and greatest alone, as `score_pages` takes them."""
    pages = torch.randn((BLOCKS + 1) * STEP, 2, PAGE, DIM, generator=generator).to(dtype).cuda()
    pages[STEP + 1, 0, 2, 3] = torch.nan
    pages[STEP + 2, 0, 2, 3] = torch.inf
    values = torch.full((len(pages), 2, DIM), POISON, dtype=dtype, device="cuda")
    # What is filled, a slot of nobody, the null block, a block that is not there.
    held = [(STEP, 0, PAGE), (3 * STEP, 2, 5), (-1, 0, PAGE), (0, 0, PAGE), (99 * STEP, 0, PAGE)]
    there = torch.tensor(held, dtype=torch.int32, device="cuda")
    ops.bound_pages(pages, ops.PageBounds(values, there), pages=STEP)
    wanted = torch.full_like(values, POISON)
    for block, begin, end in held[:2]:
        keys = pages[block : block + STEP, 0, begin:end]
        wanted[block : block + STEP] = torch.stack((keys.amin(1), keys.amax(1)), 1)
    same(values, wanted)


@needs_cuda
def test_bounds_of_16_bits_are_those_of_the_caches_own_dtype(generator) -> None:
    pages = torch.zeros((BLOCKS + 1) * STEP, 2, PAGE, DIM, dtype=torch.bfloat16, device="cuda")
    for dtype, vectors in [(torch.float16, 2), (torch.bfloat16, 3), (torch.float32, 2)]:
        values = torch.zeros(len(pages), vectors, DIM, dtype=dtype, device="cuda")
        with pytest.raises(InvalidArgument, match="bounds: expected"):
            ops.bound_pages(pages, ops.PageBounds(values, table((1, 0, PAGE))), pages=STEP)


def every_slot(block: int, begin: int = 0, end: int = PAGE) -> list[tuple[int, int]]:
    return [(block, slot) for slot in range(begin, end)]


@settings(max_examples=40)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, PAGE - 1), st.integers(1, PAGE)), min_size=1, max_size=BLOCKS
    ),
    layer=st.integers(0, LAYERS - 1),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
    version=st.sampled_from(RUNNABLE),
)
def test_bounds_are_torchs(spans, layer, dtype, seed, version) -> None:
    generator = torch.Generator().manual_seed(seed)
    pages, values = empty(dtype)
    named = [
        (block, begin, min(begin + count, PAGE)) for block, (begin, count) in enumerate(spans, 1)
    ]
    held = table(*named)
    slots = table(*(slot for span in named for slot in every_slot(*span)))
    k, v = rows(len(slots), generator, dtype)
    order = torch.randperm(len(slots), generator=generator)
    bounds = ops.PageBounds(values, held)
    version.write_pages(pages, layer, k[order], v[order], slots[order.numpy()], bounds=bounds)
    torch.testing.assert_close(values[:, :2], wanted_of(pages, layer, held)[:, :2], rtol=0, atol=0)
    torch.testing.assert_close(values, wanted_of(pages, layer, held), rtol=1e-6, atol=1e-7)
    again = torch.full_like(values, POISON)
    nothing = k[:0]
    CPU.write_pages(pages, layer, nothing, nothing, slots[:0], bounds=ops.PageBounds(again, held))
    same(values, again)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_page_filled_over_several_calls(generator, version) -> None:
    pages, values = empty()
    for begin, end in [(0, 3), (3, 4), (4, PAGE)]:
        slots = table(*every_slot(2, begin, end))
        k, v = rows(len(slots), generator)
        held = table((2, 0, end))
        version.write_pages(pages, 1, k, v, slots, bounds=ops.PageBounds(values, held))
        torch.testing.assert_close(values, wanted_of(pages, 1, held), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_slot_written_again_leaves_nothing_behind(generator, version) -> None:
    pages, values = empty()
    slots, held = table(*every_slot(1)), table((1, 0, PAGE))
    k, v = rows(PAGE, generator)
    k[5] = 1e6
    version.write_pages(pages, 0, k, v, slots, bounds=ops.PageBounds(values, held))
    assert float(values[STEP, 1].min()) == 1e6
    calm = torch.zeros(1, HEADS, DIM)
    version.write_pages(pages, 0, calm, calm, slots[5:6], bounds=ops.PageBounds(values, held))
    torch.testing.assert_close(values, wanted_of(pages, 0, held), rtol=1e-6, atol=1e-7)
    assert float(values[STEP : STEP + HEADS].amax()) < 100


@pytest.mark.parametrize("version", VERSIONS)
def test_nan_and_infinities_stay_in_their_element(generator, version) -> None:
    pages, values = empty()
    k, v = rows(PAGE, generator)
    k[3, 0, 2], k[4, 0, 2] = torch.nan, torch.inf
    k[6, 1, 0] = torch.inf
    k[7, 2, 1], k[0, 2, 1] = torch.inf, -torch.inf
    slots, held = table(*every_slot(3)), table((3, 0, PAGE))
    version.write_pages(pages, 0, k, v, slots, bounds=ops.PageBounds(values, held))
    first = 3 * STEP
    assert torch.isnan(values[first, :, 2]).all()
    assert torch.isfinite(values[first, :, [0, 1, *range(3, DIM)]]).all()
    assert torch.isposinf(values[first + 1, 1:, 0]).all()
    assert torch.isfinite(values[first + 1, 0]).all()
    assert torch.isneginf(values[first + 2, 0, 1])
    assert torch.isposinf(values[first + 2, 1, 1])
    assert torch.isnan(values[first + 2, 2, 1])


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_not_named_is_not_touched(generator, version) -> None:
    pages, values = empty()
    k, v = rows(4, generator)
    slots = table((1, 0), (2, 0), (2, 1), (4, 7))
    none = np.zeros((0, 3), np.int32)
    version.write_pages(pages, 0, k, v, slots, bounds=ops.PageBounds(values, none))
    assert (values == POISON).all()
    held = table((2, 0, 2))
    version.write_pages(pages, 0, k[:0], v[:0], slots[:0], bounds=ops.PageBounds(values, held))
    torch.testing.assert_close(values, wanted_of(pages, 0, held), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (table((1, 0, 4), (1, 4, 8)), "held block: expected every block once"),
        (table((0, 0, 4)), "null block"),
        (table((1, 4, 4)), "held slots: expected 0 ≤ begin < end ≤ 8"),
        (table((1, 0, 9)), "held slots"),
        (table((1, -1, 4)), "held slots"),
        (table((1000, 0, 4)), "expected a block within the cache"),
        (table((1, 0, 4)).astype(np.int64), "held: expected int32, got int64"),
        (table((1, 0, 4))[:, :2], r"held: expected shape \[N, columns=3\]"),
    ],
)
@pytest.mark.parametrize("version", [version for version in RUNNABLE if not version.tables_there])
def test_what_is_refused_changes_nothing(generator, version, held, words) -> None:
    pages, values = empty()
    pages.zero_()
    k, v = rows(1, generator)
    bounds = ops.PageBounds(values, np.ascontiguousarray(held))
    with pytest.raises(InvalidArgument, match=words):
        version.write_pages(pages, 0, k, v, table((2, 0)), bounds=bounds)
    assert (values == POISON).all()
    assert (pages == 0).all()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.zeros(12, 3, DIM), "bounds: expected those of at least"),
        (torch.zeros(30, 2, DIM), r"bounds: expected shape \[pages, 3=3, D=16\]"),
        (torch.zeros(30, 3, DIM).double(), "bounds: expected float32, got float64"),
        (torch.zeros(3, 30, DIM).transpose(0, 1), "bounds: expected C-contiguous"),
    ],
)
@pytest.mark.parametrize("version", RUNNABLE)
def test_bounds_of_another_shape_are_refused(generator, version, values, words) -> None:
    if version.tables_there and "at least" in words:
        return
    pages, _ = empty()
    k, v = rows(1, generator)
    bounds = ops.PageBounds(values, table((4, 0, 1)))
    with pytest.raises(InvalidArgument, match=words):
        version.write_pages(pages, 0, k, v, table((2, 0)), bounds=bounds)

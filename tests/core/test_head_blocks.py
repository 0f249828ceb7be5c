"""Writing and copying blocks of head groups, which hold the pages of some layers and heads only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, Unsupported, ops
from paged import rope_table, rotated
from versions import CPU, REFERENCE, RUNNABLE, VERSIONS, needs_cuda

D, POISON = 16, -7.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HOST = [CPU, REFERENCE]


def poisoned(pages: int, page_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((pages, 2, page_tokens, D), POISON, dtype=dtype)


def laid_out(numbers: np.random.Generator, heads: np.ndarray, rows: int, page_tokens: int):
    """Slots [tables, rows, 2] of a cache of its own in which the tables keep some rows, and the
    pages of that cache. Blocks of a table are as long as the largest rank of its heads wants."""
    tables = int(heads[:, 0].max()) + 1
    blocks, free = [], 1
    for table in range(tables):
        size = int(heads[heads[:, 0] == table, 1].max(initial=0)) + 1
        for _ in range(-(-rows // page_tokens)):
            blocks.append((table, free))
            free += size
    slots = np.full((tables, rows, 2), -1, np.int32)
    for table in range(tables):
        mine = numbers.permutation([block for owner, block in blocks if owner == table])
        at = np.arange(rows)
        slots[table] = np.stack((mine[at // page_tokens], at % page_tokens), 1)
        slots[table, numbers.random(rows) < 0.3] = (-1, numbers.choice([-1, 0, 99]))
    return slots, free


@settings(max_examples=60)
@given(
    tables=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    rows=st.integers(0, 70),
    page_tokens=st.sampled_from([1, 8, 16]),
    gap=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**16),
)
def test_heads_are_written_where_their_tables_say(
    tables, rows, page_tokens, gap, dtype, strided, version, seed
) -> None:
    numbers = np.random.default_rng(seed)
    rank = [gap + tables[:g].count(table) for g, table in enumerate(tables)]
    heads = np.array([(*of, 5, 1) for of in zip(tables, rank, strict=True)], np.int32)
    slots, pages = laid_out(numbers, heads, rows, page_tokens)
    cache = poisoned(pages, page_tokens, dtype)
    wanted = cache.clone()
    k, v = torch.randn(2, rows, len(tables), 2 * D).to(dtype)[..., :D].contiguous()
    if strided:
        k = torch.stack((v, k), 2)[:, :, 1]
    for g, (table, page) in enumerate(heads[:, :2]):
        for row, (block, slot) in enumerate(slots[table]):
            if block >= 0:
                wanted[block + page, 0, slot] = k[row, g]
                wanted[block + page, 1, slot] = v[row, g]
    reach = ops.Reach(len(slots), heads)
    version.write_pages(cache, 3, k, v, slots, reach=reach)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reach_over_blocks_of_all_layers_is_none(generator, version) -> None:
    k, v = torch.randn(2, 9, 3, D, generator=generator)
    slots = np.array([(6 + 6 * (row % 3), row // 3) for row in range(9)], np.int32)
    plain, through = poisoned(24, 8), poisoned(24, 8)
    version.write_pages(plain, 1, k, v, slots)
    reach = ops.Reach(1, np.array([(0, 3 + g, 0, 0) for g in range(3)], np.int32))
    version.write_pages(through, 1, k, v, slots[None], reach=reach)
    assert torch.equal(plain, through)


HEADS = np.array([[0, 0, 0, 0], [1, 1, 4, 2]], np.int32)
SLOTS = np.array([[[2, 0], [2, 1]], [[4, 0], [-1, -1]]], np.int32)


def with_head(column: int, value: int) -> np.ndarray:
    heads = HEADS.copy()
    heads[1, column] = value
    return heads


def with_slot(table: int, row: int, *at: int) -> np.ndarray:
    slots = SLOTS.copy()
    slots[table, row] = at
    return slots


BAD = [
    (HEADS, with_slot(1, 1, 4, 0), "slots: expected every slot once"),
    (HEADS, with_slot(1, 1, 1, 0), "slots: expected heads whose pages do not overlap"),
    (HEADS[[0, 0]], SLOTS, "slots: expected heads whose pages"),
    (HEADS, with_slot(0, 0, 0, 0), "slot block: expected at least 1"),
    (HEADS, with_slot(0, 0, -2, 0), "slot block: expected at least 1"),
    (HEADS, with_slot(1, 1, 2, 8), "slot: expected a slot from 0 to 7, got 8"),
    (HEADS, with_slot(1, 1, 2, -1), "slot: expected a slot from 0 to 7, got -1"),
    (HEADS, with_slot(0, 1, 10, 0), "rank of a head: expected a page within"),
    (HEADS, with_slot(1, 1, 9, 0), "rank of a head: expected a page within"),
    (HEADS, with_slot(1, 1, 2**31 - 1, 0), "rank of a head: expected a page within"),
    (with_head(0, 2), SLOTS, "table of a head: expected a table from 0 to 1"),
    (with_head(1, -1), SLOTS, "rank of a head: expected at least 0"),
    (HEADS[:1], SLOTS, "heads of reach: expected 2 rows"),
    (HEADS, SLOTS[:1], r"slots: expected shape \[tables=2, R, columns=2\], got \[1, 2, 2\]"),
    (HEADS, SLOTS[0], r"slots: expected shape \[tables=2, R, columns=2\], got \[2, 2\]"),
    (HEADS, SLOTS[:, :1], "slots: expected 4 elements, got 2"),
    (HEADS, SLOTS.astype(np.int64), "slots: expected int32, got int64"),
    (HEADS, SLOTS.transpose(1, 0, 2), "slots: expected C-contiguous"),
]


@pytest.mark.parametrize(("heads", "slots", "words"), BAD)
@pytest.mark.parametrize(
    "version", [*HOST, pytest.param(RUNNABLE[min(2, len(RUNNABLE) - 1)], marks=needs_cuda)]
)
def test_what_is_refused_changes_nothing(version, heads, slots, words) -> None:
    if slots.shape == (2, 1, 2):
        slots = np.ascontiguousarray(slots)
    cache, k = poisoned(10, 8), torch.ones(2, 2, D)
    reach = ops.Reach(2, np.ascontiguousarray(heads))
    with pytest.raises(InvalidArgument, match=words):
        version.write_pages(cache, 0, k, k, slots, reach=reach)
    assert (cache == POISON).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_bounds_know_no_reach(version) -> None:
    cache, k = poisoned(10, 8), torch.ones(2, 2, D)
    values = torch.full((10, 3, D), POISON)
    bounds = ops.PageBounds(values, np.array([[2, 0, 2]], np.int32))
    with pytest.raises(Unsupported, match="bounds: expected none beside a reach"):
        version.write_pages(cache, 0, k, k, SLOTS, reach=ops.Reach(2, HEADS), bounds=bounds)
    assert (cache == POISON).all()
    assert (values == POISON).all()


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_on_a_device_never_lead_outside(dtype) -> None:
    """Each head by itself: a page within the cache is written though another head's is not."""
    huge = 2**31 - 1
    cache = poisoned(10, 8, dtype).cuda()
    first = [[huge, 0], [0, 0], [-5, 0], [10, 0], [2, 8], [9, 3]]
    second = [[9, 0], [huge, huge], *[[0, 1]] * 4]
    slots = np.array([first, second], np.int32)
    k = torch.ones(6, 2, D, dtype=dtype, device="cuda")
    at = torch.from_numpy(slots).cuda()
    ops.write_pages(cache, 0, k, k, at, reach=ops.Reach(2, HEADS))
    wanted = poisoned(10, 8, dtype)
    wanted[9, :, 3] = 1
    assert torch.equal(cache.cpu(), wanted)


@settings(max_examples=60)
@given(
    layers=st.lists(st.integers(0, 4), min_size=1, max_size=7),
    copies=st.integers(0, 5),
    page_tokens=st.sampled_from([1, 8, 16]),
    pairing=st.sampled_from(["half", "interleaved"]),
    dtype=st.sampled_from(DTYPES),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**16),
)
def test_pages_turn_with_their_layers(
    layers, copies, page_tokens, pairing, dtype, version, seed
) -> None:
    numbers, pages = np.random.default_rng(seed), len(layers)
    blocks = len(layers) * (1 + numbers.permutation(2 * copies))
    rows = []
    for source, target in zip(blocks[:copies], blocks[copies:], strict=True):
        count = numbers.integers(1, page_tokens + 1)
        slots = numbers.integers(0, page_tokens - count + 1, 2)
        rows.append((source, slots[0], target, slots[1], count, numbers.choice([0, -3, 70])))
    table = np.array(rows, np.int32).reshape(-1, 6)
    inv_freq = torch.rand(5, D // 2, generator=torch.Generator().manual_seed(seed))
    cache = torch.randn(pages * (2 * copies + 1), 2, page_tokens, D).to(dtype)
    wanted = cache.clone()
    for source, src_slot, target, dst_slot, count, delta in table.tolist():
        for page, layer in enumerate(layers):
            k, v = cache[source + page, :, src_slot : src_slot + count].clone()
            by = torch.full((count,), delta)
            k = rotated(k[:, None], inv_freq[layer], by, pairing)[:, 0].to(dtype) if delta else k
            wanted[target + page, :, dst_slot : dst_slot + count] = torch.stack((k, v))
    rope = ops.RopeTable(inv_freq, pairing)
    of_pages = np.array(layers, np.int32)
    version.copy_rerotate(cache, table, rope, kv_heads=pages, layers=of_pages)
    assert torch.equal(cache[:, 1], wanted[:, 1])
    close = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(cache[:, 0], wanted[:, 0], rtol=close, atol=close)


@pytest.mark.parametrize("version", VERSIONS)
def test_layers_of_all_pages_are_none(generator, version) -> None:
    cache = torch.randn(40, 2, 8, D, generator=generator)
    twin, rope = cache.clone(), rope_table(3, D)
    copies = np.array([[6, 0, 18, 1, 7, 5], [12, 3, 24, 0, 2, 0]], np.int32)
    version.copy_rerotate(cache, copies, rope, kv_heads=2)
    layers = np.repeat(np.arange(3, dtype=np.int32), 2)
    version.copy_rerotate(twin, copies, rope, kv_heads=2, layers=layers)
    assert torch.equal(cache, twin)


@pytest.mark.parametrize(
    ("layers", "copies", "words"),
    [
        ([0, 1], [4, 0, 5, 0, 1, 3], "whose pages do not overlap"),
        ([0, 1], [1, 0, 5, 0, 1, 3], "whose pages do not overlap"),
        ([0, 1], [4, 0, 9, 0, 1, 3], "expected a block within the cache"),
        ([0, 1], [4, 0, 4, 1, 1, 3], "block 4 both read and written"),
        ([0, 3], [4, 0, 6, 0, 1, 3], "layers: expected layers from 0 to 2, got 3"),
        ([0, -1], [4, 0, 6, 0, 1, 3], "layers: expected layers from 0 to 2, got -1"),
        ([1, 1, 1], [3, 0, 6, 0, 1, 3], "layers: expected at most 2 pages of a layer"),
        ([], [4, 0, 6, 0, 1, 3], "layers: expected at least 1 page, got 0"),
        ([[0, 1]], [4, 0, 6, 0, 1, 3], r"layers: expected shape \[N\], got \[1, 2\]"),
    ],
)
@pytest.mark.parametrize(
    "version", [*HOST, pytest.param(RUNNABLE[min(2, len(RUNNABLE) - 1)], marks=needs_cuda)]
)
def test_copies_of_no_such_blocks(version, layers, copies, words) -> None:
    cache = poisoned(10, 8)
    named = {"kv_heads": 2, "layers": np.array(layers, np.int32)}
    with pytest.raises(InvalidArgument, match=words):
        version.copy_rerotate(cache, np.array([copies], np.int32), rope_table(3, D), **named)
    assert (cache == POISON).all()


@needs_cuda
def test_layers_on_a_device_never_lead_outside() -> None:
    cache = torch.randn(10, 2, 8, D).cuda()
    before, rope = cache.clone(), rope_table(2, D)
    layers = torch.tensor([-1, 2, 2**31 - 1], dtype=torch.int32).cuda()
    copies = torch.tensor([[3, 0, 6, 0, 8, 3]], dtype=torch.int32).cuda()
    ops.copy_rerotate(cache, copies, rope, kv_heads=3, layers=layers)
    assert torch.equal(cache, before)

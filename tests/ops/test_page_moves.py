"""Pages into the slots of rows, and carried there and back: against plain words and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from page_rows import PageRows
from versions import CPU, REFERENCE, RUNNABLE, VERSIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.uint8]
ON_HOST = [pytest.param(version, id=version.name) for version in (CPU, REFERENCE)]


def i32(*numbers) -> np.ndarray:
    return np.array(numbers, np.int32)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 5),
    most=st.integers(0, 12),
    width=st.integers(0, 14),
    limit=st.integers(1, 40),
    kept=st.sampled_from([None, 0.0, 0.5, 1.0]),
    pins=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**16),
    version=st.sampled_from([CPU, REFERENCE]),
)
def test_rows_are_recycled_as_in_plain_words(
    rows, most, width, limit, kept, pins, seed, version
) -> None:
    generator = np.random.default_rng(seed)
    case = PageRows.drawn(generator, rows, most, width, limit, kept, pins)
    pages, selected, slots, pinned = case.on("cpu")
    found = version.recycle_pages(pages, selected, slots, limit=limit, pinned=pinned)
    wanted_slots, wanted_places, wanted_moves = case.by_hand()
    np.testing.assert_array_equal(slots, wanted_slots)
    np.testing.assert_array_equal(found.places, wanted_places)
    assert found.moves.shape == (rows * min(most, width), 3)
    assert found.count.tolist() == [len(wanted_moves)]
    assert [tuple(step) for step in found.moves[: found.count].tolist()] == wanted_moves
    assert found.refused.tolist() == [0] * rows
    again = version.recycle_pages(pages, selected, slots, limit=limit, pinned=pinned)
    assert again.count.tolist() == [0]
    assert torch.equal(again.places, found.places)
    np.testing.assert_array_equal(slots, wanted_slots)


@pytest.mark.parametrize("version", ON_HOST)
def test_long_rows_are_recycled_as_in_plain_words(version) -> None:
    case = PageRows.drawn(np.random.default_rng(3), 7, 4096, 4500, 9000, 0.8, 0.05)
    pages, selected, slots, pinned = case.on("cpu")
    found = version.recycle_pages(pages, selected, slots, limit=9000, pinned=pinned)
    wanted_slots, wanted_places, wanted_moves = case.by_hand()
    np.testing.assert_array_equal(slots, wanted_slots)
    np.testing.assert_array_equal(found.places, wanted_places)
    assert [tuple(step) for step in found.moves[: found.count].tolist()] == wanted_moves


@pytest.mark.parametrize("version", ON_HOST)
def test_pins_may_be_bytes_and_slots_a_part_of_a_tensor(version) -> None:
    room = torch.tensor([[5, 6], [7, -1], [9, 9]], dtype=torch.int32)
    pinned = torch.tensor([[200, 0]], dtype=torch.uint8)
    found = version.recycle_pages(i32([1]), i32(1), room[:1], limit=10, pinned=pinned)
    assert room.tolist() == [[5, 1], [7, -1], [9, 9]]
    assert found.places.tolist() == [[1]]
    assert found.moves.tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("version", ON_HOST)
def test_a_pinned_slot_with_a_selected_page_takes_no_room_from_others(version) -> None:
    slots = torch.tensor([[3, 5]], dtype=torch.int32)
    pinned = torch.tensor([[True, False]])
    found = version.recycle_pages(i32([3, 4]), i32(2), slots, limit=6, pinned=pinned)
    assert (slots.tolist(), found.places.tolist()) == ([[3, 4]], [[0, 1]])
    with pytest.raises(InvalidArgument, match="selected: expected at most as many pages"):
        version.recycle_pages(i32([4, 5]), i32(2), slots, limit=6, pinned=pinned)
    assert slots.tolist() == [[3, 4]]


def recycling(**changes):
    given = {
        "pages": i32([1, 3, -1], [0, 2, 4]),
        "selected": i32(2, 3),
        "slots": torch.tensor([[3, -1, 4], [2, 1, 0]], dtype=torch.int32),
        "limit": 5,
        "pinned": torch.tensor([[0, 0, 1], [0, 0, 0]], dtype=torch.bool),
    } | changes
    slots = given["slots"]
    before = slots.clone() if isinstance(slots, torch.Tensor) else None
    tables = [given.pop(name) for name in ("pages", "selected", "slots")]
    try:
        return ops.recycle_pages(*tables, **given)
    except InvalidArgument:
        assert before is None or torch.equal(slots, before)
        raise


ROWS_REFUSED = [
    ({"pages": i32([3, 1, -1], [0, 2, 4])}, "pages: expected ascending numbers"),
    ({"pages": i32([1, 1, -1], [0, 2, 4])}, "pages: expected ascending numbers"),
    ({"pages": i32([1, 5, -1], [0, 2, 4])}, "pages: expected pages from 0 to below 5, got 5"),
    ({"pages": i32([-1, 3, -1], [0, 2, 4])}, "pages: expected pages from 0"),
    ({"pages": i32([1, 3, -1])}, "pages: expected 6 elements, got 3"),
    ({"pages": i32(1, 3)}, r"pages: expected shape \[R, K\]"),
    ({"pages": np.zeros((2, 3))}, "pages: expected int32"),
    ({"pages": [[1, 3]]}, "pages: expected a tensor"),
    ({"selected": i32(4, 3)}, "selected: expected numbers from 0 to 3"),
    ({"selected": i32(-1, 3)}, "selected: expected numbers from 0 to 3"),
    ({"selected": i32(2)}, "expected"),
    ({"slots": torch.tensor([[3, -1, 5], [2, 1, 0]]).int()}, "slots: expected pages from 0"),
    ({"slots": torch.tensor([[3, -2, 4], [2, 1, 0]]).int()}, "slots: expected pages from 0"),
    ({"slots": torch.tensor([[3, 4, 4], [2, 1, 0]]).int()}, "slots: expected no page in two"),
    ({"slots": torch.zeros(2, 3)}, "slots: expected int32"),
    ({"slots": torch.zeros(3, 2).int().T}, "slots: expected C-contiguous"),
    ({"slots": torch.zeros(3).int()}, r"slots: expected shape \[R, S\]"),
    ({"slots": np.zeros((2, 3), np.int32)}, "slots: expected a tensor of torch"),
    ({"pinned": torch.ones(2, 3).bool()}, "selected: expected at most as many pages as fit"),
    ({"pinned": torch.ones(2, 2).bool()}, "pinned: expected shape"),
    ({"pinned": torch.ones(2, 3)}, "pinned: expected uint8, got float32"),
    ({"limit": 4}, "pages: expected pages from 0 to below 4, got 4"),
    ({"limit": 2**40}, "limit: expected at most 2147483647"),
    ({"limit": -1}, "limit: expected at least 0"),
    ({"backend": "gpu"}, "backend"),
]


@pytest.mark.parametrize(("changes", "words"), ROWS_REFUSED)
def test_rows_that_are_not_as_they_have_to_be_are_refused(changes, words) -> None:
    recycling()
    with pytest.raises(InvalidArgument, match=words):
        recycling(**changes)


def filled(shape: tuple[int, ...], dtype: torch.dtype, generator) -> torch.Tensor:
    """Any bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    drawn = torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8))
    return drawn.view(dtype).view(shape)


@settings(max_examples=100, deadline=None)
@given(
    tables=st.integers(1, 3),
    ranks=st.integers(1, 3),
    width=st.integers(1, 5),
    page=st.sampled_from([(2, 16, 8), (2, 1, 16), (80,)]),
    dtype=st.sampled_from(DTYPES),
    way=st.sampled_from(["fetch", "spill"]),
    seed=st.integers(0, 2**16),
    version=st.sampled_from(RUNNABLE),
)
def test_pages_are_carried_whole(tables, ranks, width, page, dtype, way, seed, version) -> None:
    generator = np.random.default_rng(seed)
    rows = tables * ranks

    def blocks(columns: int, spare: int) -> np.ndarray:
        numbers = spare + ranks * generator.permutation(tables * columns)
        return numbers.astype(np.int32).reshape(tables, columns)

    of_slots, of_home = blocks(width, 1), blocks(2 * width, 0)
    slots = filled((rows * width + 2, *page), dtype, generator)
    home = filled((2 * rows * width, *page), dtype, generator)
    moves = [
        (row, 2 * slot + int(generator.integers(2)), slot)
        for row in range(rows)
        for slot in range(width)
    ]
    moves = [moves[i] for i in generator.permutation(len(moves))]
    count = int(generator.integers(0, len(moves) + 1))
    wanted = {"slots": slots.clone(), "home": home.clone()}
    for row, number, slot in moves[:count]:
        at_home = int(of_home[row // ranks, number]) + row % ranks
        in_slot = int(of_slots[row // ranks, slot]) + row % ranks
        if way == "fetch":
            wanted["slots"][in_slot] = home[at_home]
        else:
            wanted["home"][at_home] = slots[in_slot]
    sides = ops.RowPages(slots, of_slots, ranks), ops.RowPages(home, of_home, ranks)
    version.move_pages(i32(*moves), i32(count), *sides, way=way)
    for name, arena in (("slots", slots), ("home", home)):
        assert torch.equal(arena.view(torch.uint8), wanted[name].view(torch.uint8)), name


@pytest.mark.parametrize("version", VERSIONS)
def test_no_moves_and_no_pages_are_carried_too(version) -> None:
    arena, none = torch.ones(3, 4), np.zeros((0, 3), np.int32)
    table, nowhere = i32([0, 1, 2]), np.zeros((0, 0), np.int32)
    version.move_pages(
        none, i32(0), ops.RowPages(arena, table), ops.RowPages(arena.clone(), table), way="fetch"
    )
    empty = ops.RowPages(torch.zeros(0, 4), nowhere)
    version.move_pages(none, i32(0), empty, ops.RowPages(arena, table), way="spill")
    version.move_pages(i32([0, 1, 1]), i32(0), empty, empty, way="fetch")
    assert (arena == 1).all()


@pytest.mark.parametrize("version", ON_HOST)
def test_what_is_recycled_is_carried(version) -> None:
    """The slots of rows hold, after each step, the pages that the rows selected."""
    generator = np.random.default_rng(7)
    rows, width, limit, ranks = 6, 9, 30, 3
    homes = filled((rows * limit, 2, 4, 8), torch.bfloat16, generator)
    numbers = np.arange(rows * limit, dtype=np.int32).reshape(rows // ranks, limit * ranks)
    home = ops.RowPages(homes, np.ascontiguousarray(numbers[:, ::ranks]), ranks)
    table = ranks * np.arange(rows * width // ranks, dtype=np.int32).reshape(-1, width)
    arena = torch.zeros(rows * width, 2, 4, 8, dtype=torch.bfloat16)
    slots = torch.full((rows, width), -1, dtype=torch.int32)
    for _ in range(12):
        chosen = np.sort([generator.permutation(limit)[:7] for _ in range(rows)], 1)
        pages, selected = chosen.astype(np.int32), np.full(rows, 7, np.int32)
        found = version.recycle_pages(pages, selected, slots, limit=limit)
        sides = ops.RowPages(arena, table, ranks), home
        version.move_pages(found.moves, found.count, *sides, way="fetch")
        for row in range(rows):
            group, rank = divmod(row, ranks)
            held = table[group, found.places[row].numpy()] + rank
            own = home.blocks[group, pages[row]] + rank
            assert torch.equal(arena[held].view(torch.uint8), homes[own].view(torch.uint8))


def carrying(**changes):
    arena, home = torch.zeros(4, 8), torch.ones(4, 8)
    given = {
        "moves": i32([0, 1, 0]),
        "count": i32(1),
        "slots": ops.RowPages(arena, i32([0, 1, -1, 3])),
        "home": ops.RowPages(home, i32([0, 1, 2, 3])),
        "way": "fetch",
    } | changes
    parts = [given.pop(name) for name in ("moves", "count", "slots", "home")]
    try:
        ops.move_pages(*parts, **given)
    except InvalidArgument:
        assert (arena == 0).all()
        raise
    assert (home == 1).all()


def four(data, ranks: int = 1) -> ops.RowPages:
    return ops.RowPages(data, i32([0, 1, 2, 3]), ranks)


BOTH = torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moves": i32([1, 0, 0])}, "moves: expected a row, a page and a slot"),
        ({"moves": i32([-1, 0, 0])}, "moves: expected a row, a page and a slot"),
        ({"moves": i32([0, 4, 0])}, "moves: expected a row, a page and a slot"),
        ({"moves": i32([0, 0, 2])}, "moves: expected a row, a page and a slot"),
        ({"moves": i32([0, 0, -1])}, "moves: expected a row, a page and a slot"),
        ({"moves": i32([0, 1, 0], [0, 2, 0]), "count": i32(2)}, "no page to be written twice"),
        ({"moves": i32([0, 1])}, "moves: expected shape"),
        ({"moves": [[0, 1, 0]]}, "moves: expected a tensor"),
        ({"count": i32(2)}, "count: expected from 0 to the 1 moves"),
        ({"count": i32(-1)}, "count: expected from 0"),
        ({"count": i32()}, "count: expected 1 elements"),
        ({"slots": four(torch.zeros(4, 9))}, "home: expected pages of 36 bytes, as slots have"),
        ({"slots": four(torch.zeros(8, 4).T)}, "slots: expected C-contiguous"),
        ({"slots": four(torch.zeros(4, 0))}, "slots: expected pages of at least a byte"),
        ({"slots": four(torch.zeros(()))}, "slots: expected pages along a first axis"),
        ({"slots": four(torch.zeros(4, 8), 0)}, "ranks: expected at least 1"),
        ({"slots": four(torch.zeros(4, 8), -1)}, "ranks: expected at least 0"),
        ({"slots": torch.zeros(4, 8)}, "slots: expected RowPages, got Tensor"),
        ({"home": ops.RowPages(torch.zeros(4, 8), i32(0, 1))}, "blocks of home: expected shape"),
        ({"slots": four(BOTH[:4]), "home": four(BOTH[2:6])}, "memory of its own, apart from home"),
        ({"way": "back"}, "way: expected fetch or spill"),
    ],
)
def test_what_cannot_be_carried_is_refused(changes, words) -> None:
    carrying()
    with pytest.raises(InvalidArgument, match=words):
        carrying(**changes)

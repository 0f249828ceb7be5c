"""`recycle_pages` and `move_pages` on CUDA: long rows, hostile tables, pinned memory, graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument, Unsupported, ops
from page_rows import PageRows
from versions import needs_cuda

pytestmark = needs_cuda

HUGE = 2**31 - 1
SHAPES = [
    # rows, pages of each, slots, limit
    (4096, 128, 144, 8192),
    (300, 1, 1, 1),
    (77, 33, 40, 65),
    (9, 1024, 1024, 3000),
    (9, 1025, 1030, 3000),
    (5, 4096, 4400, 20_000),
    (3, 4096, 4097, 500_000),
    (2000, 8, 500, 30_000),
    (1, 700, 900, 901),
]
BYTES = [16, 48, 4080, 4096, 4112, 8192, 12_304, 65_552]


def listed(found: ops.Recycled) -> list[tuple[int, ...]]:
    return [tuple(step) for step in found.moves[: int(found.count)].tolist()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", [None, 0.0, 1.0])
def test_rows_are_recycled_as_in_plain_words(shape, kept) -> None:
    rows, most, width, limit = shape
    workspace = ops.Workspace("cuda")
    for seed, pins in enumerate((0.0, 0.1)):
        generator = np.random.default_rng(seed)
        case = PageRows.drawn(generator, rows, most, width, limit, kept, pins)
        wanted_slots, wanted_places, wanted_moves = case.by_hand()
        for tables_there in (True, False):
            pages, selected, slots, pinned = case.on("cuda")
            chosen = (pages, selected) if tables_there else (case.pages, case.selected)
            named = {"limit": limit, "pinned": pinned if pins else None, "workspace": workspace}
            for again in range(2):
                found = ops.recycle_pages(*chosen, slots, **named)
                assert listed(found) == ([] if again else wanted_moves)
                assert not found.refused.any()
                assert np.array_equal(slots.cpu(), wanted_slots)
                assert np.array_equal(found.places.cpu(), wanted_places)
        _, zeros = workspace.held
        assert not zeros.any()


def test_rows_of_none_move_nothing() -> None:
    for rows, most, width in ((0, 5, 7), (4, 0, 3), (4, 3, 0), (0, 0, 0)):
        pages = torch.full((rows, most), -1).int().cuda()
        selected = torch.zeros(rows).int().cuda()
        slots = torch.full((rows, width), -1).int().cuda()
        found = ops.recycle_pages(pages, selected, slots, limit=9)
        assert found.count.tolist() == [0]
        assert found.places.tolist() == [[-1] * most] * rows
        assert found.refused.tolist() == [0] * rows


HOSTILE = [
    # pages, selected, slots
    ([3, 1, 2], 3, [-1, -1, -1, -1]),
    ([1, 1, 2], 3, [-1, -1, -1, -1]),
    ([1, 2, 50], 3, [-1, -1, -1, -1]),
    ([1, 2, HUGE], 3, [-1, -1, -1, -1]),
    ([-1, 1, 2], 3, [-1, -1, -1, -1]),
    ([-HUGE - 1, 1, 2], 3, [-1, -1, -1, -1]),
    ([1, 2, 3], 4, [-1, -1, -1, -1]),
    ([1, 2, 3], -1, [-1, -1, -1, -1]),
    ([1, 2, 3], HUGE, [-1, -1, -1, -1]),
    ([1, 2, 3], 3, [7, 7, -1, -1]),
    ([1, 2, 3], 3, [2, 2, -1, -1]),
    ([1, 2, 3], 3, [50, -1, -1, -1]),
    ([1, 2, 3], 3, [-2, -1, -1, -1]),
    ([1, 2, 3], 3, [HUGE, -HUGE - 1, -1, -1]),
    # The last two slots are pinned.
    ([1, 2, 3], 3, [-1, -1, 9, -1]),
]


@pytest.mark.parametrize("wide", [False, True])
def test_a_row_that_is_not_as_it_has_to_be_is_left_as_it_is(wide) -> None:
    """Between rows that are, in either kernel."""
    most, width = (1500, 2000) if wide else (3, 4)
    rows = 2 * len(HOSTILE) + 1
    pages = torch.full((rows, most), -7).int()
    slots = torch.full((rows, width), -1).int()
    pinned = torch.ones(rows, width).bool()
    selected = torch.zeros(rows).int()
    for row in range(rows):
        at, number, held = ([1, 2, 3], 3, [3, 9, 2, -1])
        if row % 2:
            at, number, held = HOSTILE[row // 2]
        pages[row, :3], slots[row, :4] = torch.tensor(at).int(), torch.tensor(held).int()
        selected[row], pinned[row, :2] = number, False
    there = slots.cuda()
    given = (pages.cuda(), selected.cuda(), there)
    found = ops.recycle_pages(*given, limit=50, pinned=pinned.cuda())
    assert found.refused.tolist() == [row % 2 for row in range(rows)]
    assert listed(found) == [(row, 1, 1) for row in range(0, rows, 2)]
    wanted = slots.clone()
    wanted[::2, 1] = 1
    assert torch.equal(there.cpu(), wanted)
    assert (found.places[1::2] == -1).all()
    assert (found.places[::2, :3].cpu() == torch.tensor([1, 2, 0])).all()
    assert (found.places[:, 3:] == -1).all()


def test_rows_beyond_the_kernels_are_named() -> None:
    slots = torch.full((1, 4), -1).int().cuda()
    none, selected = torch.zeros(1, 0).int().cuda(), torch.zeros(1).int().cuda()
    with pytest.raises(Unsupported, match="limit: expected"):
        ops.recycle_pages(none, selected, slots, limit=HUGE)
    wide = torch.zeros(1, 65_536).int().cuda()
    with pytest.raises(Unsupported, match="width of pages: expected at most 65535"):
        ops.recycle_pages(wide, selected, slots, limit=10)
    with pytest.raises(InvalidArgument, match="pages: expected ascending numbers"):
        ops.recycle_pages(np.array([[2, 1]], np.int32), np.array([2], np.int32), slots, limit=9)
    with pytest.raises(InvalidArgument, match="pinned: expected a tensor on cuda:0, got cpu"):
        ops.recycle_pages(none, selected, slots, limit=9, pinned=torch.zeros(1, 4).bool())


def arena_of(pages: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (pages, size), generator=generator, dtype=torch.uint8)


def numbers(columns: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(rows * columns, generator=generator).int().view(rows, columns)


@pytest.mark.parametrize("way", ["fetch", "spill"])
@pytest.mark.parametrize("size", BYTES)
@pytest.mark.parametrize("processors", [1, 2, 500])
def test_pinned_pages_are_carried_to_the_byte(way, size, processors, generator) -> None:
    rows, width = 30, 11
    of_slots, of_home = (numbers(columns, rows, generator) for columns in (width, 2 * width))
    slots = arena_of(rows * width, size, generator).cuda()
    home = arena_of(2 * rows * width, size, generator).pin_memory()
    row, slot = torch.arange(rows * width) // width, torch.arange(rows * width) % width
    page = 2 * slot + torch.randint(0, 2, slot.shape, generator=generator)
    moves = torch.stack((row, page, slot), 1)[torch.randperm(len(row), generator=generator)].int()
    for count in (0, 1, 100, len(moves), HUGE, -1):
        wanted = {"slots": slots.cpu(), "home": home.clone()}
        for r, p, s in moves[: min(max(count, 0), len(moves))].tolist():
            in_slot, at_home = of_slots[r, s], of_home[r, p]
            if way == "fetch":
                wanted["slots"][in_slot] = wanted["home"][at_home]
            else:
                wanted["home"][at_home] = wanted["slots"][in_slot]
        ops.move_pages(
            moves.cuda(),
            torch.tensor([count]).int().cuda(),
            ops.RowPages(slots, of_slots.cuda()),
            ops.RowPages(home, of_home.cuda()),
            way=way,
            processors=processors,
        )
        torch.cuda.synchronize()
        assert torch.equal(slots.cpu(), wanted["slots"])
        assert torch.equal(home, wanted["home"])


@pytest.mark.parametrize("way", ["fetch", "spill"])
@pytest.mark.parametrize("size", [1, 24, 4096, 65_552])
@pytest.mark.parametrize("where", ["pinned", "device"])
def test_the_copy_engine_carries_what_processors_do(way, size, where, generator) -> None:
    """Blocks of 4 pages: neighbours, some at even distances, and some anywhere."""
    blocks = [3, 4, 5, 7, 9, 11, 20, 1]
    first = torch.tensor([blocks, blocks[::-1]]).int() * 4
    last = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 12], [8, 13, 15, 17, 19, 21, 22, 23]]).int() * 4
    first[1] += 120
    steps = [(row * 4 + head, n, n) for row in range(2) for n in range(8) for head in range(4)]
    moves = torch.tensor(steps).int()
    slots, home = arena_of(220, size, generator).cuda(), arena_of(130, size, generator)
    home = home.pin_memory() if where == "pinned" else home.cuda()
    for count in (0, 1, 31, len(moves)):
        wanted = {"slots": slots.cpu(), "home": home.cpu().clone()}
        counted = torch.tensor([count]).int()
        sides = [
            ops.RowPages(wanted[name], of, 4) for name, of in (("slots", first), ("home", last))
        ]
        ops.move_pages(moves, counted, *sides, way=way, backend="reference")
        sides = [ops.RowPages(slots, first, 4), ops.RowPages(home, last, 4)]
        ops.move_pages(moves, counted, *sides, way=way, processors=0)
        torch.cuda.synchronize()
        assert torch.equal(slots.cpu(), wanted["slots"])
        assert torch.equal(home.cpu(), wanted["home"])


def test_what_the_copy_engine_cannot_carry_is_refused(generator) -> None:
    slots, home = arena_of(4, 64, generator).cuda(), arena_of(4, 64, generator)
    table, moves = torch.arange(4).int().view(1, 4), torch.tensor([[0, 1, 2], [0, 3, 2]]).int()
    before = slots.cpu()

    def carry(data, count=1, moves=moves, table=table, slots=slots) -> None:
        sides = ops.RowPages(slots, table), ops.RowPages(data, table)
        counted = torch.tensor([count]).int()
        ops.move_pages(moves, counted, *sides, way="fetch", processors=0)

    with pytest.raises(InvalidArgument, match="expected pages on a CUDA device or in pinned"):
        carry(home)
    home = home.pin_memory()
    with pytest.raises(InvalidArgument, match="no page to be written twice"):
        carry(home, count=2)
    with pytest.raises(InvalidArgument, match="count: expected from 0 to the 2 moves"):
        carry(home, count=3)
    with pytest.raises(InvalidArgument, match="moves: expected a row, a page and a slot"):
        carry(home, moves=moves + 2)
    with pytest.raises(InvalidArgument, match="moves"):
        carry(home, moves=moves.cuda())
    with pytest.raises(InvalidArgument, match="slots: expected memory of its own"):
        carry(slots)
    with pytest.raises(InvalidArgument, match="home: expected pages of 64 bytes"):
        carry(torch.zeros(4, 32).byte().pin_memory())
    torch.cuda.synchronize()
    assert torch.equal(slots.cpu(), before)


def test_moves_that_point_nowhere_are_skipped(generator) -> None:
    slots, home = arena_of(4, 4096, generator).cuda(), arena_of(6, 4096, generator).pin_memory()
    of_slots = torch.tensor([[0, 1, -1], [4, HUGE, 3]]).int().cuda()
    of_home = torch.tensor([[0, 1, 2, 3], [-5, 6, HUGE, 5]]).int().cuda()
    moves = [(0, 0, 2), (1, 3, 0), (1, 3, 1), (1, 0, 2), (1, 1, 2), (1, 2, 2), (0, 4, 0)]
    moves += [(0, 0, 3), (2, 0, 0), (-1, 0, 0), (HUGE, HUGE, HUGE), (0, -1, 0), (0, 0, -1)]
    moves += [(0, 2, 1), (1, 3, 2)]
    before = slots.cpu()
    for way in ("fetch", "spill"):
        ops.move_pages(
            torch.tensor(moves).int().cuda(),
            torch.tensor([len(moves)]).int().cuda(),
            ops.RowPages(slots, of_slots),
            ops.RowPages(home, of_home),
            way=way,
        )
        torch.cuda.synchronize()
        before[1], before[3] = home[2], home[5]
        assert torch.equal(slots.cpu(), before)


def test_memory_that_the_device_cannot_reach_is_refused(generator) -> None:
    slots, home = arena_of(4, 64, generator).cuda(), arena_of(4, 64, generator)
    table = torch.arange(4).int().view(1, 4).cuda()
    moves, count = torch.tensor([[0, 1, 2]]).int().cuda(), torch.tensor([1]).int().cuda()

    def carry(slots, home, **named) -> None:
        sides = ops.RowPages(slots, table), ops.RowPages(home, table)
        ops.move_pages(moves, count, *sides, **{"way": "fetch", **named})

    with pytest.raises(InvalidArgument, match="home: expected pages on a CUDA device or in pinned"):
        carry(slots, home)
    carry(slots, home.pin_memory())
    assert torch.equal(slots[2].cpu(), home[1])
    with pytest.raises(InvalidArgument, match="processors"):
        carry(slots, slots.clone(), processors=-1)
    with pytest.raises(InvalidArgument, match="slots: expected memory of its own"):
        carry(slots, slots)
    with pytest.raises(Unsupported, match="bytes of a page: expected a multiple of 16, got 24"):
        carry(*(torch.zeros(4, 24, device="cuda").byte() for _ in range(2)))
    odd = torch.zeros(4 * 64 + 8, device="cuda").byte()[8:].view(4, 64)
    with pytest.raises(Unsupported, match="slots: expected a boundary of 16 bytes"):
        carry(odd, slots)
    tables = [x.cpu() for x in (moves, count, table)]
    sides = [ops.RowPages(data, tables[2]) for data in (slots, home.pin_memory())]
    with pytest.raises(InvalidArgument, match="count: expected from 0 to the 1 moves"):
        ops.move_pages(tables[0], tables[1] + 1, *sides, way="spill")
    with pytest.raises(InvalidArgument, match="moves: expected a row, a page and a slot"):
        ops.move_pages(tables[0] + 3, tables[1], *sides, way="spill")


def test_steps_of_a_captured_graph_bring_what_they_select(generator) -> None:
    """Selections alone change between replays: the device finds and fetches what is missing."""
    rows, width, limit, most, size = 64, 40, 200, 32, 8192
    home = arena_of(rows * limit, size, generator).pin_memory()
    of_home = numbers(limit, rows, generator)
    arena = torch.zeros(rows * width, size, dtype=torch.uint8, device="cuda")
    of_slots = numbers(width, rows, generator)
    sides = ops.RowPages(arena, of_slots.cuda()), ops.RowPages(home, of_home.cuda())
    slots = torch.full((rows, width), -1, dtype=torch.int32, device="cuda")
    pages = torch.zeros(rows, most, dtype=torch.int32, device="cuda")
    selected = torch.zeros(rows, dtype=torch.int32, device="cuda")
    workspace = ops.Workspace("cuda")

    def step() -> ops.Recycled:
        found = ops.recycle_pages(pages, selected, slots, limit=limit, workspace=workspace)
        ops.move_pages(found.moves, found.count, *sides, way="fetch")
        return found

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(8):
        chosen = torch.rand(rows, limit, generator=generator).topk(most).indices.sort().values
        counts = torch.randint(0, most + 1, (rows,), generator=generator).int()
        pages.copy_(chosen.int())
        selected.copy_(counts)
        graph.replay()
        torch.cuda.synchronize()
        assert not found.refused.any()
        here, places = arena.cpu(), found.places.cpu()
        for row, count in enumerate(counts.tolist()):
            held = of_slots[row, places[row, :count].long()].long()
            own = of_home[row, chosen[row, :count]].long()
            assert torch.equal(here[held], home[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half", [16, 48, 2048, 2064, 9232])
def test_pages_are_rounded_as_on_the_host(half, dtype, generator) -> None:
    """To and from pinned memory, to the bit; what points nowhere is skipped."""
    pages, skipped = 70, [(0, 99, 0), (1, 0, 0), (0, -1, 0), (0, 0, 70)]
    drawn = torch.randn(pages, 2, half, generator=generator)
    drawn *= 10.0 ** (torch.rand(pages, 2, 1, generator=generator) * 14 - 8)
    drawn[::7, :, ::5] = torch.tensor([0.0, -0.0, 6e4, torch.inf, -torch.inf, torch.nan, 464.0])[
        torch.randint(0, 7, drawn[::7, :, ::5].shape, generator=generator)
    ]
    slots, table = drawn.to(dtype), torch.arange(pages).int().view(1, -1)
    order = torch.randperm(pages, generator=generator)
    moves = torch.stack((0 * order, order, order.flip(0)), 1).int()
    hostile = torch.cat((torch.tensor(skipped).int(), moves))
    home = torch.zeros(pages, 2, half).to(torch.float8_e4m3fn)
    scales = torch.zeros(pages, 2, dtype=torch.uint8)
    pinned, there = home.clone().pin_memory(), scales.cuda()
    on_gpu, blocks = slots.cuda(), table.cuda()
    for way, processors in (("spill", 2), ("fetch", 1), ("spill", 500), ("fetch", 2)):
        sides = ops.RowPages(slots, table), ops.RowPages(home, table, 1, scales)
        ops.move_pages(moves, torch.tensor([pages]).int(), *sides, way=way)
        sides = ops.RowPages(on_gpu, blocks), ops.RowPages(pinned, blocks, 1, there)
        count = torch.tensor([HUGE]).int().cuda()
        ops.move_pages(hostile.cuda(), count, *sides, way=way, processors=processors)
        torch.cuda.synchronize()
        pairs = (on_gpu, slots), (pinned.float(), home.float()), (there, scales)
        for found, wanted in pairs:
            torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def test_rounded_pages_that_the_kernels_do_not_take_are_refused() -> None:
    slots, table = torch.zeros(2, 2, 24, device="cuda"), torch.tensor([[0, 1]]).int().cuda()
    home, scales = torch.zeros(2, 2, 24).to(torch.float8_e4m3fn), torch.zeros(2, 2).byte()
    moves, count = torch.tensor([[0, 1, 0]]).int().cuda(), torch.tensor([1]).int().cuda()

    def carry(home: torch.Tensor, scales: torch.Tensor) -> None:
        sides = ops.RowPages(slots, table), ops.RowPages(home, table, 1, scales)
        ops.move_pages(moves, count, *sides, way="spill")

    with pytest.raises(Unsupported, match="numbers of a page: expected a multiple of 32, got 48"):
        carry(home.cuda(), scales.cuda())
    with pytest.raises(InvalidArgument, match="scales: expected a tensor on cuda:0, got cpu"):
        carry(home.cuda(), scales)

"""What it takes on a GPU to bring chosen pages into slots, and to carry pages to and from the host.

`recycle_pages` for the rows of 16 requests of Llama-3.1-8B's shape (32 layers, 8 KV heads), which
select in turns one of two sets of pages, so that each call finds the same share missing. Beside it
the same by torch's own calls, and its floor: reading and writing its tables once, and a launch.
Every call is a graph of its own; the L2 cache holds nothing of it.

`move_pages` for pages of 2 to 256 KiB between the device and pinned memory, both ways, on one, two
and four processors' worth of thread blocks, and large ones by the copy engine. Beside it one copy
of as many bytes by that engine, which is the ceiling, and a copy for each page. The same pages as
fp8 in pinned memory, half the bytes, which are rounded and widened on the way. Then a decode step's
attention in 16 layers, alone and while pages are carried on another stream; and the same with the
products of matrices of such layers. *First* are steps on a stream of a higher priority than the
copies'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.cases.page_choice import KV_HEADS, Layer
from kvweave import ops
from kvweave.lab.bench.ceilings import Ceilings, measure
from kvweave.lab.bench.device_timing import FULL, QUICK, DeviceClock, Effort, replayed
from kvweave.lab.bench.rows import Row, expect

LAYERS, REQUESTS = 32, 16
LIMIT = 8192
RECYCLED = (
    # pages of each row, slots, share that is missing, the microseconds that the design asks for
    (128, 144, 0.1, 10.0),
    (128, 144, 0.0, 10.0),
    (128, 144, 1.0, None),
    (64, 80, 0.1, None),
    (1024, 1100, 0.1, None),
)
KIB = 1 << 10
MOVED = 256 << 20
"""Bytes that a call moves."""
PAGES = (2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
LARGE = 64 * KIB
"""Pages that the copy engine is asked to carry."""
FEW = (16, 256)
"""Pages of calls that are short."""
SEPARATE = 2048
"""The most pages that are copied one by one."""
DECODED = 16
"""Layers whose attention is timed beside moves."""
PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096))
"""Weights [in, out] of a layer: for queries, keys and values, behind attention, and the MLP's."""
ROUNDS = 30


class Recycling:
    """Rows whose slots hold one of two selections, of which a share is the same."""

    def __init__(self, rows: int, most: int, width: int, missing: float) -> None:
        generator = torch.Generator("cuda").manual_seed(most)
        drawn = torch.rand(rows, LIMIT, generator=generator, device="cuda")
        order = drawn.topk(2 * most).indices.int()
        kept = most - round(missing * most)
        first, other = order[:, :most], order[:, most : 2 * most - kept]
        sets = (first, torch.cat((first[:, :kept], other), 1))
        self.pages = [chosen.sort(1).values.contiguous() for chosen in sets]
        self.selected = torch.full((rows,), most, dtype=torch.int32, device="cuda")
        self.slots = torch.full((rows, width), -1, dtype=torch.int32, device="cuda")
        self.workspace = ops.Workspace("cuda")
        self.missing = most - kept
        self.rows, self.most, self.width = rows, most, width

    def ours(self, turn: int) -> ops.Recycled:
        given = (self.pages[turn], self.selected, self.slots)
        return ops.recycle_pages(*given, limit=LIMIT, workspace=self.workspace)

    def by_torch(self, turn: int) -> torch.Tensor:
        """Full rows without pins; moves are not listed."""
        pages, slots = self.pages[turn].long(), self.slots.long()
        wanted = torch.zeros(self.rows, LIMIT + 1, dtype=torch.bool, device="cuda")
        wanted.scatter_(1, pages, True)
        held = torch.where(slots < 0, LIMIT, slots)
        numbers = torch.arange(self.width, device="cuda").expand(self.rows, -1)
        where = torch.full((self.rows, LIMIT + 1), -1, device="cuda").scatter_(1, held, numbers)
        places = where.gather(1, pages)
        missing = places < 0
        left = (~wanted.gather(1, held)).byte().argsort(dim=1, descending=True, stable=True)
        taken = left.gather(1, (missing.cumsum(1) - 1).clamp(min=0))
        places = torch.where(missing, taken, places)
        self.slots.scatter_(1, places, self.pages[turn])
        return places

    def check(self) -> None:
        """Both ways from one selection to the other, against torch's."""
        for turn in (0, 1, 0):
            before = self.slots.clone()
            found = self.ours(turn)
            after = self.slots.clone()
            self.slots.copy_(before)
            expect(torch.equal(found.places, self.by_torch(turn).int()), "places: expected torch's")
            expect(torch.equal(after, self.slots), "slots: expected torch's")
            expect(not bool(found.refused.any()), "rows: expected none to be refused")
        wanted = self.rows * self.missing
        expect(int(self.ours(1).count) == wanted, f"moves: expected {wanted}")

    def in_turns(self, call: Callable[[int], Any]) -> Callable[[], None]:
        """Graphs of both selections, replayed one after the other."""
        graphs = [replayed(partial(call, turn)) for turn in (0, 1)]
        calls = 0

        def replay() -> None:
            nonlocal calls
            graphs[calls % 2]()
            calls += 1

        return replay


@dataclass(frozen=True)
class Moving:
    """Pages of a size in two arenas, and moves of all of them in any order."""

    slots: ops.RowPages
    home: ops.RowPages
    moves: torch.Tensor
    count: torch.Tensor
    # The tables where the copy engine wants them: on the host.
    table: torch.Tensor
    steps: torch.Tensor
    counted: torch.Tensor

    @classmethod
    def of(cls, pages: int, size: int) -> Moving:
        generator = torch.Generator().manual_seed(size)
        order = torch.randperm(pages, generator=generator)
        steps = torch.stack((0 * order, order, torch.arange(pages)), 1).int()
        numbers = torch.arange(pages, dtype=torch.int32).view(1, -1)
        moves, table = steps.cuda(), numbers.cuda()
        home = torch.empty(pages, size, dtype=torch.uint8, pin_memory=True)
        home.view(torch.int32).random_(generator=generator)
        slots = torch.zeros(pages, size, dtype=torch.uint8, device="cuda")
        counted = torch.tensor([pages], dtype=torch.int32)
        sides = ops.RowPages(slots, table), ops.RowPages(home, table)
        return cls(*sides, moves, counted.cuda(), numbers, steps, counted)

    def carry(self, way: Any, processors: int) -> None:
        sides = (self.moves, self.count, self.slots, self.home)
        ops.move_pages(*sides, way=way, processors=processors)

    def carry_by_engine(self, way: Any) -> None:
        """The same by the copy engine, page by page."""
        sides = (ops.RowPages(side.data, self.table) for side in (self.slots, self.home))
        ops.move_pages(self.steps, self.counted, *sides, way=way, processors=0)

    def copy(self, way: str) -> None:
        """All bytes at once, in the order that they have."""
        slots, home = self._arenas()
        target, source = (slots, home) if way == "fetch" else (home, slots)
        target.copy_(source, non_blocking=True)

    def copy_pages(self, way: str) -> None:
        slots, home = self._arenas()
        target, source = (slots, home) if way == "fetch" else (home, slots)
        for to, page in zip(target, source, strict=True):
            to.copy_(page, non_blocking=True)

    def check(self) -> None:
        slots, home = self._arenas()
        self.carry("fetch", 2)
        order = self.moves[:, 1].cpu().long()
        expect(torch.equal(slots.cpu(), home[order]), "fetch: expected the bytes of home")
        kept = home.clone()
        home.zero_()
        self.carry("spill", 2)
        torch.cuda.synchronize()
        expect(torch.equal(home, kept), "spill: expected the bytes that were fetched")
        slots.zero_()
        self.carry_by_engine("fetch")
        expect(torch.equal(slots.cpu(), home[order]), "copies: expected the bytes of home")

    def _arenas(self) -> tuple[torch.Tensor, torch.Tensor]:
        slots, home = self.slots.data, self.home.data
        assert isinstance(slots, torch.Tensor)
        assert isinstance(home, torch.Tensor)
        return slots, home


def run(quick: bool) -> list[Row]:
    device = torch.device("cuda")
    clock, effort = DeviceClock(device), QUICK if quick else FULL
    ceilings = measure(clock, device, effort)
    rows = [Row("a launch", ceilings.launch_s * 1e6, "µs", None, {})]
    for shape in RECYCLED[:1] if quick else RECYCLED:
        rows.append(_recycled(shape, clock, effort, ceilings))
    for size in PAGES[2:3] if quick else PAGES:
        rows += _moved(MOVED // size, size, clock, effort)
    rows += _rounded(MOVED // (8 * KIB), clock, effort)
    for pages in () if quick else FEW:
        rows += _moved(pages, 8 * KIB, clock, effort)
    return rows + _beside(3 if quick else ROUNDS)


def _recycled(
    shape: tuple[int, int, float, float | None],
    clock: DeviceClock,
    effort: Effort,
    ceilings: Ceilings,
) -> Row:
    most, width, missing, wanted = shape
    rows = REQUESTS * LAYERS * KV_HEADS
    case = Recycling(rows, most, width, missing)
    case.check()
    calls = {"ours": case.in_turns(case.ours), "torch": case.in_turns(case.by_torch)}
    # Each has the slots as its own last call left them.
    timed = {name: clock.time({name: call}, effort)[name] for name, call in calls.items()}
    numbers = rows * (2 * most + width + 2) + 4 * rows * case.missing
    beside = {
        "floor µs": (4 * numbers / ceilings.read + ceilings.launch_s) * 1e6,
        **({} if wanted is None else {"asked for µs": wanted}),
        "torch µs": timed["torch"].median_s * 1e6,
    }
    name = f"recycle {rows} × {most} of {width} slots, {missing:.0%} missing"
    return Row(name, timed["ours"].median_s * 1e6, "µs", timed["ours"].p95_s * 1e6, beside)


def _moved(pages: int, size: int, clock: DeviceClock, effort: Effort) -> list[Row]:
    case = Moving.of(pages, size)
    case.check()
    found = []
    for way in ("fetch", "spill"):
        calls: dict[str, Callable[[], Any]] = {
            **{f"{n}": replayed(partial(case.carry, way, n)) for n in (1, 2, 4)},
            "one copy": partial(case.copy, way),
        }
        if size >= LARGE:
            calls["copy engine"] = partial(case.carry_by_engine, way)
        if pages <= SEPARATE:
            calls["a copy a page"] = partial(case.copy_pages, way)
        timed = clock.time(calls, effort)
        rates = {name: pages * size / timing.median_s / 1e9 for name, timing in timed.items()}
        beside: dict[str, Any] = {
            "share of one copy": rates["2"] / rates["one copy"],
            "asked for": 0.93,
            **{f"{n} processors GB/s": rates[f"{n}"] for n in (1, 4)},
            "one copy GB/s": rates["one copy"],
        }
        for name in ("copy engine", "a copy a page"):
            if name in rates:
                beside[f"{name} GB/s"] = rates[name]
        title = f"{way} {pages} pages of {size / KIB:g} KiB"
        found.append(Row(title, rates["2"], "GB/s", None, beside))
    return found


def _rounded(pages: int, clock: DeviceClock, effort: Effort) -> list[Row]:
    """Pages of 8 KiB in bf16 that are fp8 in the host's memory, beside whole ones."""
    case = Moving.of(pages, 8 * KIB)
    slots = torch.randn(pages, 2, 2 * KIB, device="cuda").bfloat16()
    wanted, table = slots[:64].clone(), case.slots.blocks
    home = torch.empty(pages, 2, 2 * KIB, dtype=torch.float8_e4m3fn).pin_memory()
    scales = torch.zeros(pages, 2, dtype=torch.uint8, device="cuda")
    ends = ops.RowPages(slots, table), ops.RowPages(home, table, 1, scales)

    def carry(way: Any) -> None:
        ops.move_pages(case.moves, case.count, *ends, way=way)

    carry("spill")
    slots.zero_()
    carry("fetch")
    near = torch.allclose(slots[:64].float(), wanted.float(), rtol=0.07, atol=0.02)
    expect(near, "fetch: expected what was spilled, rounded")
    found = []
    for way in ("fetch", "spill"):
        calls = {
            "fp8": replayed(partial(carry, way)),
            "whole": replayed(partial(case.carry, way, 2)),
        }
        timed = clock.time(calls, effort)
        taken = timed["fp8"].median_s
        beside = {
            "whole pages ÷ this": timed["whole"].median_s / taken,
            "GB/s on the bus": pages * 4 * KIB / taken / 1e9,
        }
        found.append(Row(f"{way} {pages} pages of 8 KiB as fp8", taken * 1e6, "µs", None, beside))
    return found


def _beside(rounds: int) -> list[Row]:
    """A step's layers alone, and while pages are carried: how much longer they take.

    Beside one copy of as many bytes by the copy engine it takes what the memory alone costs.
    """
    layers = Layers(Layer.of(40, 10_240, 64))
    case, large = (Moving.of(4 * MOVED // size, size) for size in (8 * KIB, 256 * KIB))
    carried: dict[str, Callable[[], Any]] = {
        **{f"a fetch on {n} processors": partial(case.carry, "fetch", n) for n in (1, 2, 4)},
        **{f"a spill on {n} processors": partial(case.carry, "spill", n) for n in (1, 2, 4)},
        "pages of 256 KiB fetched by the copy engine": partial(large.carry_by_engine, "fetch"),
        "one copy fetched by the copy engine": partial(case.copy, "fetch"),
        "one copy spilled by the copy engine": partial(case.copy, "spill"),
    }
    computed = {"attention": layers.attend, "attention and products": layers.decode}
    found = []
    for computes, call in computed.items():
        usual = torch.cuda.current_stream()
        first = torch.cuda.Stream(priority=-1)
        for order, stream, beside in (("", usual, carried), (", first,", first, some_of(carried))):
            graph = replayed(call, first if order else None)
            with torch.cuda.stream(stream):
                for name, carry in beside.items():
                    title = f"{computes} of {DECODED} layers{order} beside {name}"
                    found.append(slowed(title, graph, carry, rounds, 4 * MOVED))
    return found


def some_of(carried: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """What two processors carry, and one copy."""
    return {name: carry for name, carry in carried.items() if " 2 " in name or "one copy" in name}


class Layers:
    """Layers of a decode step at the shape of Llama-3.1-8B, all of the same attention."""

    def __init__(self, layer: Layer) -> None:
        of = {"dtype": torch.bfloat16, "device": "cuda"}
        self._layer = layer
        self._weights = [[torch.randn(*shape, **of) for shape in PRODUCTS] for _ in range(DECODED)]
        self._rows = {n: torch.randn(layer.requests, n, **of) for n, _ in PRODUCTS}

    def attend(self) -> None:
        for _ in range(DECODED):
            self._layer.attend_to_all()

    def decode(self) -> None:
        for first, *others in self._weights:
            _ = self._rows[first.shape[0]] @ first
            self._layer.attend_to_all()
            for weight in others:
                _ = self._rows[weight.shape[0]] @ weight


def slowed(
    title: str, graph: Callable[[], Any], carry: Callable[[], Any], rounds: int, nbytes: int
) -> Row:
    """What a graph takes while pages of so many bytes are carried, and alone."""
    alone, beside, moved = [], [], []
    side = torch.cuda.Stream(priority=0)
    for _ in range(rounds):
        alone.append(_timed(graph))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):
            begin.record()
            carry()
            end.record()
        beside.append(_timed(graph))
        # It has ended while pages were still carried, or the figure says nothing.
        expect(not end.query(), "moves: expected them to last longer than what is beside them")
        end.synchronize()
        moved.append(begin.elapsed_time(end) / 1e3)
    of = {
        "alone ms": median(alone) * 1e3,
        "slower by": median(beside) / median(alone) - 1,
        "asked for": 0.03,
        "carried GB/s": nbytes / median(moved) / 1e9,
    }
    return Row(title, median(beside) * 1e3, "ms", None, of)


def _timed(call: Callable[[], Any]) -> float:
    """Seconds of a call on the current stream, which is waited for."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3

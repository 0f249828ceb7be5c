"""One call of every op on static CUDA tensors, for tests of streams and graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvweave import ops
from page_rows import PageRows
from paged import paged, reads, rope_table

TOKENS, HEADS, KV_HEADS, DIM, PAGE = 90, 4, 2, 64, 16
FP8 = torch.float8_e4m3fn


@dataclass
class Step:
    """An op bound to tensors that stay where they are, on the device or on the host.

    `call` runs it and returns all that it wrote. `renew` makes new numbers for every input, by
    name and of the input's shape. `host_tables`: whether it takes tables of the host too.
    """

    call: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]
    renew: Callable[[torch.Generator], dict[str, torch.Tensor]]
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    host_tables: bool = True

    def run(self) -> tuple[torch.Tensor, ...]:
        return self.call(self.inputs)

    def place(self, numbers: dict[str, torch.Tensor]) -> None:
        """Puts numbers where the op reads them, on the current stream."""
        for name, values in numbers.items():
            self.inputs[name].copy_(values, non_blocking=True)

    def wanted(self, numbers: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The same on the host."""
        return self.call({name: values.clone() for name, values in numbers.items()})


def steps(dtype: torch.dtype) -> dict[str, Step]:
    """Every op, its inputs on the device holding zeros and its tables pointing nowhere."""
    made = {
        "attend_decode": attend_decode(dtype),
        "attend_prefill": attend_prefill(dtype),
        "score_tokens": score_tokens(dtype),
        "merge_states": merge_states(dtype),
        "write_pages": write_pages(dtype),
        "copy_rerotate": copy_rerotate(dtype),
        "rotate_rows": rotate_rows(dtype),
        "step_tables": step_tables(),
        "bound_pages": bound_pages(dtype),
        "score_pages": score_pages(dtype),
        "select_pages": select_pages(),
        "gather_entries": gather_entries(),
        "estimate_pages": estimate_pages(dtype),
        "pack_pages": pack_pages(dtype),
        "recycle_pages": recycle_pages(),
        "move_pages": move_pages(dtype),
        "move_fp8_pages": move_fp8_pages(dtype),
    }
    for step in made.values():
        numbers = step.renew(torch.Generator().manual_seed(0))
        step.inputs = {name: torch.zeros_like(x, device="cuda") for name, x in numbers.items()}
    return made


NAMES = ["attend_decode", "attend_prefill", "score_tokens", "merge_states", "write_pages"]
NAMES += ["copy_rerotate", "rotate_rows", "step_tables", "bound_pages", "score_pages"]
NAMES += ["select_pages", "gather_entries", "pack_pages", "recycle_pages", "move_pages"]
NAMES += ["move_fp8_pages"]
NAMES += ["estimate_pages"]


def scoring(rope: ops.RopeTable) -> dict:
    return {"kv_heads": KV_HEADS, "scale": DIM**-0.5, "rope": rope}


def attended(generator: torch.Generator, rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    case = paged(
        generator, TOKENS, layers=1, kv_heads=KV_HEADS, head_dim=DIM, page_tokens=PAGE, dtype=dtype
    )
    return {
        "pages": case.pages.clone(),
        "q": torch.randn(rows, HEADS, DIM, generator=generator).to(dtype),
        "positions": torch.randint(0, TOKENS, (rows,), generator=generator).int(),
        "entries": torch.from_numpy(case.entries),
    }


def attend_decode(dtype: torch.dtype) -> Step:
    rope = rope_table(1, DIM)

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = attended(generator, 3, dtype)
        count = len(made["entries"])
        offsets = torch.arange(4, dtype=torch.int32) * count
        return {**made, "entries": made["entries"].repeat(3, 1), "offsets": offsets}

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return reads(
            ops.attend_decode,
            t["q"],
            t["positions"],
            t["entries"],
            t["pages"],
            0,
            entry_offsets=t["offsets"],
            **scoring(rope),
        )

    return Step(call, renew)


def attend_prefill(dtype: torch.dtype) -> Step:
    rope = rope_table(1, DIM)

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return reads(
            ops.attend_prefill, t["q"], t["positions"], t["entries"], t["pages"], 0, **scoring(rope)
        )

    return Step(call, lambda generator: attended(generator, 70, dtype))


def score_tokens(dtype: torch.dtype) -> Step:
    rope = rope_table(1, DIM)

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {**attended(generator, 20, dtype), "share": torch.full((20, HEADS), torch.nan)}

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        mass = reads(
            ops.score_tokens,
            t["q"],
            t["positions"],
            t["entries"],
            t["pages"],
            0,
            edge=ops.EdgeMass(t["share"], window=20, sink=2),
            tokens=TOKENS,
            **scoring(rope),
        )
        return mass, t["share"]

    return Step(call, renew)


def merge_states(dtype: torch.dtype) -> Step:
    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        outs = torch.randn(5, 7, HEADS, DIM, generator=generator).to(dtype)
        return {"outs": outs, "lses": torch.randn(5, 7, HEADS, generator=generator)}

    return Step(lambda t: ops.merge_states(t["outs"], t["lses"]), renew)


def write_pages(dtype: torch.dtype) -> Step:
    blocks, step = 8, 2 * KV_HEADS

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        shape = (30, KV_HEADS, DIM)
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        places = torch.randperm(blocks * PAGE, generator=generator)[:30].int()
        slots = torch.stack((step * (1 + places // PAGE), places % PAGE), 1)
        pages = torch.randn(step * (blocks + 1), 2, PAGE, DIM, generator=generator).to(dtype)
        held = torch.tensor([[step * (1 + block), block, PAGE] for block in range(blocks)]).int()
        bounds = torch.full((len(pages), 3, DIM), -7.0)
        return {"pages": pages, "k": k, "v": v, "slots": slots, "held": held, "bounds": bounds}

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        bounds = ops.PageBounds(t["bounds"], t["held"])
        ops.write_pages(t["pages"], 1, t["k"], t["v"], t["slots"], bounds=bounds)
        return t["pages"], t["bounds"]

    return Step(call, renew)


def bound_pages(dtype: torch.dtype) -> Step:
    blocks, step = 8, 2 * KV_HEADS

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        order = torch.randperm(blocks, generator=generator)
        held = torch.stack((step * order, 0 * order, 1 + order % PAGE), 1)
        pages = torch.randn(step * blocks, 2, PAGE, DIM, generator=generator).to(dtype)
        # One row names the null block.
        held = torch.cat((held[order > 0], -torch.ones(1, 3))).int()
        sizes = len(pages), 2, DIM
        return {
            "pages": pages,
            "held": held,
            "bounds": torch.full((len(pages), 3, DIM), -7.0),
            "fp8": torch.full(sizes, -7.0).to(FP8),
            "scales": torch.full(sizes[:1], 7, dtype=torch.uint8),
        }

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        named = t["held"] if t["held"].is_cuda else t["held"][t["held"][:, 0] > 0]
        ops.bound_pages(t["pages"], ops.PageBounds(t["bounds"], named), pages=step)
        rounded = ops.PageBounds(t["fp8"], named, scales=t["scales"])
        ops.bound_pages(t["pages"], rounded, pages=step)
        return t["bounds"], t["fp8"].view(torch.uint8), t["scales"]

    return Step(call, renew)


def pack_pages(dtype: torch.dtype) -> Step:
    of, blocks = ops.PackedFormat("int4", DIM, 2 * PAGE), 8

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        pages = torch.randn(KV_HEADS * (blocks + 1), 2, PAGE, DIM, generator=generator).to(dtype)
        sources = KV_HEADS * (1 + torch.randperm(blocks, generator=generator)).view(-1, 2)
        targets = KV_HEADS * (1 + torch.randperm(len(sources), generator=generator))
        tokens = torch.randint(1, 2 * PAGE + 1, targets.shape, generator=generator)
        packs = torch.cat((targets[:, None], tokens[:, None], sources), 1).int()
        packed = torch.full((KV_HEADS * (len(packs) + 1), of.page_bytes), 0x5A).to(torch.uint8)
        return {"pages": pages, "packs": packs, "packed": packed}

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ops.pack_pages(t["pages"], ops.PackedPages(t["packed"], of), t["packs"], pages=KV_HEADS)
        return (t["packed"],)

    return Step(call, renew)


def copy_rerotate(dtype: torch.dtype) -> Step:
    rope, blocks, step = rope_table(2, DIM), 8, 2 * KV_HEADS

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        pages = torch.randn(step * (blocks + 1), 2, PAGE, DIM, generator=generator).to(dtype)
        order = step * (1 + torch.randperm(blocks, generator=generator).int())
        source, target = order.view(2, blocks // 2)
        first = torch.randint(0, 4, source.shape, generator=generator).int()
        delta = torch.randint(-50, 50, source.shape, generator=generator).int()
        copies = torch.stack((source, first, target, 3 - first, 12 + 0 * first, delta), 1)
        return {"pages": pages, "copies": copies}

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ops.copy_rerotate(t["pages"], t["copies"], rope, kv_heads=KV_HEADS)
        return (t["pages"],)

    return Step(call, renew)


def rotate_rows(dtype: torch.dtype) -> Step:
    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        q, k = (torch.randn(30, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS))
        angles = 100 * torch.rand(30, DIM // 2, generator=generator).repeat(1, 2)
        made = {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}
        return {name: x.to(dtype) for name, x in made.items()}

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ops.rotate_rows(t["q"], t["k"], t["cos"], t["sin"])
        return t["q"], t["k"]

    return Step(call, renew)


def step_tables() -> Step:
    spans = [(0, 0, 6), (20, 5, 4)]

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        rows = 1 + torch.randperm(4, generator=generator).int()
        return {
            "blocks": torch.randint(0, 50, (4, 6), generator=generator).int(),
            "lengths": torch.randint(5, TOKENS, (4,), generator=generator).int(),
            "query_start": torch.cat((torch.zeros(1), rows.cumsum(0))).int(),
            "slot_mapping": torch.randint(-1, 50 * PAGE, (12,), generator=generator),
            "places": torch.randint(0, 99, (2, 50), generator=generator).int(),
        }

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        sizes = {"requests": 4, "rows": 12, "entries": 40, "tables": 2}
        out = ops.StepTables.empty(t["blocks"].device, **sizes)
        out.entries.zero_()
        return ops.step_tables(**t, page_tokens=PAGE, spans=spans, out=out)

    return Step(call, renew, host_tables=False)


def score_pages(dtype: torch.dtype) -> Step:
    rope, blocks = rope_table(1, DIM), 30
    # Every other table is read: what lies between two of them is nobody's.
    reach = ops.Reach(2, np.array([[0, 0, 0, 0], [0, 1, 0, 0]], np.int32))

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        block = torch.randint(0, blocks, (60,), generator=generator) * KV_HEADS
        delta = torch.randint(-1, 2, (60,), generator=generator) * 70
        columns = (block, 0 * block, 0 * block + PAGE, PAGE * torch.arange(60), delta)
        begin = 20 * torch.arange(3)
        end = begin + torch.randint(0, 20, (3,), generator=generator)
        return {
            "q": torch.randn(3, HEADS, DIM, generator=generator).to(dtype),
            "bounds": torch.randn(blocks * KV_HEADS, 3, DIM, generator=generator),
            "fp8": torch.randn(blocks * KV_HEADS, 2, DIM, generator=generator).to(FP8),
            "scales": torch.randint(125, 129, (blocks * KV_HEADS,), generator=generator).byte(),
            "entries": torch.stack(columns, 1).int(),
            "offsets": torch.cat((torch.stack((begin, end), 1).flatten(), begin[:1])).int(),
        }

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        pages = ops.BoundedPages(t["bounds"], PAGE, 0, KV_HEADS, DIM**-0.5, rope, reach=reach)
        listed = {"entry_offsets": t["offsets"], "width": 25}
        exact = ops.score_pages(t["q"], t["entries"], pages, **listed)
        pages = replace(pages, bounds=t["fp8"], scales=t["scales"])
        return *exact, *ops.score_pages(t["q"], t["entries"], pages, **listed)

    return Step(call, renew)


def select_pages() -> Step:
    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            # Few numbers, so that many are equal.
            "scores": torch.randint(-3, 3, (6, 3000), generator=generator).float(),
            "counts": torch.randint(0, 3001, (6,), generator=generator).int(),
            "budgets": torch.randint(3, 41, (6,), generator=generator).int(),
        }

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tables = t["counts"], t["budgets"]
        return ops.select_pages(t["scores"], *tables, sink=1, recent=2, most=40)

    return Step(call, renew)


def gather_entries() -> Step:
    reach = ops.Reach(2, np.array([[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], np.int32))

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        lengths = torch.randint(10, 20, (8,), generator=generator)
        return {
            "pages": torch.randint(0, 10, (4, 3, 6), generator=generator).int(),
            "selected": torch.randint(0, 7, (4, 3), generator=generator).int(),
            "entries": torch.randint(0, 99, (160, 5), generator=generator).int(),
            "offsets": torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
        }

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        chosen, ends = (t["pages"], t["selected"]), t["offsets"]
        return ops.gather_entries(*chosen, t["entries"], entry_offsets=ends, reach=reach)

    return Step(call, renew, host_tables=False)


def estimate_pages(dtype: torch.dtype) -> Step:
    rope, blocks = rope_table(1, DIM), 30
    # As for `score_pages`; what was read has tables of the same form.
    reach = ops.Reach(2, np.array([[0, 0, 0, 0], [0, 1, 0, 0]], np.int32))

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = score_pages(dtype).renew(generator)
        begin = made["offsets"][:-1:2]
        end = begin + torch.randint(0, 9, (3,), generator=generator)
        return {
            "q": made["q"],
            "out": torch.randn(3, HEADS, DIM, generator=generator).to(dtype),
            "lse": torch.randn(3, HEADS, generator=generator),
            "means": torch.randn(blocks * KV_HEADS, 2, DIM, generator=generator).to(dtype),
            "entries": made["entries"],
            "offsets": made["offsets"],
            "ends": torch.cat((torch.stack((begin, end), 1).flatten(), begin[:1])).int(),
        }

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        means = t["means"] if t["means"].is_cuda else t["means"].float()
        pages = ops.PageMeans(means, PAGE, 0, KV_HEADS, DIM**-0.5, rope, reach=reach)
        read = ops.ReadEntries(t["entries"], t["ends"], reach)
        given = t["q"], (t["out"], t["lse"]), t["entries"], pages
        return ops.estimate_pages(*given, entry_offsets=t["offsets"], read=read)

    return Step(call, renew)


def recycle_pages() -> Step:
    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        seed = int(torch.randint(2**31, (1,), generator=generator))
        case = PageRows.drawn(np.random.default_rng(seed), 50, 40, 60, 300)
        pages, selected, slots, pinned = case.on("cpu")
        return {"pages": pages, "selected": selected, "room": slots, "pins": pinned}

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        chosen = t["pages"], t["selected"], t["room"]
        found = ops.recycle_pages(*chosen, limit=300, pinned=t["pins"])
        # What lies behind the count is anything.
        listed = torch.arange(len(found.moves), device=found.count.device) < found.count
        moves = torch.where(listed[:, None], found.moves, 0)
        return t["room"], found.places, moves, found.count, found.refused

    return Step(call, renew, host_tables=False)


def move_pages(dtype: torch.dtype) -> Step:
    rows, width, limit = 6, 5, 12

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        def numbers(columns: int) -> torch.Tensor:
            order = torch.randperm(rows // 2 * columns, generator=generator)
            return (2 * order).int().view(-1, columns)

        row, slot = torch.arange(rows * width) // width, torch.arange(rows * width) % width
        page = 2 * slot + torch.randint(0, 2, slot.shape, generator=generator)
        order = torch.randperm(len(row), generator=generator)
        shape = (2, PAGE, DIM)
        return {
            "moves": torch.stack((row, page, slot), 1)[order].int(),
            "count": torch.randint(0, len(row) + 1, (1,), generator=generator).int(),
            "arena": torch.randn(rows * width, *shape, generator=generator).to(dtype),
            "home": torch.randn(rows * limit, *shape, generator=generator).to(dtype),
            "of_slots": numbers(width),
            "of_home": numbers(limit),
        }

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        sides = ops.RowPages(t["arena"], t["of_slots"], 2), ops.RowPages(t["home"], t["of_home"], 2)
        ops.move_pages(t["moves"], t["count"], *sides, way="fetch")
        return (t["arena"],)

    return Step(call, renew)


def move_fp8_pages(dtype: torch.dtype) -> Step:
    pages, page = 40, (2, PAGE, DIM)
    table = torch.arange(pages, dtype=torch.int32)

    def renew(generator: torch.Generator) -> dict[str, torch.Tensor]:
        order = torch.randperm(pages, generator=generator)
        return {
            "moves": torch.stack((0 * order, order, order.flip(0)), 1).int(),
            "count": torch.randint(0, pages + 1, (1,), generator=generator).int(),
            "arena": torch.randn(pages, *page, generator=generator).to(dtype),
            "home": torch.zeros(pages, *page).to(FP8),
            "scales": torch.zeros(pages, 2, dtype=torch.uint8),
            "blocks": table[None].clone(),
        }

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        slots = ops.RowPages(t["arena"], t["blocks"])
        home = ops.RowPages(t["home"], t["blocks"], 1, t["scales"])
        ops.move_pages(t["moves"], t["count"], slots, home, way="spill")
        ops.move_pages(t["moves"], t["count"], slots, home, way="fetch")
        return t["arena"], t["home"].float(), t["scales"]

    return Step(call, renew)

"""Virtual pages as the vLLM plugin keeps them: layouts, holders and tables. Needs no vLLM."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, Unsupported, ops
from kvweave._native import VirtualPages
from kvweave.adapters.vllm.backend.attention_span import AttentionSpan
from kvweave.adapters.vllm.backend.step_tables import Entries, StepBatch, StepLayout
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout, layout_of
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory
from kvweave.adapters.vllm.virtual_pages.residency import Residency
from kvweave.errors import KvweaveError, PoolFull
from paged import dense_attention, reads, rope_table
from versions import needs_cuda

FULL = {"kind": "full"}
WINDOW = {"kind": "window", "sink": 20, "recent": 40}
P = 16

kinds = st.sampled_from([FULL, WINDOW, {"kind": "window", "sink": 0, "recent": 24}])


@st.composite
def layouts(draw) -> PageLayout:
    layers, heads = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 3))
    classes = [[draw(kinds) for _ in range(ranks * heads)] for _ in range(layers)]
    return layout_of(classes, P, ranks)


def test_a_full_model_has_one_block_a_page() -> None:
    layout = layout_of([[FULL] * 8] * 32, P)
    assert (layout.block_pages, layout.parts, layout.head_slots) == (256, (1,), 8)
    assert layout.head_rows(3).tolist() == [[0, 24 + head, 0, 0] for head in range(8)]


def test_an_eighth_of_global_heads_is_charged_an_eighth() -> None:
    layout = layout_of([[WINDOW] * 3 + [FULL] + [WINDOW] * 4] * 32, P)
    assert (layout.block_pages, layout.parts, layout.head_slots) == (32, (7, 1), 1)
    # 64K tokens: every page of the global heads, and the sink, the window and 64 rows of the rest.
    assert layout.most_blocks(65536, 64) == 4096 + 7 * (2 + 7 + 1)


@given(layouts())
def test_every_head_has_a_page_of_its_own(layout: PageLayout) -> None:
    for rank in range(layout.ranks):
        of_layers = [layout.head_rows(layer, rank) for layer in range(layout.layers)]
        rows = [tuple(row) for of_layer in of_layers for row in of_layer]
        places = Counter((table, page) for table, page, _, _ in rows)
        assert max(places.values()) == 1
        assert all(0 <= page < layout.block_pages for _, page in places)
        classes = [layout.heads_of(layer, rank) for layer in range(layout.layers)]
        spans = [layout.spans[number] for of_layer in classes for number in of_layer]
        for (table, _, window, sink), span in zip(rows, spans, strict=True):
            assert layout.spans[layout.tables[table]] == span
            assert (window or None, sink) == span
    heads = [[layout.heads_of(n, r) for r in range(layout.ranks)] for n in range(layout.layers)]
    assert tuple(sum(of_layer, ()) for of_layer in heads) == layout.of_head


def test_ranks_that_do_not_share_heads_equally_are_refused() -> None:
    with pytest.raises(Unsupported, match="a divisor of 4 KV heads beside a head map, got 3"):
        layout_of([[FULL] * 4], P, 3)


@given(layouts(), st.integers(1, 400), st.integers(1, 80))
def test_what_is_charged_suffices(layout: PageLayout, tokens: int, in_flight: int) -> None:
    """As many virtual pages as a request is charged hold its blocks and its pages."""
    slots = layout.layers * layout.head_slots
    pages = 1 + -(-layout.charged(tokens, in_flight) // layout.head_slots)
    arena = layout.arena_pages(pages)
    assert arena == pages * slots
    blocks = (arena - layout.block_pages) // layout.block_pages
    assert blocks >= layout.most_blocks(tokens, in_flight)
    assert pages - 1 >= -(-tokens // P)


def test_heads_that_choose_are_classes_of_their_own() -> None:
    top_k = [{"kind": "top_k", "pages": pages} for pages in (4, 6)]
    layout = layout_of([[FULL, *top_k, top_k[0]]], P)
    assert layout.spans == (AttentionSpan(),) * 3
    assert (layout.budgets, layout.of_head) == ((0, 4, 6), ((0, 1, 2, 1),))


class Scheduler:
    """Requests that grow, end and find prefixes, and which tokens they see, naively."""

    def __init__(self, layout: PageLayout, virtual_pages: int) -> None:
        self.layout, self.residency = layout, Residency(layout, virtual_pages)
        self.free = list(range(virtual_pages - 1, 0, -1))
        self.requests: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.findable: set[int] = set()
        self.made = 0

    def grow(self, name: str, tokens: int) -> bool:
        pages = self.requests[name]
        fresh = -(-(self.computed[name] + tokens) // P) - len(pages)
        if self.residency.has_left(name, self.computed[name]):
            self.residency.advance(name, pages, self.computed[name], self.findable.__contains__)
            assert not self.residency.has_left(name, self.computed[name])
        room = not self.residency.lacking(fresh, [])
        if not room or fresh > len(self.free):
            return False
        taken = [self.free.pop() for _ in range(fresh)]
        self.findable -= set(taken)
        forgotten = self.residency.extend(name, taken)
        assert not set(forgotten) & set(taken)
        self.findable -= set(forgotten)
        pages.extend(taken)
        self.computed[name] += tokens
        # What is full can be found at once, by its content.
        self.findable |= set(pages[: self.computed[name] // P])
        return True

    def start(self, hit: list[int]) -> str:
        self.made += 1
        name = str(self.made)
        self.residency.adopt(name, hit)
        self.free = [page for page in self.free if page not in hit]
        self.requests[name], self.computed[name] = list(hit), len(hit) * P
        return name

    def end(self, name: str) -> None:
        pages = self.requests.pop(name)
        del self.computed[name]
        self.residency.drop(name, pages, self.findable.__contains__)
        held = {page for others in self.requests.values() for page in others}
        self.free = [page for page in pages if page not in held] + self.free

    def check(self) -> None:
        """Every page that some row to come sees is kept, and what is found is whole."""
        pages = self.residency.pages
        pages.check()
        whole = [number for number, span in enumerate(self.layout.spans) if span.window is None]
        found = [(number, page) for number in whole for page in self.findable]
        assert pages.is_kept(np.array(found, np.int32).reshape(-1, 2)).all()
        for name, held in self.requests.items():
            for number, span in enumerate(self.layout.spans):
                seen = [
                    index
                    for index in range(len(held))
                    if span.window is None
                    or (index + 1) * P > self.computed[name] - span.window + 1
                    or index * P < span.sink
                ]
                rows = np.array([[number, held[i]] for i in seen], np.int32).reshape(-1, 2)
                assert pages.is_kept(rows).all()


@settings(max_examples=60)
@given(layouts(), st.data())
def test_what_rows_see_is_kept(layout: PageLayout, data: st.DataObject) -> None:
    scheduler = Scheduler(layout, data.draw(st.integers(12, 60)))
    for _ in range(data.draw(st.integers(1, 25))):
        names = sorted(scheduler.requests)
        step = data.draw(st.sampled_from(["start", "grow", "grow", "grow", "end", "hit"]))
        if step == "start" or not names:
            scheduler.start([])
        elif step == "grow":
            scheduler.grow(data.draw(st.sampled_from(names)), data.draw(st.integers(1, 60)))
        elif step == "end":
            scheduler.end(data.draw(st.sampled_from(names)))
        else:
            name = data.draw(st.sampled_from(names))
            whole = scheduler.requests[name][: scheduler.computed[name] // P]
            scheduler.start(whole[: scheduler.residency.longest_hit(whole)])
        scheduler.check()
    for name in sorted(scheduler.requests):
        scheduler.end(name)
    assert scheduler.residency.pages.stats()["held"] == 0


@settings(max_examples=60)
@given(layouts(), st.integers(1, 400), st.integers(1, 80), st.data())
def test_a_request_that_is_alone_always_fits(
    layout: PageLayout, most: int, chunk: int, data: st.DataObject
) -> None:
    """In the least arena for its length, after whatever was cached: it is let in, and it ends."""
    pages = 1 + -(-layout.charged(most, chunk) // layout.head_slots)
    scheduler = Scheduler(layout, pages)
    held: list[int] = []
    for _ in range(3):
        whole = held[: data.draw(st.integers(0, len(held)))]
        hit = [page for page in whole if page in scheduler.findable]
        hit = hit[: scheduler.residency.longest_hit(hit)] if hit == whole else []
        tokens = data.draw(st.integers(max(len(hit) * P, 1), most))
        assert not scheduler.residency.lacking_in_time(tokens, chunk, hit)
        name = scheduler.start(hit)
        while scheduler.computed[name] < tokens:
            rows = min(chunk, tokens - scheduler.computed[name])
            assert scheduler.grow(name, rows), "a request that was let in got stuck"
            scheduler.check()
        held = scheduler.requests[name]
        scheduler.end(name)


gaps = st.sets(st.tuples(st.integers(0, 2), st.integers(1, 20)), max_size=4)


@given(layouts(), st.integers(1, 20), gaps)
def test_a_hit_is_the_longest_that_windows_allow(
    layout: PageLayout, count: int, missing: set[tuple[int, int]]
) -> None:
    pages = list(range(1, count + 1))
    residency = Residency(layout, 200)
    classes = range(len(layout.spans))
    kept = {(number, page) for number in classes for page in pages} - missing
    residency.pages.take(np.array(sorted(kept), np.int32).reshape(-1, 2))

    def goes_on(hit: int) -> bool:
        for number, span in enumerate(layout.spans):
            for index in range(hit):
                out = span.window is not None and (index + 1) * P <= hit * P - span.window + 1
                if (not out or index * P < span.sink) and (number, pages[index]) not in kept:
                    return False
        return True

    wanted = max(hit for hit in range(count + 1) if goes_on(hit))
    assert residency.longest_hit(pages) == wanted


def tables_of(layout: PageLayout, memory: PageMemory, batch: StepBatch) -> ops.StepTables:
    """What a step's tables are, as `VirtualMetadata` makes them."""
    spans = [layout.spans[number] for number in layout.tables]
    step = StepLayout(P, spans, virtual=True)
    columns = step.columns(batch.longest, batch.most_rows)
    room = step.room(memory.tables.device, batch.requests, batch.rows, columns)
    tables = step.fill(room, batch, columns, memory.tables)
    return tables._replace(entries=Entries.of(tables).rows)


def memory_of(layout: PageLayout, virtual_pages: int, device: str, dim: int = 16) -> PageMemory:
    """What vLLM allocates: one run, layer after layer."""
    shape = (layout.layers, virtual_pages, layout.head_slots, P, 2 * dim)
    caches = torch.zeros(shape, device=device)
    return PageMemory(layout, {str(layer): caches[layer] for layer in range(layout.layers)})


def test_layers_that_lie_apart_are_refused() -> None:
    layout = layout_of([[FULL], [FULL]], P)
    parts = {name: torch.zeros(4, 1, P, 32) for name in "ab"}
    with pytest.raises(Unsupported, match="expected 2 layers in one allocation"):
        PageMemory(layout, parts)
    with pytest.raises(Unsupported, match="expected 2 layers in one allocation"):
        PageMemory(layout, {"a": parts["a"]})


CLASSES = [[FULL, WINDOW, WINDOW], [WINDOW, FULL, WINDOW], [FULL, FULL, WINDOW]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("rows", [[3, 130, 1, 16], [1, 1, 1, 1]], ids=["mixed", "decode"])
def test_attention_through_virtual_pages_is_dense(rows: list[int], device: str) -> None:
    """Requests computed at once or after the rest of theirs; windows given up before the rows."""
    generator = torch.Generator().manual_seed(2)
    layout, dim = layout_of(CLASSES, P), 16
    lengths = [63, 130, 1, 16]
    residency = Residency(layout, 120)
    memory = memory_of(layout, 120, device, dim)
    residency.pages.take(np.array([[0, 119]], np.int32))
    numbers = np.random.default_rng(3).permutation(np.arange(1, 110)).tolist()
    pages = [[numbers.pop() for _ in range(-(-length // P))] for length in lengths]
    width = max(map(len, pages))
    blocks = torch.tensor([row + [0] * (width - len(row)) for row in pages], dtype=torch.int32)
    shape = (layout.layers, sum(lengths), 3, dim)
    k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    for request, held in enumerate(pages):
        residency.extend(str(request), held)
    # Everything before the rows in one step, then the rows.
    firsts = [length - count for length, count in zip(lengths, rows, strict=True)]
    steps = [([0] * 4, firsts), (firsts, lengths)]
    starts = np.cumsum([0, *lengths[:-1]])
    for begin, end in steps:
        for request, held in enumerate(pages):
            residency.advance(str(request), held, begin[request], lambda page: False)
        memory.apply(residency.pages.take_changes())
        chosen = [r for r in range(4) if end[r] > begin[r]]
        counts = torch.tensor([end[r] - begin[r] for r in chosen])
        offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device)
        at = [np.arange(begin[r], end[r]) for r in chosen]
        mapping = [blocks[r].numpy()[x // P] * P + x % P for r, x in zip(chosen, at, strict=True)]
        batch = StepBatch(
            rows=int(counts.sum()),
            most_rows=int(counts.max()),
            longest=max(end),
            blocks=blocks[chosen].to(device),
            lengths=torch.tensor([end[r] for r in chosen], dtype=torch.int32, device=device),
            row_offsets=offsets,
            slot_mapping=torch.from_numpy(np.concatenate(mapping)).long().to(device),
        )
        tables = tables_of(layout, memory, batch)
        of_rows = np.concatenate([starts[r] + x for r, x in zip(chosen, at, strict=True)])
        for layer in range(layout.layers):
            reach = ops.Reach(len(layout.tables), layout.head_rows(layer))
            new = [x[layer][of_rows].to(device) for x in (k, v)]
            ops.write_pages(memory.arena, 0, *new, tables.slots, reach=reach)
            q = torch.randn((len(of_rows), 6, dim), generator=generator)
            out, _ = reads(
                ops.attend_prefill,
                q.to(device),
                tables.positions,
                tables.entries,
                memory.arena,
                0,
                kv_heads=3,
                scale=0.25,
                rope=rope_table(1, dim),
                reach=reach,
                row_offsets=offsets,
                entry_offsets=tables.offsets,
            )
            wanted = []
            for index, (r, x) in enumerate(zip(chosen, at, strict=True)):
                own = slice(starts[r], starts[r] + end[r])
                rows_of = slice(int(offsets[index]), int(offsets[index + 1]))
                wanted.append(masked(layout, layer, q[rows_of], k[layer][own], v[layer][own], x))
            got = out.cpu().double()
            torch.testing.assert_close(got, torch.cat(wanted), rtol=2e-5, atol=2e-5)
    used = memory.blocks_in_use()
    whole = [n for n, number in enumerate(layout.tables) if layout.spans[number].window is None]
    local = [n for n in range(len(used)) if n not in whole]
    assert max(used[n] for n in local) < min(used[n] for n in whole)


def masked(layout: PageLayout, layer: int, q, k, v, at: np.ndarray) -> torch.Tensor:
    """Each KV head and its two query heads under the head's own mask."""
    outs = []
    row, key = torch.from_numpy(at)[:, None], torch.arange(len(k))
    for head, number in enumerate(layout.of_head[layer]):
        window, sink = layout.spans[number]
        seen = key <= row
        if window is not None:
            seen &= (key > row - window) | (key < sink)
        one = slice(head, head + 1)
        outs.append(
            dense_attention(q[:, 2 * head : 2 * head + 2], k[:, one], v[:, one], seen, 0.25)[0]
        )
    return torch.cat(outs, dim=1)


def test_padding_is_written_nowhere() -> None:
    layout = layout_of(CLASSES, P)
    memory = memory_of(layout, 20, "cpu")
    memory.apply(np.array([[t, 5, 100 + t] for t in range(len(layout.tables))], np.int32))
    one = torch.ones(1, dtype=torch.int32)
    # The last row's page is in no table.
    mapping = torch.tensor([-1, 5 * P + 3, 6 * P])
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    batch = StepBatch(3, 3, 3, 5 * one[None], 3 * one, offsets, mapping)
    found = tables_of(layout, memory, batch).slots
    assert found.shape == (len(layout.tables), 3, 2)
    assert (found[:, 0] == -1).all()
    assert found[:, 1].tolist() == [[100 + t, 3] for t in range(len(layout.tables))]
    assert (found[:, 2] == -1).all()
    memory.apply(np.zeros((0, 3), np.int32))
    assert memory.blocks_in_use() == [1] * len(layout.tables)


def rows(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int32).reshape(-1, 2)


def test_pages_that_cannot_be_had_change_nothing() -> None:
    pages = VirtualPages(10, 5, 1, [1, 2])
    assert pages.stats() == {"total": 4, "free": 4, "held": 0, "cached": 0}
    pages.take(rows((0, 1), (1, 2)))
    pages.take_changes()
    refused = [
        (pages.take, rows((1, 3)), PoolFull),
        (pages.take, rows((0, 1)), InvalidArgument),
        (pages.take, rows((0, 3), (0, 3)), InvalidArgument),
        (pages.take, rows((0, 0)), KvweaveError),
        (pages.take, rows((2, 1)), KvweaveError),
        (pages.take, rows((0, 10)), KvweaveError),
        (pages.hold, rows((0, 2)), InvalidArgument),
        (pages.hold, rows((-1, 2)), InvalidArgument),
        (pages.take, np.zeros((1, 3), np.int32), InvalidArgument),
        (pages.take, np.zeros((1, 2), np.int64), InvalidArgument),
        (lambda given: pages.release(given, keep=True), rows((0, 2)), InvalidArgument),
    ]
    for call, given_rows, error in refused:
        with pytest.raises(error):
            call(given_rows)
        pages.check()
    assert pages.stats() == {"total": 4, "free": 1, "held": 3, "cached": 0}
    assert len(pages.take_changes()) == 0


@pytest.mark.parametrize(
    "given_sizes",
    [(1, 100, 1, [1]), (10, 1, 1, [1]), (10, 100, 0, [1]), (10, 100, 1, []), (10, -1, 1, [1]),
     (-5, 100, 1, [1]), (10, 100, 1, [0]), (10, 100, 1, [-1])],
)  # fmt: skip
def test_sizes_that_can_never_be_right_are_refused(given_sizes) -> None:
    with pytest.raises(InvalidArgument):
        VirtualPages(*given_sizes)


def test_spans_are_what_layouts_are_made_of() -> None:
    assert layout_of(CLASSES, P).spans == (AttentionSpan(), AttentionSpan(40, 20))

"""Heads that choose pages among vLLM's blocks: tables and choice of a step. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_vllm_tables import Batch

from kvweave import InvalidArgument, Unsupported, ops
from kvweave.adapters.vllm.backend.attention_span import AttentionSpan
from kvweave.adapters.vllm.backend.step_tables import KeptTables, StepBatch
from kvweave.adapters.vllm.top_k.choice import RankedHeads, StepChoice
from kvweave.adapters.vllm.top_k.map import ALL, PageBudgets, budgets_of, has_top_k
from kvweave.adapters.vllm.top_k.single_rows import SingleRows, split
from paged import dense_attention, rope_table
from ranked_pages import FULL, WINDOW, best_pages, page_score, top_k
from versions import NO_CUDA, needs_cuda

PAGE, HEADS, GROUP, DIM = 16, 3, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
RUNNABLE = ["cpu"] if NO_CUDA else ["cpu", "cuda"]
BUDGETS = PageBudgets(((ALL, ALL, ALL), (4, ALL, 3), (5, 6, 4)), (1, 2), 3, 6)


# ---- maps -----------------------------------------------------------------------------------


def test_budgets_are_those_of_the_map_and_of_a_rank() -> None:
    classes: Any = [[FULL, FULL, FULL, FULL], [top_k(4), FULL, top_k(9, 16), FULL]]
    assert has_top_k(classes)
    assert not has_top_k([[FULL, WINDOW]])
    assert budgets_of(classes, 1, 0) == PageBudgets(((0, 0, 0, 0), (4, 0, 9, 0)), (1,), 4, 9)
    # A rank whose heads all read all has the bounds and the room that the others have.
    classes[1] = [top_k(4), top_k(9), FULL, FULL]
    assert budgets_of(classes, 2, 0) == PageBudgets(((0, 0), (4, 9)), (1,), 4, 9)
    assert budgets_of(classes, 2, 1) == PageBudgets(((0, 0), (0, 0)), (1,), 4, 9)


def test_what_is_refused_of_a_map() -> None:
    with pytest.raises(Unsupported, match="kinds of heads: expected full and top_k"):
        budgets_of([[top_k(4), WINDOW]], 1, 0)
    with pytest.raises(Unsupported, match="KV heads: expected a number that 2 ranks divide"):
        budgets_of([[top_k(4), FULL, FULL]], 2, 0)
    plain = top_k(4, score="min-max", estimate=False)
    assert budgets_of([[plain, FULL]], 1, 0) == budgets_of([[top_k(4), FULL]], 1, 0)
    with pytest.raises(Unsupported, match=r"top_k.estimate: expected False in vLLM, got True"):
        budgets_of([[top_k(4, estimate=True), FULL]], 1, 0)
    with pytest.raises(Unsupported, match=r"top_k.score: expected min-max in vLLM, got mean"):
        budgets_of([[plain, top_k(4, score="mean")]], 1, 0)
    with pytest.raises(InvalidArgument, match=r"top_k.pages: expected at least 3, .*got 2"):
        budgets_of([[top_k(2), FULL]], 1, 0)


# ---- who decodes ----------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 4))
def test_a_batch_is_split_behind_its_single_rows(more: list[int], singles: int) -> None:
    rows = [1] * singles + more
    batch = Batch(PAGE, HEADS, [30 + r for r in rows], rows)
    taken = StepBatch.of(batch.common("cpu"))
    parts = split(taken, batch.query_start, None)
    assert (parts[1] is None) == all(r == 1 for r in rows)
    lengths = [length for part in parts if part is not None for length in part.lengths.tolist()]
    assert lengths == batch.lengths
    mapping = torch.cat([part.slot_mapping for part in parts if part is not None])
    assert torch.equal(mapping, batch.slot_mapping)
    for part in filter(None, parts):
        counts = np.diff(part.row_offsets.numpy()).tolist()
        assert part.row_offsets[0] == 0
        assert sum(counts) == part.rows
        assert part.decode == (max(counts) == 1)
    if parts[0] is not None and parts[1] is not None:
        assert int(np.diff(parts[1].row_offsets.numpy())[0]) > 1


def test_who_decodes_behind_a_prefill_is_refused() -> None:
    batch = Batch(PAGE, HEADS, [30, 30, 1, 40], [1, 5, 1, 4])
    taken = StepBatch.of(batch.common("cpu"))
    split(taken, batch.query_start, torch.tensor([False, True, True, True]))
    with pytest.raises(Unsupported, match="decode before all others, got 1 behind"):
        split(taken, batch.query_start, torch.tensor([False, True, False, True]))


def test_flags_stay_where_they_are() -> None:
    rows = SingleRows(torch.device("cpu"), 6)
    place = rows.deciding(6, None).data_ptr()
    steps = [
        (4, None, [True] * 4),
        (4, [False, True, False, True], [True, False, True, False]),
        # Requests that pad a graph are not known to vLLM's flags.
        (5, [True, False], [False, True, True, True, True]),
        (6, [False] * 6, [True] * 6),
        (3, None, [True] * 3),
    ]
    for count, prefilling, wanted in steps:
        known = None if prefilling is None else torch.tensor(prefilling)
        flags = rows.deciding(count, known)
        assert flags.tolist() == wanted
        assert flags.data_ptr() == place


# ---- what is chosen -------------------------------------------------------------------------


@dataclass
class Case:
    """Requests that decode over vLLM's blocks, of which a layer's full blocks have bounds."""

    lengths: list[int]
    seed: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    heads: RankedHeads = field(init=False)

    def __post_init__(self) -> None:
        numbers = torch.Generator().manual_seed(self.seed)
        self.batch = Batch(PAGE, HEADS, self.lengths, [1] * len(self.lengths))
        blocks = 1 + int(self.batch.blocks.max())
        cache = torch.randn((blocks, HEADS, PAGE, 2 * DIM), generator=numbers).to(self.dtype)
        self.pages = cache.view(-1, 2, PAGE, DIM).to(self.device)
        size = (len(self.lengths), HEADS * GROUP, DIM)
        self.q = torch.randn(size, generator=numbers).to(self.dtype).to(self.device)
        keys = self.device == "cuda" and self.dtype.itemsize == 2
        shape = (len(self.pages), 2 if keys else 3, DIM)
        dtype = self.dtype if keys else torch.float32
        # Poison: what no full page is in is not looked at.
        self.bounds = torch.full(shape, torch.nan, dtype=dtype, device=self.device)
        full = self.full_blocks()
        held = [[block * HEADS, 0, PAGE] for block in full]
        named = torch.tensor(held, dtype=torch.int32).reshape(-1, 3).to(self.device)
        ops.bound_pages(self.pages, ops.PageBounds(self.bounds, named), pages=HEADS)
        self.heads = RankedHeads(BUDGETS, torch.device(self.device), 8)
        self.paged = ops.PagedKv(self.pages, 0, HEADS, 0.25, rope_table(1, DIM))

    def full_blocks(self) -> list[int]:
        rows = zip(self.batch.blocks.tolist(), self.lengths, strict=True)
        return [block for row, length in rows for block in row[: length // PAGE]]

    def choice(self, chooses: list[bool]) -> tuple[StepChoice, torch.Tensor]:
        """As the builder makes it of kept tables, which have room for more requests."""
        batch = StepBatch.of(self.batch.common(self.device))
        kept = KeptTables(
            self.batch.layout(AttentionSpan()),
            torch.device(self.device),
            requests=8,
            longest=200,
            more=self.heads.room(8),
        )
        tables = kept.fill(batch)
        flags = torch.tensor(chooses, device=self.device)
        given = (self.heads, kept.entries, tables.offsets, kept.room, flags, kept.columns[0])
        return StepChoice(*given), tables.positions

    def read(self, choice: StepChoice, layer: int, positions: torch.Tensor) -> torch.Tensor:
        known = (self.q, self.bounds, self.paged, ops.Workspace(self.device))
        offsets = choice.rank(layer, *known)
        read = choice.read_by(layer, self.paged)
        out, _ = ops.attend_decode(self.q, positions, choice.entries, read, entry_offsets=offsets)
        return out

    def answers(self, chooses: list[bool], layer: int) -> torch.Tensor:
        choice, positions = self.choice(chooses)
        choice.begin_step()
        return self.read(choice, layer, positions)

    def defined(self, chooses: list[bool], layer: int) -> torch.Tensor:
        """Each head's attention, in f64, over the pages that an explicit sort chooses."""
        rows = []
        for request, length in enumerate(self.lengths):
            count = -(-length // PAGE)
            own = self.batch.blocks[request, :count].long() * HEADS
            outs = []
            for head in range(HEADS):
                k, v = (self.pages.cpu()[own + head, part].flatten(0, 1) for part in (0, 1))
                k, v = k[:length, None], v[:length, None]
                q = self.q[request, head * GROUP : (head + 1) * GROUP].cpu()
                most = BUDGETS.of[BUDGETS.ranked[layer]][head]
                seen = torch.ones(length, dtype=torch.bool)
                if chooses[request] and most != ALL and count > most:
                    scores = [page_score(q, page) for page in k[:, 0].split(PAGE)]
                    best = torch.tensor(best_pages(scores, most))
                    seen = torch.isin(torch.arange(length) // PAGE, best)
                outs.append(dense_attention(q[None], k, v, seen[None], 0.25)[0][0])
            rows.append(torch.cat(outs))
        return torch.stack(rows)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    off = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=off, atol=off)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    data=st.data(),
    layer=st.sampled_from([0, 1]),
    device=st.sampled_from(RUNNABLE),
)
def test_each_head_reads_the_pages_of_the_definition(lengths, seed, data, layer, device) -> None:
    case = Case(lengths, seed, device)
    chooses = data.draw(
        st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)), "chooses"
    )
    close(case.answers(chooses, layer), case.defined(chooses, layer))


@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_a_step_choose_one_after_the_other_in_the_same_room(device) -> None:
    case, chooses = Case([200, 97, 64, 10], 5, device), [True, True, True, True]
    choice, positions = case.choice(chooses)
    choice.begin_step()
    for layer in (0, 1, 0):
        close(case.read(choice, layer, positions), case.defined(chooses, layer))
    few, dense = (case.answers([flag] * 4, 1) for flag in (True, False))
    assert float((few[0] - dense[0]).abs().max()) > 0.01
    # No more pages than any head of the layer reads; on a GPU others' lengths cut all keys.
    assert device == "cuda" or torch.equal(few[2:], dense[2:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_many_pages_as_there_are_change_no_bit(device, dtype) -> None:
    """Beside attention that knows of no choice, by the same tables."""
    case = Case([64, 47, 60, 10], 11, device, dtype)
    choice, positions = case.choice([True] * 4)
    own = {"entry_offsets": choice.offsets}
    entries = choice.entries[: int(choice.offsets[-1])] if device == "cpu" else choice.entries
    wanted, _ = ops.attend_decode(case.q, positions, entries, case.paged, **own)
    assert torch.equal(case.answers([True] * 4, 1), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_chooses_alone_what_it_chooses_among_others(device) -> None:
    together = Case([200, 97, 150], 6, device)
    wanted = together.answers([True] * 3, 1)
    for number, length in enumerate(together.lengths):
        alone = Case([length], 6, device)
        alone.pages, alone.bounds, alone.paged = together.pages, together.bounds, together.paged
        alone.q = together.q[number : number + 1]
        own = together.batch.blocks[number : number + 1]
        alone.batch = Alone(PAGE, HEADS, [length], [1], own)
        close(alone.answers([True], 1), wanted[number : number + 1].cpu().double())


@dataclass
class Alone(Batch):
    """One request of a batch, in its blocks."""

    own: torch.Tensor

    @property
    def blocks(self) -> torch.Tensor:
        return self.own


def test_requests_that_pad_a_graph_read_nothing_and_change_nothing() -> None:
    case, padded = Case([200, 97], 7), Case([200, 97], 7)
    wanted = case.answers([True, True], 1)
    choice, positions = padded.choice([True, True])
    # vLLM says of such a request that it has no tokens.
    choice.offsets = torch.cat((choice.offsets, choice.offsets[-1:]))
    choice.chooses = torch.tensor([True, True, True])
    padded.q = torch.cat((padded.q, padded.q[:1]))
    choice.begin_step()
    out = padded.read(choice, 1, torch.cat((positions, torch.zeros(1).int())))
    assert torch.equal(out[:2], wanted)


def test_a_page_with_a_nan_key_is_read() -> None:
    case = Case([200], 8)
    case.pages[int(case.batch.blocks[0, 5]) * HEADS + 2, 0, 3, 1] = torch.nan
    block = int(case.batch.blocks[0, 5]) * HEADS
    held = torch.tensor([[block, 0, PAGE]], dtype=torch.int32)
    ops.bound_pages(case.pages, ops.PageBounds(case.bounds, held), pages=HEADS)
    out = case.answers([True], 1)
    assert torch.isnan(out[0, 2 * GROUP :]).any()
    assert torch.isfinite(out[0, : 2 * GROUP]).all()


# ---- on a GPU -------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_of_16_bits_choose_as_the_definition(dtype) -> None:
    case, chooses = Case([200, 97, 64, 10], 5, "cuda", dtype), [True, True, False, True]
    keys = case.pages[:, 0].float()
    of = [block * HEADS + head for block in case.full_blocks() for head in range(HEADS)]
    found = case.bounds[of].float()
    assert torch.equal(found[:, 0], keys[of].amin(1))
    assert torch.equal(found[:, 1], keys[of].amax(1))
    for layer in (0, 1):
        close(case.answers(chooses, layer), case.defined(chooses, layer), dtype)


@needs_cuda
def test_a_captured_step_chooses_as_one_that_is_not() -> None:
    case = Case([200, 97, 150, 40], 9, "cuda", torch.bfloat16)
    choice, positions = case.choice([True] * 4)
    choice.begin_step()
    case.read(choice, 1, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choice.begin_step()
        out = case.read(choice, 1, positions)
    for flags in ([True] * 4, [False, True, True, False], [True] * 4):
        choice.chooses.copy_(torch.tensor(flags))
        case.q.normal_()
        graph.replay()
        assert torch.equal(out, case.answers(flags, 1))
        close(out, case.defined(flags, 1), torch.bfloat16)

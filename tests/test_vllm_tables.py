"""vLLM's description of a batch as tables of our ops. Needs no vLLM: it is tensors and versions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave import Unsupported, ops
from kvweave.adapters.vllm import versions as vllm_versions
from kvweave.adapters.vllm.tables import Span, entries_of, positions_of, slots_of
from paged import dense_attention, rope_table
from versions import needs_cuda


@dataclass
class Batch:
    """Requests of some length whose last rows are computed, and their blocks, as vLLM has them."""

    page_tokens: int
    heads: int
    lengths: list[int]
    rows: list[int]

    @property
    def columns(self) -> int:
        return -(-max(self.lengths) // self.page_tokens)

    @property
    def blocks(self) -> torch.Tensor:
        """Block numbers from 1 on, mixed up; what a request does not use is the null block."""
        held = [-(-length // self.page_tokens) for length in self.lengths]
        numbers = 1 + np.random.default_rng(3).permutation(sum(held)).astype(np.int32)
        table = np.zeros((len(held), self.columns + 1), np.int32)
        for row, count in enumerate(held):
            table[row, :count], numbers = numbers[:count], numbers[count:]
        return torch.from_numpy(table)

    @property
    def query_start(self) -> torch.Tensor:
        return torch.tensor(np.cumsum([0, *self.rows]), dtype=torch.int32)

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)

    @property
    def positions(self) -> list[int]:
        pairs = zip(self.lengths, self.rows, strict=True)
        return [p for length, rows in pairs for p in range(length - rows, length)]

    def seen(self, request: int, span: Span) -> list[int]:
        """Positions that some row of a request sees."""
        length, rows = self.lengths[request], self.rows[request]
        lowest = 0 if span.window is None else max(length - rows - span.window + 1, 0)
        return [p for p in range(length) if p >= lowest or p < span.sink]

    def entries(self, span: Span, device: str = "cpu"):
        first = self.seq_lens - self.query_start.diff()
        columns = span.columns(self.page_tokens, max(self.lengths), max(self.rows))
        return entries_of(
            self.blocks.to(device),
            self.seq_lens.to(device),
            first.to(device),
            page_tokens=self.page_tokens,
            heads=self.heads,
            columns=columns,
            span=span,
        )


@st.composite
def batches(draw) -> Batch:
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    rows = [draw(st.integers(1, length)) for length in lengths]
    return Batch(draw(st.sampled_from([4, 16])), draw(st.integers(1, 3)), lengths, rows)


spans = st.builds(Span, st.none() | st.integers(1, 40), st.integers(0, 40))


@given(batches(), spans)
def test_entries_list_what_is_seen_in_order(batch: Batch, span: Span) -> None:
    rows, offsets = batch.entries(span)
    blocks, page = batch.blocks, batch.page_tokens
    assert rows.dtype == offsets.dtype == torch.int32
    assert rows.is_contiguous()
    assert offsets[0] == 0
    for request, length in enumerate(batch.lengths):
        listed = rows[offsets[request] : offsets[request + 1]].tolist()
        held: dict[int, tuple[int, int]] = {}
        for block, begin, end, position, delta in listed:
            assert (begin, position % page, delta) == (0, 0, 0)
            assert 0 < end <= page
            assert position == max(held, default=-1) + 1 or span.window is not None
            assert all(position > other for other in held)
            held |= {position + slot: (block, slot) for slot in range(end)}
        assert max(held) == length - 1
        for position in batch.seen(request, span):
            expected = int(blocks[request, position // page]) * batch.heads
            assert held[position] == (expected, position % page)


@given(batches(), spans)
def test_a_window_lists_no_more_than_it_must(batch: Batch, span: Span) -> None:
    rows, offsets = batch.entries(span)
    for request in range(len(batch.lengths)):
        listed = rows[offsets[request] : offsets[request + 1]]
        needed = {position // batch.page_tokens for position in batch.seen(request, span)}
        assert {int(row[3]) // batch.page_tokens for row in listed} == needed


@given(batches(), st.integers(0, 3))
def test_positions_and_slots_of_rows(batch: Batch, padding: int) -> None:
    rows = sum(batch.rows)
    got = positions_of(batch.query_start, batch.seq_lens, rows + padding)
    assert got.dtype == torch.int32
    assert got[:rows].tolist() == batch.positions
    assert (got >= 0).all()
    mapping = []
    for request, (length, count) in enumerate(zip(batch.lengths, batch.rows, strict=True)):
        for position in range(length - count, length):
            block = int(batch.blocks[request, position // batch.page_tokens])
            mapping.append(block * batch.page_tokens + position % batch.page_tokens)
    slots = slots_of(torch.tensor(mapping), batch.page_tokens, batch.heads)
    blocks = [slot // batch.page_tokens * batch.heads for slot in mapping]
    assert slots.tolist() == [
        [b, s % batch.page_tokens] for b, s in zip(blocks, mapping, strict=True)
    ]
    assert slots_of(torch.tensor([-1]), batch.page_tokens, batch.heads)[0, 0] < 0


def attended(batch: Batch, span: Span, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows through our ops on pages that lie as vLLM's, and densely under their mask."""
    generator = torch.Generator().manual_seed(2)
    page, heads, dim = batch.page_tokens, batch.heads, 16
    blocks = 1 + int(batch.blocks.max())
    cache = torch.zeros(blocks, heads, page, 2 * dim, device=device)
    pages = cache.view(-1, 2, page, dim)
    rope = rope_table(1, dim)
    wanted, queries = [], []
    for request, (length, rows) in enumerate(zip(batch.lengths, batch.rows, strict=True)):
        k, v = torch.randn((2, length, heads, dim), generator=generator)
        positions = torch.arange(length)
        mapping = batch.blocks[request, positions // page] * page + positions % page
        slots = slots_of(mapping.to(device), page, heads)
        ops.write_pages(pages, 0, k.to(device), v.to(device), slots)
        q = torch.randn((rows, 2 * heads, dim), generator=generator)
        at = torch.arange(length - rows, length)[:, None]
        mask = positions <= at
        if span.window is not None:
            mask &= (positions > at - span.window) | (positions < span.sink)
        wanted.append(dense_attention(q, k, v, mask, 0.25)[0])
        queries.append(q)
    total = sum(batch.rows)
    entries = batch.entries(span, device)
    rows = entries.rows[: int(entries.offsets[-1])] if device == "cpu" else entries.rows
    row_offsets = batch.query_start.to(device)
    seen = [[0, head, span.window or 0, span.sink] for head in range(heads)]
    reach = ops.Reach(1, np.array(seen, np.int32))
    out, _ = ops.attend_prefill(
        torch.cat(queries).to(device),
        positions_of(row_offsets, batch.seq_lens.to(device), total),
        rows,
        pages,
        0,
        kv_heads=heads,
        scale=0.25,
        rope=rope,
        reach=reach,
        row_offsets=row_offsets,
        entry_offsets=entries.offsets,
    )
    return out.cpu().double(), torch.cat(wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("span", [Span(), Span(20), Span(20, 5), Span(1, 32)], ids=str)
@pytest.mark.parametrize("rows", [[3, 70, 1, 16], [1, 1, 1, 1]], ids=["mixed", "decode"])
def test_attention_over_vllms_blocks_is_dense(rows: list[int], span: Span, device: str) -> None:
    batch = Batch(16, 2, [33, 70, 1, 16], rows)
    got, wanted = attended(batch, span, device)
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@needs_cuda
@pytest.mark.parametrize("span", [Span(), Span(20, 5)], ids=str)
def test_tables_are_captured_in_a_graph(span: Span) -> None:
    batches = [Batch(16, 2, lengths, [1, 1]) for lengths in ([40, 90], [90, 3])]
    held = [b.blocks[:, :6].to("cuda") for b in batches]
    lengths = [b.seq_lens.to("cuda") for b in batches]
    blocks, length = held[0].clone(), lengths[0].clone()
    columns = span.columns(16, 96, 1)

    def run():
        sizes = {"page_tokens": 16, "heads": 2, "columns": columns, "span": span}
        return entries_of(blocks, length, length - 1, **sizes)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    for number in (1, 0):
        blocks.copy_(held[number])
        length.copy_(lengths[number])
        graph.replay()
        wanted = run()
        assert torch.equal(kept.offsets, wanted.offsets)
        last = int(wanted.offsets[-1])
        assert torch.equal(kept.rows[:last], wanted.rows[:last])


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1+cpu", "0.26.0rc1", "0.33.0"])
def test_a_known_version_is_taken(version: str) -> None:
    vllm_versions.check(version)


@pytest.mark.parametrize(
    "version", ["0.25.1", "0.27.0", "0.34.0", "0.3", "0.260.0", "1.26.0", "", "dev"]
)
def test_an_unknown_version_is_named_with_those_that_are_known(version: str) -> None:
    with pytest.raises(Unsupported, match=r"expected version 0\.26\.x or 0\.33\.x, got") as caught:
        vllm_versions.check(version)
    assert caught.value.expected == "0.26.x or 0.33.x"
    assert caught.value.got == version

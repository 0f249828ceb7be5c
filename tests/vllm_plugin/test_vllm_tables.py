"""vLLM's description of a batch as tables of our ops. Needs no vLLM: it is tensors and versions."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave import Unsupported, ops
from kvweave.adapters.vllm import versions as vllm_versions
from kvweave.adapters.vllm.backend.attention_span import AttentionSpan
from kvweave.adapters.vllm.backend.step_tables import (
    Entries,
    KeptTables,
    StepBatch,
    StepLayout,
)
from paged import dense_attention, reads, rope_table
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

    def seen(self, request: int, span: AttentionSpan) -> list[int]:
        """Positions that some row of a request sees."""
        length, rows = self.lengths[request], self.rows[request]
        lowest = 0 if span.window is None else max(length - rows - span.window + 1, 0)
        return [p for p in range(length) if p >= lowest or p < span.sink]

    @property
    def slot_mapping(self) -> torch.Tensor:
        page, mapping = self.page_tokens, []
        for request, (length, rows) in enumerate(zip(self.lengths, self.rows, strict=True)):
            at = torch.arange(length - rows, length)
            mapping.append(self.blocks[request, at // page] * page + at % page)
        return torch.cat(mapping).long()

    def common(self, device: str, padding: int = 0) -> Any:
        """As vLLM has it: tensors that may be longer than the batch, and what the host knows."""
        given = {
            "block_table_tensor": self.blocks,
            "seq_lens": torch.cat((self.seq_lens, torch.zeros(2).int())),
            "query_start_loc": torch.cat((self.query_start, torch.zeros(2).int())),
            "slot_mapping": torch.cat((self.slot_mapping, torch.full((padding,), -1))),
        }
        return SimpleNamespace(
            **{name: tensor.to(device) for name, tensor in given.items()},
            query_start_loc_cpu=self.query_start,
            num_reqs=len(self.lengths),
            max_query_len=max(self.rows),
            max_seq_len=max(self.lengths),
        )

    def tables(self, span: AttentionSpan, device: str = "cpu") -> tuple[ops.StepTables, Entries]:
        """Those that the op makes, in room that is full of another number."""
        batch, layout = StepBatch.of(self.common(device)), self.layout(span)
        columns = layout.columns(batch.longest, batch.most_rows)
        room = layout.room(torch.device(device), batch.requests, batch.rows, columns)
        for part in room:
            part.fill_(-7)
        tables = layout.fill(room, batch, columns)
        return tables, Entries.of(tables)

    def layout(self, span: AttentionSpan) -> StepLayout:
        return StepLayout(self.page_tokens, (span,), block_pages=self.heads)


@st.composite
def batches(draw) -> Batch:
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    rows = [draw(st.integers(1, length)) for length in lengths]
    return Batch(draw(st.sampled_from([4, 16])), draw(st.integers(1, 3)), lengths, rows)


spans = st.builds(AttentionSpan, st.none() | st.integers(1, 40), st.integers(0, 40))


@given(batches(), spans)
def test_entries_list_what_is_seen_in_order(batch: Batch, span: AttentionSpan) -> None:
    _, (rows, offsets) = batch.tables(span)
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
def test_a_window_lists_no_more_than_it_must(batch: Batch, span: AttentionSpan) -> None:
    _, (rows, offsets) = batch.tables(span)
    for request in range(len(batch.lengths)):
        listed = rows[offsets[request] : offsets[request + 1]]
        needed = {position // batch.page_tokens for position in batch.seen(request, span)}
        assert {int(row[3]) // batch.page_tokens for row in listed} == needed


@given(batches(), spans)
def test_positions_and_slots_of_rows(batch: Batch, span: AttentionSpan) -> None:
    tables, _ = batch.tables(span)
    assert tables.positions.tolist() == batch.positions
    blocks = batch.slot_mapping // batch.page_tokens * batch.heads
    slots = batch.slot_mapping % batch.page_tokens
    assert torch.equal(tables.slots, torch.stack((blocks, slots), dim=1).int())


@given(batches(), st.integers(0, 3))
def test_a_batch_is_as_long_as_vllm_says(batch: Batch, padding: int) -> None:
    taken = StepBatch.of(batch.common("cpu", padding))
    assert taken.decode is (max(batch.rows) == 1)
    assert taken.rows == sum(batch.rows) == len(taken.slot_mapping)
    assert taken.requests == len(batch.lengths) == len(taken.blocks) == len(taken.row_offsets) - 1


@given(spans, st.lists(st.integers(1, 8), min_size=1))
def test_kept_tables_stay_where_they_are(span: AttentionSpan, sizes: list[int]) -> None:
    """Decode steps of up to 8 requests: what any of them was captured with is filled again."""
    layout = StepLayout(16, (span,), block_pages=2)
    kept, places = KeptTables(layout, torch.device("cpu"), requests=8, longest=90), []
    for size in [8, *sizes]:
        batch = Batch(16, 2, [90 - 11 * request for request in range(size)], [1] * size)
        filled = kept.fill(StepBatch.of(batch.common("cpu")))
        places.append([part.data_ptr() for part in filled])
        wanted, entries = batch.tables(span)
        assert torch.equal(Entries.of(filled).rows, entries.rows)
        for name in ("positions", "slots", "offsets"):
            assert torch.equal(getattr(filled, name), getattr(wanted, name))
    assert all(place == places[0] for place in places)


def test_an_engine_on_a_cpu_keeps_tables_that_nothing_follows() -> None:
    """Entries on the host are as long as they say: what lies behind them would move."""
    layout = StepLayout(16, (AttentionSpan(),))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(max_model_len=90),
    )
    kept = KeptTables.of_engine(layout, torch.device("cpu"), config)
    assert kept is not None
    assert (kept.columns, len(kept.entries)) == ([6], 48)
    assert KeptTables.of_engine(layout, torch.device("cpu"), config, more=1) is None


def attended(batch: Batch, span: AttentionSpan, device: str) -> tuple[torch.Tensor, torch.Tensor]:
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
        own = batch.blocks[request, positions // page] * heads
        slots = torch.stack((own, positions % page), dim=1).int().to(device)
        ops.write_pages(pages, 0, k.to(device), v.to(device), slots)
        q = torch.randn((rows, 2 * heads, dim), generator=generator)
        at = torch.arange(length - rows, length)[:, None]
        mask = positions <= at
        if span.window is not None:
            mask &= (positions > at - span.window) | (positions < span.sink)
        wanted.append(dense_attention(q, k, v, mask, 0.25)[0])
        queries.append(q)
    tables, entries = batch.tables(span, device)
    seen = [[0, head, span.window or 0, span.sink] for head in range(heads)]
    reach = ops.Reach(1, np.array(seen, np.int32))
    out, _ = reads(
        ops.attend_prefill,
        torch.cat(queries).to(device),
        tables.positions,
        entries.rows,
        pages,
        0,
        kv_heads=heads,
        scale=0.25,
        rope=rope,
        reach=reach,
        row_offsets=batch.query_start.to(device),
        entry_offsets=entries.offsets,
    )
    return out.cpu().double(), torch.cat(wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize(
    "span",
    [AttentionSpan(), AttentionSpan(20), AttentionSpan(20, 5), AttentionSpan(1, 32)],
    ids=str,
)
@pytest.mark.parametrize("rows", [[3, 70, 1, 16], [1, 1, 1, 1]], ids=["mixed", "decode"])
def test_attention_over_vllms_blocks_is_dense(
    rows: list[int], span: AttentionSpan, device: str
) -> None:
    batch = Batch(16, 2, [33, 70, 1, 16], rows)
    got, wanted = attended(batch, span, device)
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1+cpu", "0.26.0rc1", "0.33.0"])
def test_a_known_version_is_taken(version: str) -> None:
    vllm_versions.check(version)


@pytest.mark.parametrize(
    "version", ["0.25.1", "0.27.0", "0.34.0", "0.3", "0.260.0", "1.26.0", "", "dev"]
)
def test_an_unknown_version_is_named_with_those_that_are_known(version: str) -> None:
    with pytest.raises(Unsupported, match=r"expected version 0\.26\.x or 0\.33\.x, got") as caught:
        vllm_versions.check(version)
    assert caught.value.expected == "version 0.26.x or 0.33.x"
    assert caught.value.got == version

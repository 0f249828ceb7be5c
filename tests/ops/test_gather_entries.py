"""Selected pages as tables of their own, and attention over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from paged import paged, reads, rope_table
from versions import CPU, NO_CUDA, REFERENCE, needs_cuda

NOTHING = [-1, 0, 0, 2**31 - 1, 0]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
RUNNABLE = ["cpu"] if NO_CUDA else ["cpu", "cuda"]


def gathered(device, pages, selected, entries, offsets, reach=None, host_tables=False):
    """Both results on the host; tables go to the device too, or stay."""
    there = [torch.from_numpy(x).to(device) for x in (pages, selected)]
    tables = [x if host_tables else torch.from_numpy(x).to(device) for x in (entries, offsets)]
    got, ends = ops.gather_entries(*there, tables[0], entry_offsets=tables[1], reach=reach)
    return got.cpu().tolist(), ends.cpu().tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=4),
    heads=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    most=st.integers(0, 7),
    seed=st.integers(0, 2**16),
    device=st.sampled_from(RUNNABLE),
    host_tables=st.booleans(),
)
def test_each_head_has_what_it_selected(lengths, heads, most, seed, device, host_tables) -> None:
    generator = np.random.default_rng(seed)
    sizes = np.array(lengths, int).reshape(-1)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    entries = generator.integers(0, 99, (int(offsets[-1]), 5)).astype(np.int32)
    reach = ops.Reach(3, np.array([(table, 7, 0, 0) for table in heads], np.int32))
    pages = np.full((len(lengths), len(heads), most), -1, np.int32)
    selected = np.zeros((len(lengths), len(heads)), np.int32)
    wanted = []
    for request in range(len(lengths)):
        for head, table in enumerate(heads):
            base, count = offsets[3 * request + table], lengths[request][table]
            some = np.sort(generator.permutation(count)[:most])
            pages[request, head, : len(some)] = some
            selected[request, head] = len(some)
            wanted += entries[base + some].tolist() + [NOTHING] * (most - len(some))
    got, ends = gathered(device, pages, selected, entries, offsets, reach, host_tables)
    assert got == wanted
    begins = most * np.arange(selected.size)
    each = np.stack((begins, begins + selected.reshape(-1)), 1).reshape(-1)
    assert ends == [*each.tolist(), most * selected.size]


@pytest.mark.parametrize("device", DEVICES)
def test_attention_reads_what_is_gathered(device, generator) -> None:
    """As attention over the same tables with the other pages taken out by hand."""
    case = paged(generator, 200, layers=1, kv_heads=2, head_dim=64)
    entries = np.concatenate([case.entries, case.entries[:9]])
    offsets = np.array([0, len(case.entries), len(entries)], np.int32)
    pages = np.array([[[0, 2, 7, 12], [1, 5, 12, -1]], [[0, 3, 8, -1], [6, 7, 8, -1]]], np.int32)
    selected = np.array([[4, 3], [3, 3]], np.int32)
    q = torch.randn(2, 4, 64, generator=generator)
    positions = np.array([199, 143], np.int32)
    named = {"cache": case.pages.to(device), "layer": 0, "kv_heads": 2, "scale": 0.125}
    named["rope"] = rope_table(1, 64)
    there = [torch.from_numpy(x).to(device) for x in (pages, selected)]
    table, ends = ops.gather_entries(*there, entries, entry_offsets=offsets)
    reach = ops.Reach(4, np.array([(0, 0, 0, 0), (2, 1, 0, 0)], np.int32))
    at = torch.from_numpy(positions).to(device)
    given = (q.to(device), at, table)
    out, lse = reads(ops.attend_decode, *given, entry_offsets=ends, reach=reach, **named)
    named["cache"] = case.pages
    for request in range(2):
        of_request = entries[offsets[request] : offsets[request + 1]]
        for head in range(2):
            some = of_request[pages[request, head, : selected[request, head]]]
            alone = reads(
                ops.attend_decode,
                q[request : request + 1],
                positions[request : request + 1],
                some,
                entry_offsets=np.array([0, len(some)], np.int32),
                **named,
            )
            rows = slice(2 * head, 2 * head + 2)
            for a, b in zip((out, lse), alone, strict=True):
                limit = {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(a[request, rows].cpu(), b[0, rows], **limit)


@needs_cuda
def test_indices_on_the_device_may_say_anything() -> None:
    pages = np.array([[[0, 3, -1, 2**31 - 1], [1, 2, 0, 0]]], np.int32)
    selected = np.array([[9, -3]], np.int32)
    entries = np.arange(15, dtype=np.int32).reshape(3, 5)
    got, ends = gathered("cuda", pages, selected, entries, np.array([0, 3], np.int32))
    assert got == [entries[0].tolist(), *[NOTHING] * 7]
    assert ends == [0, 4, 4, 4, 8]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pages": np.array([[[0, 3]]], np.int32)}, r"pages: expected indices below 3"),
        ({"pages": np.array([[[-1, 0]]], np.int32)}, "pages: expected indices below 3"),
        ({"pages": np.zeros((1, 2), np.int32)}, r"pages: expected shape \[B, G, K\]"),
        ({"pages": np.zeros((1, 1, 2))}, "pages: expected int32"),
        ({"pages": np.zeros((1, 0, 2), np.int32)}, "."),
        ({"selected": np.array([[3]], np.int32)}, "selected: expected numbers from 0 to 2"),
        ({"selected": np.array([[-1]], np.int32)}, "selected: expected numbers from 0 to 2"),
        ({"selected": np.array([2], np.int32)}, "selected: expected shape"),
        ({"offsets": np.array([0, 4], np.int32)}, "entry_offsets"),
        ({"offsets": np.array([0, 2, 3], np.int32)}, "entry_offsets: expected 2 elements, got 3"),
        ({"entries": np.zeros((3, 4), np.int32)}, "entries: expected shape"),
        ({"reach": ops.Reach(1, np.zeros((2, 4), np.int32))}, "heads of reach"),
        ({"reach": ops.Reach(2, np.zeros((1, 4), np.int32))}, "entry_offsets: expected 3"),
    ],
)
def test_what_cannot_be_gathered_is_refused(changes, words) -> None:
    given = {
        "pages": np.array([[[0, 2]]], np.int32),
        "selected": np.array([[2]], np.int32),
        "entries": np.ones((3, 5), np.int32),
        "offsets": np.array([0, 3], np.int32),
    } | changes
    with pytest.raises(InvalidArgument, match=words):
        gathered("cpu", **given)


def test_by_name_it_runs_on_the_host() -> None:
    pages, selected = torch.zeros(1, 1, 1).int(), torch.ones(1, 1).int()
    entries, offsets = np.ones((1, 5), np.int32), np.array([0, 1], np.int32)
    for version in (CPU, REFERENCE):
        got, _ = version.gather_entries(pages, selected, entries, entry_offsets=offsets)
        assert got.tolist() == [[1] * 5]
    with pytest.raises(InvalidArgument, match="pages: expected a tensor on cuda"):
        ops.gather_entries(pages, selected, entries, entry_offsets=offsets, backend="cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_entries_go_behind_those_that_they_are_of(device) -> None:
    """As a step has it that reads what it chose beside its own tables."""
    entries = torch.arange(35, dtype=torch.int32).view(7, 5)
    array = torch.cat((entries, torch.full((6, 5), -7).int())).to(device)
    pages = torch.tensor([[[1, 4], [0, -1]]], dtype=torch.int32, device=device)
    selected = torch.tensor([[2, 1]], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 7], dtype=torch.int32, device=device)
    got, ends = ops.gather_entries(
        pages, selected, array[:7], entry_offsets=offsets, out=array[7:11]
    )
    assert got.data_ptr() == array[7:].data_ptr()
    assert torch.equal(array[:7].cpu(), entries)
    wanted = [*entries[[1, 4, 0]].tolist(), NOTHING]
    assert array[7:].tolist() == [*wanted, [-7] * 5, [-7] * 5]
    assert ends.tolist() == [0, 2, 2, 3, 4]
    for out, words in [(array[7:10], "gathered"), (array[5:9], "overlap|apart"), ([], "out")]:
        with pytest.raises(InvalidArgument, match=words):
            ops.gather_entries(pages, selected, array[:7], entry_offsets=offsets, out=out)

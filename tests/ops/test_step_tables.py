"""An engine's batch as tables: the op against torch's tensor operations, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_tables
from kvweave import InvalidArgument, ops
from versions import NO_CUDA, needs_cuda

MOST = 2**31 - 1
LEFT = -7
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
devices = st.sampled_from(["cpu"] if NO_CUDA else ["cpu", "cuda"])


@dataclass
class Batch:
    """Arguments of the op, on the host: tensors, and numbers."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]

    @property
    def requests(self) -> int:
        return len(self.tensors["lengths"])

    @property
    def rows(self) -> int:
        return len(self.tensors["slot_mapping"])

    def room(self, device: str, spare: int = 0) -> ops.StepTables:
        """Results to be, full of a number that no table holds."""
        spans = self.numbers["spans"]
        size = self.requests * sum(columns for _, _, columns in spans) + spare
        tables = len(spans) if "places" in self.tensors else None
        sizes = {"requests": self.requests, "rows": self.rows, "entries": size, "tables": tables}
        made = ops.StepTables.empty(torch.device(device), **sizes)
        return ops.StepTables(*(part.fill_(LEFT) for part in made))

    def run(self, device: str, out: ops.StepTables | None = None) -> ops.StepTables:
        given_tensors = {name: there(tensor, device) for name, tensor in self.tensors.items()}
        out = self.room(device, spare=3) if out is None else out
        result = ops.step_tables(**given_tensors, **self.numbers, out=out)
        assert all(a is b for a, b in zip(result, out, strict=True))
        return ops.StepTables(*(part.cpu() for part in result))

    def wanted(self) -> ops.StepTables:
        return torch_tables.step_tables(**self.tensors, **self.numbers)


def there(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor on a device, its strides kept."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.copy_(tensor)


def check(batch: Batch, device: str) -> None:
    got, wanted = batch.run(device), batch.wanted()
    last = int(wanted.offsets[-1])
    assert torch.equal(got.offsets, wanted.offsets)
    assert torch.equal(got.entries[:last], wanted.entries)
    assert (got.entries[last:] == LEFT).all()
    assert torch.equal(got.positions, wanted.positions)
    assert torch.equal(got.slots, wanted.slots)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    page = draw(st.sampled_from([1, 3, 16, 64]))
    tables = draw(st.none() | st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 300), min_size=1, max_size=9))
    rows = [draw(st.integers(0, length) | st.just(min(length, 1))) for length in lengths]
    padding, wider = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    most = -(-max(lengths) // page)
    pages = len(lengths) * most + 1
    # What lies behind a request's pages is of an earlier one, as in vLLM; rows may be strided.
    wide = rng.integers(0, pages, (len(lengths), most + 1 + wider), np.int32)
    mapping = rng.integers(0, pages * page, sum(rows) + padding)
    mapping[rng.random(len(mapping)) < 0.2] = -1
    span = st.tuples(st.integers(0, 80), st.integers(0, 80), st.just(most))
    spans = draw(st.lists(span, min_size=tables or 1, max_size=tables or 1))
    tensors = {
        "blocks": torch.from_numpy(wide)[:, : most + 1],
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "query_start": torch.tensor(np.cumsum([0, *rows]), dtype=torch.int32),
        "slot_mapping": torch.from_numpy(mapping),
    }
    numbers: dict[str, Any] = {"page_tokens": page, "spans": spans}
    if tables is None:
        numbers["block_pages"] = draw(st.integers(1, 8))
    else:
        found = rng.integers(0, 10**6, (tables, pages), np.int32)
        found[rng.random(found.shape) < 0.2] = 0
        tensors["places"] = torch.from_numpy(found)
    return Batch(tensors, numbers)


@given(batches(), devices)
def test_tables_are_those_of_torch(batch: Batch, device: str) -> None:
    check(batch, device)


def batch_of(
    lengths: list[int], rows: list[int], page: int, span: tuple[int, int], **more: Any
) -> Batch:
    """Requests whose pages follow one another; `more` are arguments besides."""
    most = -(-max(lengths) // page)
    counts = np.cumsum([0, *rows])
    ends = np.repeat(np.array(lengths) - counts[1:], rows) + np.arange(counts[-1])
    request = np.repeat(np.arange(len(lengths)), rows)
    blocks = 1 + np.arange(len(lengths) * most, dtype=np.int32).reshape(len(lengths), most)
    mapping = blocks[request, ends // page].astype(np.int64) * page + ends % page
    tensors = {
        "blocks": torch.from_numpy(blocks),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "query_start": torch.tensor(counts, dtype=torch.int32),
        "slot_mapping": torch.from_numpy(mapping),
    }
    return Batch(tensors, {"page_tokens": page, "spans": [(*span, most)], **more})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("span", [(0, 0), (5000, 100)], ids=str)
@pytest.mark.parametrize("requests", [1, 3, 700])
def test_large_batches(device: str, span: tuple[int, int], requests: int) -> None:
    """Requests that several thread blocks share, and more than one block can count at once."""
    lengths = [70_000 // requests * 3 + 7 * i % 501 for i in range(requests)]
    rows = [1 + (i * 37) % 90 if i % 2 else 1 for i in range(requests)]
    rows[0] = min(lengths[0], 9_000)
    check(batch_of(lengths, rows, 16, span, block_pages=8), device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_longest_requests(device: str) -> None:
    """Positions up to the last i32, with and without a window."""
    for span in [(0, 0), (1, 0), (MOST, MOST), (2**20, 2**30)]:
        batch = batch_of([MOST, MOST - 1, 1], [2, 1, 1], 2**24, span)
        check(batch, device)
        assert int(batch.run(device).positions.max()) == MOST - 1


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_pad_a_batch(device: str) -> None:
    """Requests of a captured graph that are not there: no tokens, no rows, slots of −1."""
    batch = batch_of([40, 3], [1, 1], 16, (0, 0), block_pages=4)
    batch.tensors["lengths"] = torch.tensor([40, 3, 0, 0], dtype=torch.int32)
    batch.tensors["query_start"] = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    batch.tensors["blocks"] = batch.tensors["blocks"].repeat(2, 1)
    mapping = batch.tensors["slot_mapping"]
    batch.tensors["slot_mapping"] = torch.cat((mapping, torch.tensor([-1, -1])))
    got = batch.run(device)
    assert got.offsets.tolist() == [0, 3, 4, 4, 4]
    assert got.positions.tolist() == [39, 2, 0, 1]
    assert got.slots.tolist() == [[12, 7], [16, 2], [-1, -1], [-1, -1]]
    check(batch, device)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_point_nowhere(device: str) -> None:
    """Page numbers outside of `places`, and blocks that an i32 does not hold."""
    numbers = torch.tensor([[-1, -MOST, MOST, 5, 4]], dtype=torch.int32)
    tensors = {
        "blocks": numbers,
        "lengths": torch.tensor([5], dtype=torch.int32),
        "query_start": torch.tensor([0, 5], dtype=torch.int32),
        "slot_mapping": torch.tensor([-1, -(2**63), 2**63 - 1, 5, 4]),
    }
    spans = {"page_tokens": 1, "spans": [(0, 0, 5)]}
    places = torch.tensor([[9, 9, 9, 9, 3]], dtype=torch.int32)
    inside = Batch({**tensors, "places": places}, spans).run(device)
    assert inside.entries[:5, 0].tolist() == [0, 0, 0, 0, 3]
    assert inside.slots.tolist() == [[[-1, -1]] * 4 + [[3, 0]]]
    flat = Batch(tensors, {**spans, "block_pages": 3}).run(device)
    assert flat.entries[:5, 0].tolist() == [-1, -1, -1, 15, 12]
    assert flat.slots.tolist() == [[-1, -1]] * 3 + [[15, 0], [12, 0]]


@needs_cuda
def test_rows_that_belong_to_nobody_are_left_alone() -> None:
    """On a device nobody checks where rows begin: whatever stands there, nothing else is hit."""
    for starts in ([0, -5, MOST], [MOST, MOST, -MOST], [7, 3, 1], [-9, -9, -9]):
        batch = batch_of([40, 30], [2, 2], 16, (20, 3))
        batch.tensors["query_start"] = torch.tensor(starts, dtype=torch.int32)
        for lengths in ([40, 30], [MOST, -MOST], [-1, MOST]):
            batch.tensors["lengths"] = torch.tensor(lengths, dtype=torch.int32)
            got = batch.run("cuda")
            assert (got.entries[6:] == LEFT).all()
            assert got.offsets[0] == 0
            assert 0 <= got.offsets[-1] <= 6


def changed(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Batch], None]:
    def apply(batch: Batch) -> None:
        batch.tensors[name] = change(batch.tensors[name])

    return apply


def number(name: str, value: Any) -> Callable[[Batch], None]:
    return lambda batch: batch.numbers.update({name: value})


BAD: list[tuple[Callable[[Batch], None], str]] = [
    (changed("blocks", lambda t: t.long()), "blocks: expected int32, got int64"),
    (changed("blocks", lambda t: t[:1]), r"blocks: expected shape \[B=2, M\], got \[1, 3\]"),
    (changed("blocks", lambda t: t.T.contiguous().T), "blocks: expected a contiguous last axis"),
    (changed("blocks", lambda t: t.tolist()), "blocks: expected a tensor"),
    (changed("lengths", lambda t: t[:, None]), r"lengths: expected shape \[B\], got \[2, 1\]"),
    (changed("lengths", lambda t: t[:0]), r"blocks: expected shape \[B=0, M\]"),
    (changed("lengths", lambda t: t.float()), "lengths: expected int32, got float32"),
    (changed("query_start", lambda t: t[:-1]), r"query_start: expected shape \[B\+1=3\], got"),
    (changed("slot_mapping", lambda t: t.int()), "slot_mapping: expected int64, got int32"),
    (changed("slot_mapping", lambda t: t[::2]), r"positions: expected shape \[R=2\], got \[3\]"),
    (changed("slot_mapping", lambda t: t.repeat_interleave(2)[::2]), "expected C-contiguous"),
    (number("page_tokens", 0), "page_tokens: expected a number from 1 to 2147483647, got 0"),
    (number("page_tokens", 2**31), "page_tokens: expected a number from 1"),
    (number("page_tokens", -1), "page_tokens: expected at least 0, got -1"),
    (number("block_pages", 0), "block_pages: expected a number from 1"),
    (number("spans", []), "spans: expected from 1 to 1, without places, got 0"),
    (number("spans", [(0, 0, 1)] * 2), "spans: expected from 1 to 1, without places, got 2"),
    (number("spans", [(-1, 0, 3)]), r"window of a span: expected a number from 0 to 2\^31 − 1"),
    (number("spans", [(0, 2**31, 3)]), "sink of a span: expected a number from 0"),
    (number("spans", [(0, 0, 4)]), "entries: expected at least 8 rows, got 6"),
    (number("spans", [(0, 0, 2**30)]), "columns of spans: expected at most 2147483647 entries"),
]


def small() -> Batch:
    return batch_of([40, 33], [2, 1], 16, (0, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spoil", "words"), BAD)
def test_a_batch_that_is_refused(spoil: Callable[[Batch], None], words: str, device: str) -> None:
    batch = small()
    out = batch.room(device)
    kept = [part.clone() for part in out]
    spoil(batch)
    tensors = {
        name: there(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.tensors.items()
    }
    with pytest.raises(InvalidArgument, match=words) as told:
        ops.step_tables(**tensors, **batch.numbers, out=out)
    assert told.value.expected
    assert all(torch.equal(a, b) for a, b in zip(out, kept, strict=True))


BAD_ROOM: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("positions", lambda t: t[:-1], r"positions: expected shape \[R=3\], got \[2\]"),
    ("positions", lambda t: t.long(), "positions: expected int32, got int64"),
    ("slots", lambda t: t[None], r"slots: expected shape \[R=3, 2=2\], got \[1, 3, 2\]"),
    ("slots", lambda t: t.T.contiguous().T, "slots: expected C-contiguous"),
    ("entries", lambda t: t[:-1], "entries: expected at least 6 rows, got 5"),
    ("entries", lambda t: t[:, :4], r"entries: expected shape \[N, 5=5\]"),
    ("offsets", lambda t: t[:-1], r"offsets: expected shape \[B·tables\+1=3\], got \[2\]"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "change", "words"), BAD_ROOM)
def test_room_that_is_refused(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], words: str, device: str
) -> None:
    batch = small()
    out = batch.room(device)
    with pytest.raises(InvalidArgument, match=words):
        batch.run(device, out._replace(**{name: change(getattr(out, name))}))


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_is_shared(device: str) -> None:
    batch = small()
    memory = torch.zeros(400, dtype=torch.int32, device=device)
    out = batch.room(device)
    overlapping = out._replace(positions=memory[:3], offsets=memory[2:5])
    with pytest.raises(InvalidArgument, match="offsets: expected memory of its own, apart from po"):
        batch.run(device, overlapping)
    tensors = {name: there(tensor, device) for name, tensor in batch.tensors.items()}
    shared = out._replace(offsets=tensors["query_start"])
    with pytest.raises(InvalidArgument, match="offsets: expected memory of its own, apart from qu"):
        ops.step_tables(**tensors, **batch.numbers, out=shared)


def test_memory_between_elements() -> None:
    batch = small()
    odd = np.frombuffer(bytearray(4 * 3 + 1), np.int32, 3, 1)
    with pytest.raises(InvalidArgument, match="offsets: expected 4-byte alignment, got"):
        ops.step_tables(
            **batch.tensors, **batch.numbers, out=batch.room("cpu")._replace(offsets=odd)
        )
    odd = np.frombuffer(bytearray(8 * 3 + 4), np.int64, 3, 4)
    batch.tensors["slot_mapping"] = odd
    with pytest.raises(InvalidArgument, match="slot_mapping: expected 8-byte alignment, got"):
        ops.step_tables(**batch.tensors, **batch.numbers, out=small().room("cpu"))


@pytest.mark.parametrize("starts", [[1, 2, 3], [0, 3, 2], [0, 1, 4], [-1, 1, 3], [0, -1, 3]])
def test_rows_on_a_host_belong_to_requests_in_order(starts: list[int]) -> None:
    batch = small()
    batch.tensors["query_start"] = torch.tensor(starts, dtype=torch.int32)
    words = r"query_start: expected ascending numbers from 0 to at most 3 \(rows\), got"
    with pytest.raises(InvalidArgument, match=words):
        batch.run("cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_places_have_a_row_for_each_table(device: str) -> None:
    batch = small()
    batch.numbers["spans"] = [(0, 0, 3)] * 2
    batch.tensors["places"] = torch.zeros((1, 9), dtype=torch.int32)
    with pytest.raises(InvalidArgument, match=r"places: expected shape \[tables=2, V\]"):
        batch.run(device)
    batch.tensors["places"] = torch.zeros((65, 9), dtype=torch.int32)
    batch.numbers["spans"] = [(0, 0, 3)] * 65
    with pytest.raises(InvalidArgument, match="spans: expected from 1 to 64, with places, got 65"):
        batch.run(device)
    batch = small()
    batch.tensors["places"] = torch.zeros((1, 9), dtype=torch.int32)
    batch.numbers["block_pages"] = 2
    with pytest.raises(InvalidArgument, match="block_pages: expected 1 beside places, got 2"):
        batch.run(device)


@needs_cuda
def test_everything_lies_on_one_device() -> None:
    batch = small()
    for name in batch.tensors:
        mixed = {n: there(t, "cpu" if n == name else "cuda") for n, t in batch.tensors.items()}
        with pytest.raises(InvalidArgument, match="expected a tensor on"):
            ops.step_tables(**mixed, **batch.numbers, out=batch.room("cuda"))
    for name in ops.StepTables._fields:
        out = batch.room("cuda")
        with pytest.raises(InvalidArgument, match=f"{name}: expected a tensor on cuda:0, got cpu"):
            batch.run("cuda", out._replace(**{name: getattr(out, name).cpu()}))

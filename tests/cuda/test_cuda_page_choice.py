"""`score_pages` and `select_pages` on CUDA: sizes and input that the tests on a host have not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument, Unsupported, ops
from paged import rope_table
from versions import needs_cuda

pytestmark = needs_cuda

HUGE = 2**31 - 1
PAGE = 16
WIDTHS = [1, 31, 511, 2048, 2049, 4096, 4097, 8192, 8193, 20_000, 70_001]
LONG = [4097, 8192, 8193, 16_385, 32_768, 65_536, 70_001, 131_073]
KINDS = ["normal", "few", "equal", "close", "nan", "infinite", "ascending", "descending", "any"]


def numbers(kind: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Rows of scores f32, hostile in one way each."""
    drawn = torch.randn(shape, generator=generator)
    match kind:
        case "few":
            return (4 * drawn).round() / 4
        case "equal":
            return torch.full(shape, -0.0)
        case "close":
            # They differ in the last ten bits alone.
            last = torch.randint(0, 1024, shape, generator=generator, dtype=torch.int32)
            return (last + 0x41200000).view(torch.float32)
        case "nan":
            return drawn.masked_fill(torch.rand(shape, generator=generator) < 0.3, torch.nan)
        case "infinite":
            ends = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38])
            return ends[torch.randint(0, len(ends), shape, generator=generator)]
        case "ascending":
            return torch.arange(shape[1]).float().expand(shape).contiguous()
        case "descending":
            return -torch.arange(shape[1]).float().expand(shape).contiguous()
        case "any":
            bits = torch.randint(-(2**31), 2**31, shape, generator=generator)
            return bits.int().view(torch.float32)
    return drawn


def there(*tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(table.cuda() for table in tables)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_that_of_the_definition(kind, width, generator) -> None:
    rows = 12
    scores = numbers(kind, (rows, width), generator)
    counts = torch.randint(0, width + 1, (rows,), generator=generator).int()
    counts[:4] = torch.tensor([width, 0, min(width, 1), max(0, width - 1)]).int()
    budgets = torch.tensor([3, 4, 16, 64, 128, 256, 257, 1000, 2048, 4095, 4096, 4096]).int()
    budgets = budgets[torch.randperm(rows, generator=generator)]
    for sink, recent in ((1, 2), (0, 0), (3, 0)):
        named = {"sink": sink, "recent": recent, "most": 4096}
        wanted = ops.select_pages(scores, counts, budgets, **named)
        got = ops.select_pages(*there(scores, counts, budgets), **named)
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a.cpu(), b)
        again = ops.select_pages(*there(scores, counts, budgets), **named)
        assert torch.equal(again[0], got[0])


@pytest.mark.parametrize("kind", ["few", "nan", "any"])
def test_a_row_alone_has_the_answer_that_it_has_among_others(kind, generator) -> None:
    scores = numbers(kind, (300, 3000), generator)
    counts = torch.randint(0, 3001, (300,), generator=generator).int()
    budgets = torch.randint(3, 600, (300,), generator=generator).int()
    given = there(scores, counts, budgets)
    together = ops.select_pages(*given, sink=1, recent=2, most=600)
    for row in range(0, 300, 37):
        # Room for more columns makes another kernel of it.
        wide = torch.nn.functional.pad(given[0][row : row + 1], (0, 9000), value=torch.nan)
        some = (wide, given[1][row : row + 1], given[2][row : row + 1])
        alone = ops.select_pages(*some, sink=1, recent=2, most=600)
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


@pytest.mark.parametrize("width", LONG)
@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_are_chosen_from_alike_by_one_thread_block_and_by_several(
    kind, width, generator
) -> None:
    """On Hopper few of them are shared by the thread blocks of a cluster, and many are not."""
    scores = numbers(kind, (8, width), generator)
    counts = torch.randint(0, width + 1, (8,), generator=generator).int()
    counts[:6] = torch.tensor([width, 0, 1, width - 1, width // 9, 300]).int()
    # What is always selected may be more than one thread block has of a row.
    for sink, recent in ((1, 2), (0, 0), (width // 4, 3), (5, width // 3)):
        always = sink + recent
        budgets = always + torch.tensor([0, 1, 64, 256, 257, 1024, 4093, 3000])
        budgets = budgets[torch.randperm(8, generator=generator)].int()
        named = {"sink": sink, "recent": recent, "most": always + 4096}
        wanted = ops.select_pages(scores, counts, budgets, **named)
        given = there(scores, counts, budgets)
        shared = ops.select_pages(*given, **named)
        pad, others = torch.nn.functional.pad, (0, 150)
        more = pad(given[0], (0, 0, *others), value=torch.nan)
        lengths = (pad(given[1], others, value=width), pad(given[2], others, value=4096))
        alone = ops.select_pages(more, *lengths, **named)
        for a, b, c in zip(shared, alone, wanted, strict=True):
            assert torch.equal(a.cpu(), c)
            assert torch.equal(b[:8].cpu(), c)


def test_long_rows_of_a_captured_step_say_their_lengths_when_it_runs(generator) -> None:
    rows, width, most = 5, 65_536, 300
    scores, counts, budgets = there(
        numbers("few", (rows, width), generator), torch.zeros(rows).int(), torch.zeros(rows).int()
    )

    def choose() -> tuple[torch.Tensor, torch.Tensor]:
        return ops.select_pages(scores, counts, budgets, sink=1, recent=2, most=most)

    choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pages, selected = choose()
    for kind in ("few", "nan", "close"):
        scores.copy_(numbers(kind, (rows, width), generator))
        counts.copy_(torch.randint(0, width + 1, (rows,), generator=generator))
        budgets.copy_(torch.randint(3, most + 1, (rows,), generator=generator))
        graph.replay()
        here = [table.cpu() for table in (scores, counts, budgets)]
        wanted = ops.select_pages(*here, sink=1, recent=2, most=most)
        assert torch.equal(pages.cpu(), wanted[0])
        assert torch.equal(selected.cpu(), wanted[1])


@pytest.mark.parametrize("width", [100, 30_000])
def test_counts_and_budgets_on_the_device_may_say_anything(width, generator) -> None:
    scores = numbers("normal", (6, width), generator)
    counts = torch.tensor([HUGE, -1, -HUGE - 1, width, 50, width + 1]).int()
    budgets = torch.tensor([10, 10, 10, -5, 2, HUGE]).int()
    room = torch.full((8, 40), -7, dtype=torch.int32, device="cuda")
    del room
    pages, selected = ops.select_pages(*there(scores, counts, budgets), sink=1, recent=2, most=12)
    pages, selected = pages.cpu(), selected.cpu()
    wanted, _ = ops.select_pages(
        scores[:1], np.array([width], np.int32), np.array([10], np.int32), sink=1, recent=2, most=12
    )
    assert torch.equal(pages[:1], wanted)
    assert selected.tolist() == [10, 0, 0, 3, 3, 12]
    assert (pages[1:3] == -1).all()
    assert pages[3, :4].tolist() == [0, width - 2, width - 1, -1]
    assert pages[4, :4].tolist() == [0, 48, 49, -1]
    assert pages[5].tolist() == list(range(12))


def test_what_lies_on_the_device_has_to_be_said(generator) -> None:
    scores, counts = torch.zeros(2, 5).cuda(), torch.tensor([5, 5]).int()
    with pytest.raises(InvalidArgument, match="most: expected the largest budget"):
        ops.select_pages(scores, counts, counts.cuda())
    with pytest.raises(InvalidArgument, match="budgets: expected numbers from 3 to 2"):
        ops.select_pages(scores, counts, counts, sink=1, recent=2, most=2)
    with pytest.raises(InvalidArgument, match="counts: expected numbers from 0 to 5"):
        ops.select_pages(scores, counts + 1, counts)
    with pytest.raises(InvalidArgument, match="counts: expected 2 elements, got 1"):
        ops.select_pages(scores, counts[:1], counts)
    call = Scored.of([4, 2], 2, 4, 64, generator)
    entries, offsets = there(call.entries, call.offsets)
    with pytest.raises(InvalidArgument, match="width: expected the most entries of a table"):
        ops.score_pages(call.q.cuda(), entries, call.pages("cuda"), entry_offsets=offsets)
    with pytest.raises(InvalidArgument, match="width of scores: expected at least 4"):
        ops.score_pages(
            call.q.cuda(), call.entries, call.pages("cuda"), entry_offsets=call.offsets, width=3
        )
    pages = call.pages("cuda", bounds=torch.zeros(call.bounds.numel() + 1).cuda()[1:])
    with pytest.raises(InvalidArgument, match="bounds: expected"):
        ops.score_pages(call.q.cuda(), entries, pages, entry_offsets=offsets, width=4)
    odd = Scored.of([4, 2], 2, 4, 12, generator)
    with pytest.raises(InvalidArgument, match="head_dim: expected a multiple of 8, got 12"):
        odd.there(width=4)


class Scored:
    """Queries of requests over tables of pages with bounds, all on the host."""

    def __init__(self, **parts) -> None:
        self.__dict__.update(parts)

    @classmethod
    def of(cls, lengths, kv_heads, heads, dim, generator, dtype=torch.float32, turns=(0,)):
        """Pages in any order; entries turned by one of `turns` each, in runs."""
        blocks, total = max(lengths) + 3, sum(lengths)
        keys = torch.randn(blocks * kv_heads, PAGE, dim, generator=generator)
        bounds = torch.stack((keys.amin(1), keys.amax(1), keys.mean(1)), 1)
        order = torch.cat([torch.randperm(blocks, generator=generator)[:n] for n in lengths])
        place = PAGE * torch.cat([torch.arange(n) for n in lengths])
        turn = torch.tensor(turns)[torch.arange(total) // 7 % len(turns)]
        columns = (order * kv_heads, 0 * place, 0 * place + PAGE, place, turn)
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        return cls(
            q=torch.randn(len(lengths), heads, dim, generator=generator).to(dtype),
            bounds=bounds,
            entries=torch.stack(columns, 1).int(),
            offsets=torch.from_numpy(ends),
            kv_heads=kv_heads,
            dim=dim,
            options={},
            rope=rope_table(1, dim),
        )

    def pages(self, device, bounds=None) -> ops.BoundedPages:
        bounds = self.bounds.to(device) if bounds is None else bounds.view(self.bounds.shape)
        given = (bounds, PAGE, 0, self.kv_heads, self.dim**-0.5, self.rope)
        return ops.BoundedPages(*given, **self.options)

    def here(self, **named):
        return ops.score_pages(
            self.q, self.entries, self.pages("cpu"), entry_offsets=self.offsets, **named
        )

    def there(self, **named):
        entries, offsets = there(self.entries, self.offsets)
        q, pages = self.q.cuda(), self.pages("cuda")
        return ops.score_pages(q, entries, pages, entry_offsets=offsets, **named)


SHAPES = [
    # KV heads, query heads, head dim
    (8, 32, 128),
    (1, 7, 64),
    (2, 2, 256),
    (3, 9, 80),
    (1, 40, 8),
    (2, 6, 200),
    # Queries for which a thread block needs more shared memory than every launch has.
    (1, 48, 256),
    (1, 80, 256),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_by_keys_alone_are_those_by_bounds_in_f32(shape, dtype, generator) -> None:
    """Bounds that keys of the queries' dtype have are exact in that dtype."""
    for turns in ((0,), (77,), (3, -2, 0, 7, 900_000)):
        call = Scored.of([200, 0, 1, 63, 65], *shape, generator, dtype, turns)
        call.bounds = call.bounds.to(dtype).float()
        call.bounds[call.entries[3, 0].item(), 0, shape[2] - 1] = torch.nan
        call.bounds[call.entries[5, 0].item(), 1, 0] = torch.inf
        call.bounds[call.entries[7, 0].item(), :2, 5] = -torch.inf
        for options in ({}, {"shared": "sum"}, {"softcap": 2.0}):
            call.options = options
            scores, counts = call.here(width=210)
            entries, offsets = there(call.entries, call.offsets)
            alone = call.bounds[:, :2].to(dtype).cuda().contiguous()
            pages = replace(call.pages("cuda"), bounds=alone)
            got, listed = ops.score_pages(
                call.q.cuda(), entries, pages, entry_offsets=offsets, width=210
            )
            assert torch.equal(listed.cpu(), counts)
            torch.testing.assert_close(got.cpu(), scores, rtol=1e-4, atol=1e-3, equal_nan=True)


def test_keys_alone_are_refused_where_they_do_not_do(generator) -> None:
    call = Scored.of([4, 2], 2, 4, 64, generator, torch.bfloat16)
    entries, offsets = there(call.entries, call.offsets)

    def score(dtype, bounds, **options):
        pages = replace(call.pages("cuda"), bounds=bounds, **options)
        q = call.q.to("cuda", dtype)
        return ops.score_pages(q, entries, pages, entry_offsets=offsets, width=4)

    alone = call.bounds[:, :2].bfloat16().cuda().contiguous()
    score(torch.bfloat16, alone)
    with pytest.raises(Unsupported, match="bounds: expected f32, which have means too"):
        score(torch.bfloat16, alone, score="mean")
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(InvalidArgument, match="bounds"):
            score(dtype, alone)
    for wrong in (call.bounds[:, :2].cuda().contiguous(), call.bounds.bfloat16().cuda()):
        with pytest.raises(InvalidArgument, match="bounds"):
            score(torch.bfloat16, wrong)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_the_hosts(shape, dtype, generator) -> None:
    for turns in ((0,), (0, 5000), (3, -2, 0, 7, 900_000)):
        call = Scored.of([200, 0, 1, 63, 65], *shape, generator, dtype, turns)
        for options in (
            {},
            {"score": "mean"},
            {"shared": "sum"},
            {"softcap": 2.0},
            {"score": "mean", "shared": "sum", "softcap": 0.5},
        ):
            call.options = options
            wanted, counts = call.here(width=210)
            got, listed = call.there(width=210)
            assert torch.equal(listed.cpu(), counts)
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(8, 32, 128), (1, 7, 64), (2, 2, 256)])
def test_pages_in_the_middle_of_pairs_are_turned(shape, generator) -> None:
    dim = shape[2]
    call = Scored.of([90, 40], *shape, generator, torch.bfloat16, (0, 77, -1234))
    for pairing in ("half", "interleaved"):
        call.rope = rope_table(1, dim // 2, pairing)
        torch.testing.assert_close(
            call.there(width=90)[0].cpu(), call.here()[0], rtol=1e-4, atol=1e-4
        )


def test_a_score_is_the_same_whoever_else_is_scored(generator) -> None:
    turns = (0, 300)
    call = Scored.of([300, 500, 20], 4, 16, 128, generator, torch.bfloat16, turns)
    together = call.there(width=500)[0]
    assert torch.equal(call.there(width=700)[0][..., :500], together)
    # The second request's later entries alone: in another thread block, beside other ones.
    call.q, call.entries = call.q[1:2], call.entries[300 + 111 : 800]
    call.offsets = torch.tensor([0, 389], dtype=torch.int32)
    assert torch.equal(call.there(width=389)[0][0], together[1, :, 111:])


@pytest.mark.parametrize("bounds", [torch.bfloat16, torch.float8_e4m3fn])
def test_products_are_the_same_whoever_else_is_scored(bounds, generator) -> None:
    """Of 16 and 8 bits; of many rows a thread block has several windows of 64 entries."""
    lengths = [300, 650, 20, 0, *[640] * 150]
    call = Scored.of(lengths, 2, 8, 128, generator, torch.bfloat16, (0, 300, 0, -7))
    call.bounds[call.entries[330, 0].item(), 0, 3] = torch.nan
    call.bounds[call.entries[340, 0].item(), 1, 5] = 300.0 if bounds.itemsize == 1 else torch.inf
    call.bounds[call.entries[340, 0].item(), 0, 6] = torch.nan
    kept = call.bounds[:, :2].to(bounds).cuda().contiguous()
    scales = torch.full((len(kept),), 127, dtype=torch.uint8, device="cuda")
    pages = replace(
        call.pages("cuda"), bounds=kept, scales=scales if bounds.itemsize == 1 else None
    )

    def scored(first: int, last: int, begin: int, end: int) -> torch.Tensor:
        """Scores of some requests, whose entries are those from `begin` to `end` of all."""
        offsets = (call.offsets[first : last + 1] - begin).clamp(0, end - begin).cuda()
        q, entries = call.q[first:last].cuda(), call.entries[begin:end].cuda()
        return ops.score_pages(q, entries, pages, entry_offsets=offsets, width=700)[0]

    together = scored(0, len(lengths), 0, len(call.entries))
    assert torch.isnan(together[1, 0, :50]).any()
    bits = together.view(torch.int32)
    alone = scored(1, 2, 300, 950).view(torch.int32)
    assert torch.equal(alone[0], bits[1])
    # From another entry on: in other windows, beside other pages.
    later = scored(1, 2, 300 + 11, 950).view(torch.int32)
    assert torch.equal(later[0, :, : 650 - 11], bits[1, :, 11:650])
    last = scored(len(lengths) - 1, len(lengths), len(call.entries) - 640, len(call.entries))
    assert torch.equal(last[0].view(torch.int32), bits[-1])


@pytest.mark.parametrize("requests", [3, 400, 1100])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(
    ("bounds", "heads"),
    [(torch.bfloat16, 8), (torch.float8_e4m3fn, 8), (torch.bfloat16, 40)],
    ids=["bf16", "fp8", "more queries than products take"],
)
def test_few_of_many_requests_list_pages(requests, few, bounds, heads, generator) -> None:
    """Of 2048 rows or fewer thread blocks share the windows of 64 entries; of more each has own."""
    lengths = [0 if few else 3] * requests
    for at, length in ((0, 1), (1, 2500), (2, 64), (-1, 65), (requests // 2, 1300)):
        lengths[at] = length
    call = Scored.of(lengths, 2, heads, 128, generator, torch.bfloat16, (0, 300, 0, -7))
    call.bounds = call.bounds.to(bounds).float()
    call.bounds[call.entries[70, 0].item(), 0, 3] = torch.nan
    scales = None
    if bounds.itemsize == 1:
        scales = torch.full((len(call.bounds),), 127, dtype=torch.uint8, device="cuda")
    else:
        call.bounds[call.entries[80, 0].item(), 1, 5] = torch.inf
    wanted, counts = call.here(width=2600)
    kept = call.bounds[:, :2].to(bounds).cuda().contiguous()
    entries, offsets = there(call.entries, call.offsets)
    pages = replace(call.pages("cuda"), bounds=kept, scales=scales)
    for width in (2600, 1000):
        given = {"entry_offsets": offsets, "width": width}
        got, listed = ops.score_pages(call.q.cuda(), entries, pages, **given)
        assert torch.equal(listed.cpu(), counts.clamp(max=width))
        torch.testing.assert_close(
            got.cpu(), wanted[..., :width], rtol=1e-4, atol=1e-3, equal_nan=True
        )


def test_nan_and_infinities_reach_the_score(generator) -> None:
    call = Scored.of([70], 2, 4, 128, generator)
    call.bounds[call.entries[3, 0].item(), 0, 127] = torch.nan
    call.bounds[call.entries[5, 0].item(), 1, 0] = torch.inf
    call.bounds[call.entries[7, 0].item() + 1, :, 64] = -torch.inf
    call.bounds[call.entries[9, 0].item(), 2, 3] = torch.nan
    for score in ("min-max", "mean"):
        call.options = {"score": score}
        wanted, got = call.here()[0], call.there(width=70)[0].cpu()
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert torch.isnan(got).any()
    call.q[0, 1, 5] = torch.nan
    got = call.there(width=70)[0].cpu()
    assert torch.isnan(got[0, 0]).all()
    assert not torch.isnan(got[0, 1]).any()


def test_entries_without_bounds_are_never_better(generator) -> None:
    call = Scored.of([90, 50], 2, 8, 64, generator)
    wanted = call.here()[0]
    rows = len(call.bounds)
    for at, block in ((0, HUGE), (1, -1), (2, -HUGE - 1), (64, rows), (100, rows - 1)):
        call.entries[at, 0] = block
    got, counts = call.there(width=90)
    assert counts.tolist() == [[90, 90], [50, 50]]
    # The last block has bounds of its first page.
    wanted[0, :, [0, 1, 2, 64]], wanted[1, 1, 10] = -torch.inf, -torch.inf
    wanted[1, 0, 10] = got[1, 0, 10].cpu()
    assert torch.isfinite(got[1, 0, 10])
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_tables_longer_than_a_row_of_scores_end_with_it(generator) -> None:
    call = Scored.of([90, 50], 2, 8, 64, generator)
    wanted = call.here()[0]
    got, counts = call.there(width=70)
    assert counts.tolist() == [[70, 70], [50, 50]]
    torch.testing.assert_close(got.cpu(), wanted[..., :70], rtol=1e-4, atol=1e-4)
    none, counts = call.there(width=0)
    assert none.shape == (2, 2, 0)
    assert counts.tolist() == [[0, 0], [0, 0]]
    call.offsets = torch.tensor([0, 90, 60], dtype=torch.int32)
    assert call.there(width=90)[1].tolist() == [[90, 90], [0, 0]]


def test_what_is_chosen_on_the_device_is_what_the_host_chooses(generator) -> None:
    """Scores straight into the choice, one captured graph, with bounds made there as well."""
    call = Scored.of([300, 40, 4], 4, 16, 128, generator, torch.bfloat16)
    q, pages = call.q.cuda(), call.pages("cuda")
    entries, offsets = there(call.entries, call.offsets)
    budgets = torch.full((12,), 32, dtype=torch.int32, device="cuda")

    def choose() -> tuple[torch.Tensor, ...]:
        scores, counts = ops.score_pages(q, entries, pages, entry_offsets=offsets, width=300)
        rows, listed = scores.flatten(0, 1), counts.flatten()
        chosen = ops.select_pages(rows, listed, budgets, sink=1, recent=2, most=32)
        return scores, counts, *chosen

    choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores, counts, chosen, selected = choose()
    q.copy_(torch.randn(q.shape, generator=generator))
    graph.replay()
    torch.cuda.synchronize()
    wanted = ops.select_pages(
        scores.cpu().flatten(0, 1), counts.cpu().flatten(), budgets.cpu(), sink=1, recent=2
    )
    assert torch.equal(chosen.cpu(), wanted[0])
    assert torch.equal(selected.cpu(), wanted[1])
    assert selected.tolist() == [32] * 8 + [4] * 4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_by_fp8_bounds_are_the_hosts(shape, dtype, generator) -> None:
    """Head dims that are no multiple of 16, whose vectors begin on boundaries of 8 bytes."""
    for score, vectors in (("min-max", 2), ("mean", 1)):
        for turns in ((0,), (77,), (3, -2, 0, 7, 900_000)):
            call = Scored.of([200, 0, 1, 63, 65], *shape, generator, dtype, turns)
            rows = len(call.bounds)
            kept = call.bounds[:, :2] if vectors == 2 else call.bounds[:, 2:]
            kept = kept.contiguous().to(torch.float8_e4m3fn)
            kept[call.entries[3, 0].item(), 0, shape[2] - 1] = torch.nan
            scales = torch.randint(120, 130, (rows,), generator=generator).byte()
            found = []
            for device in ("cpu", "cuda"):
                entries, offsets = call.entries.to(device), call.offsets.to(device)
                pages = replace(
                    call.pages(device),
                    bounds=kept.to(device),
                    scales=scales.to(device),
                    score=score,
                )
                q = call.q.to(device)
                found.append(
                    ops.score_pages(q, entries, pages, entry_offsets=offsets, width=210)[0].cpu()
                )
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3, equal_nan=True)

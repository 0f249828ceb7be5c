"""Scores of pages, and the choice among them, against torch and numpy and one by one."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from versions import CPU, REFERENCE, RUNNABLE, VERSIONS

LAYERS, HEADS, GROUP, DIM, PAGE = 2, 2, 3, 16, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FREQUENCIES = np.geomspace(1.0, 0.01, DIM // 2, dtype=np.float32)[None].repeat(LAYERS, 0)
ROPE = ops.RopeTable(FREQUENCIES)


def turned(q: np.ndarray, delta: int) -> np.ndarray:
    """Queries [..., D] turned back by delta, in f64."""
    angle = -delta * FREQUENCIES[0].astype(np.float64)
    one, other = q[..., : DIM // 2], q[..., DIM // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((one * cos - other * sin, one * sin + other * cos), -1)


def scored_by_hand(q, table, pages: ops.BoundedPages, rank: int) -> np.ndarray:
    """Scores of one head's pages from its queries [GROUP, D]."""
    found = []
    for block, _, _, _, delta in table.tolist():
        least, most, mean = pages.bounds[block + rank].double().numpy()
        asked = turned(q, delta)
        parts = asked * mean
        if pages.score == "min-max":
            parts = np.maximum(asked * least, asked * most)
        logits = parts.sum(-1) * pages.scale
        if pages.softcap is not None:
            logits = pages.softcap * np.tanh(logits / pages.softcap)
        found.append(logits.max() if pages.shared == "highest" else logits.sum())
    return np.array(found, np.float64)


def tables_of(lengths: list[int], stride: int, generator: np.random.Generator) -> np.ndarray:
    """Entries of requests, one after the other: blocks in any order, some turned."""
    rows = []
    for length in lengths:
        blocks = (1 + generator.permutation(max(lengths, default=0)))[:length] * stride
        deltas = generator.choice([0, 0, 5, -3], length)
        rows += [
            (block, 0, PAGE, i * PAGE, delta)
            for i, (block, delta) in enumerate(zip(blocks, deltas, strict=True))
        ]
    return np.array(rows, np.int32).reshape(-1, 5)


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def bounds_of(rows: int, generator: np.random.Generator) -> torch.Tensor:
    keys = torch.from_numpy(generator.standard_normal((rows, PAGE, DIM)).astype(np.float32))
    return torch.stack((keys.amin(1), keys.amax(1), keys.mean(1)), 1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    layer=st.integers(0, LAYERS - 1),
    dtype=st.sampled_from(DTYPES),
    score=st.sampled_from(["min-max", "mean"]),
    shared=st.sampled_from(["highest", "sum"]),
    softcap=st.sampled_from([None, 2.0]),
    strided=st.booleans(),
    seed=st.integers(0, 2**16),
    version=st.sampled_from(RUNNABLE),
)
def test_scores_are_numpys(
    lengths, layer, dtype, score, shared, softcap, strided, seed, version
) -> None:
    generator = np.random.default_rng(seed)
    stride = LAYERS * HEADS
    entries, offsets = tables_of(lengths, stride, generator), offsets_of(lengths)
    bounds = bounds_of((max(lengths) + 1) * stride, generator)
    q = torch.from_numpy(generator.standard_normal((len(lengths), HEADS * GROUP, 2 * DIM)))
    q = q.to(dtype)[..., :DIM] if strided else q.to(dtype)[..., :DIM].contiguous()
    make = partial(ops.BoundedPages, bounds, PAGE, layer, HEADS, 0.25, ROPE, softcap)
    pages = make(score=score, shared=shared)
    scores, counts = version.score_pages(q, entries, pages, entry_offsets=offsets)
    assert scores.shape == (len(lengths), HEADS, max(lengths))
    assert counts.tolist() == [[length] * HEADS for length in lengths]
    for request, length in enumerate(lengths):
        table = entries[offsets[request] : offsets[request + 1]]
        for head in range(HEADS):
            asked = q[request, head * GROUP : (head + 1) * GROUP].double().numpy()
            wanted = scored_by_hand(asked, table, pages, layer * HEADS + head)
            got = scores[request, head]
            np.testing.assert_allclose(got[:length], wanted, rtol=2e-5, atol=2e-5)
            assert torch.isneginf(got[length:]).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_heads_of_a_reach_score_their_own_tables_and_rows(version) -> None:
    """Tables that no head reads may say anything, their ends too."""
    generator = np.random.default_rng(3)
    first, second = tables_of([3], 2, generator), tables_of([2], 2, generator)
    entries = np.concatenate((first, np.full((4, 5), -7, np.int32), second))
    reach = ops.Reach(4, np.array([[0, 1, 0, 0], [2, 0, 0, 0]], np.int32))
    pages = ops.BoundedPages(bounds_of(8, generator), PAGE, 1, HEADS, 1.0, ROPE, reach=reach)
    offsets = np.array([0, 3, 7, 9, 0], np.int32)
    q = torch.from_numpy(generator.standard_normal((1, HEADS * GROUP, DIM)).astype(np.float32))
    scores, counts = version.score_pages(q, entries, pages, entry_offsets=offsets)
    assert counts.tolist() == [[3, 2]]
    asked = q[0].double().numpy()
    for head, (table, rank) in enumerate([(first, 1), (second, 0)]):
        wanted = scored_by_hand(asked[head * GROUP : (head + 1) * GROUP], table, pages, rank)
        np.testing.assert_allclose(scores[0, head, : len(table)], wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_nan_in_a_bound_makes_that_page_come_first(version) -> None:
    generator = np.random.default_rng(5)
    entries, stride = tables_of([5], LAYERS * HEADS, generator), LAYERS * HEADS
    bounds = bounds_of(6 * stride, generator)
    bounds[int(entries[2, 0]), :, 4] = torch.nan
    pages = ops.BoundedPages(bounds, PAGE, 0, HEADS, 1.0, ROPE)
    q = torch.ones(1, HEADS * GROUP, DIM)
    ends = offsets_of([5])
    scores, counts = version.score_pages(q, entries, pages, entry_offsets=ends)
    assert torch.isnan(scores[0, 0]).tolist() == [False, False, True, False, False]
    assert not torch.isnan(scores[0, 1]).any()
    budgets = np.ones(HEADS, np.int32)
    chosen, _ = version.select_pages(scores[0], counts[0], budgets)
    assert chosen[0].tolist() == [2]


@pytest.mark.parametrize("version", VERSIONS)
def test_scores_of_nobody_and_of_nothing(version) -> None:
    bounds, none = torch.zeros(4, 3, DIM), np.zeros((0, 5), np.int32)
    pages = ops.BoundedPages(bounds, PAGE, 0, HEADS, 1.0, ROPE)
    q = torch.zeros(0, HEADS * GROUP, DIM)
    scores, counts = version.score_pages(q, none, pages, entry_offsets=np.zeros(1, np.int32))
    assert scores.shape == (0, HEADS, 0)
    assert counts.shape == (0, HEADS)
    scores, counts = version.score_pages(
        torch.zeros(2, HEADS, DIM), none, pages, entry_offsets=np.zeros(3, np.int32)
    )
    assert scores.shape == (2, HEADS, 0)
    chosen, selected = version.select_pages(
        scores.view(4, 0), counts.view(-1), np.full(4, 3, np.int32), sink=1, recent=2
    )
    assert (chosen == -1).all()
    assert (selected == 0).all()


def chosen_by_sorting(scores, budget: int, sink: int, recent: int) -> list[int]:
    """The choice in plain words: what is always in, then by a sort on (NaN, score, index)."""
    count = len(scores)
    if count <= budget:
        return list(range(count))
    always = [*range(sink), *range(count - recent, count)]
    others = sorted(
        range(sink, count - recent),
        key=lambda i: (
            0 if math.isnan(scores[i]) else 1,
            0 if math.isnan(scores[i]) else -scores[i],
            i,
        ),
    )
    return sorted(always + others[: budget - len(always)])


SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]),
    st.floats(width=32),
)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.lists(SCORES, max_size=12), st.integers(0, 14)), max_size=5),
    sink=st.integers(0, 2),
    recent=st.integers(0, 2),
    spare=st.integers(0, 3),
    version=st.sampled_from(RUNNABLE),
)
def test_a_choice_is_a_sort(rows, sink, recent, spare, version) -> None:
    rows = [(scores, max(budget, sink + recent)) for scores, budget in rows]
    width = max([len(scores) for scores, _ in rows], default=0) + spare
    # What lies behind a row's pages would win if it were looked at.
    scores = torch.full((len(rows), width), torch.nan)
    for row, (some, _) in enumerate(rows):
        scores[row, : len(some)] = torch.tensor(some)
    counts = np.array([len(some) for some, _ in rows], np.int32)
    budgets = np.array([budget for _, budget in rows], np.int32)
    pages, selected = version.select_pages(scores, counts, budgets, sink=sink, recent=recent)
    assert pages.shape == (len(rows), max([budget for _, budget in rows], default=0))
    for row, (some, budget) in enumerate(rows):
        wanted = chosen_by_sorting(some, budget, sink, recent)
        assert int(selected[row]) == len(wanted)
        assert pages[row].tolist() == wanted + [-1] * (pages.shape[1] - len(wanted))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_choice_among_many_equal_scores_takes_the_first(version) -> None:
    quantised = torch.randint(0, 4, (3, 4096), generator=torch.Generator().manual_seed(1)).float()
    counts = np.array([4096, 4095, 1000], np.int32)
    budgets = np.array([1024, 256, 1024], np.int32)
    pages, _ = version.select_pages(quantised, counts, budgets, sink=1, recent=2, most=1030)
    assert pages.shape == (3, 1030)
    for row in range(3):
        some = quantised[row, : counts[row]].tolist()
        wanted = chosen_by_sorting(some, int(budgets[row]), 1, 2)
        assert [page for page in pages[row].tolist() if page >= 0] == wanted


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_of_scores_may_be_wider_than_any_table(version) -> None:
    generator = np.random.default_rng(9)
    entries, offsets = tables_of([3, 0], LAYERS * HEADS, generator), offsets_of([3, 0])
    pages = ops.BoundedPages(bounds_of(16, generator), PAGE, 0, HEADS, 1.0, ROPE)
    q = torch.ones(2, HEADS, DIM)
    narrow, _ = version.score_pages(q, entries, pages, entry_offsets=offsets)
    wide, counts = version.score_pages(q, entries, pages, entry_offsets=offsets, width=90)
    assert counts.tolist() == [[3] * HEADS, [0] * HEADS]
    assert torch.equal(wide[..., :3], narrow)
    assert torch.isneginf(wide[..., 3:]).all()
    for short in (CPU, REFERENCE):
        with pytest.raises(InvalidArgument, match="width of scores: expected at least 3"):
            short.score_pages(q, entries, pages, entry_offsets=offsets, width=2)
    with pytest.raises(InvalidArgument, match="width: expected a number"):
        version.score_pages(q, entries, pages, entry_offsets=offsets, width=-1)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("budget", [3, 64, 4096])
def test_who_else_is_in_the_batch_changes_nothing(version, budget) -> None:
    generator = torch.Generator().manual_seed(budget)
    scores = torch.randn(5, 5000, generator=generator).half().float()
    scores[3] = -torch.inf
    counts, budgets = np.array([5000, 0, 1, 4100, 17], np.int32), np.full(5, budget, np.int32)
    together = version.select_pages(scores, counts, budgets, sink=1, recent=2)
    for row in range(5):
        some = slice(row, row + 1)
        alone = version.select_pages(scores[some], counts[some], budgets[some], sink=1, recent=2)
        assert torch.equal(alone[0], together[0][some])
        assert torch.equal(alone[1], together[1][some])


def scoring(**changes):
    given = {
        "q": torch.zeros(1, HEADS, DIM),
        "entries": np.array([[4, 0, PAGE, 0, 0]], np.int32),
        "entry_offsets": np.array([0, 1], np.int32),
        "bounds": torch.zeros(8, 3, DIM),
        "page_tokens": PAGE,
        "layer": 0,
        "kv_heads": HEADS,
        "scale": 1.0,
        "rope": ROPE,
    } | changes
    q, entries, offsets = (given.pop(name) for name in ("q", "entries", "entry_offsets"))
    return ops.score_pages(q, entries, ops.BoundedPages(**given), entry_offsets=offsets)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": np.zeros((1, HEADS, DIM), np.float32)}, "q: expected a tensor of torch"),
        ({"q": torch.zeros(1, HEADS, DIM, dtype=torch.float64)}, "q: expected"),
        ({"q": torch.zeros(1, 3, DIM)}, "query heads"),
        ({"q": torch.zeros(2, HEADS, DIM)}, "q rows"),
        ({"q": torch.zeros(1, HEADS, DIM + 1)}, "head_dim of q"),
        ({"bounds": torch.zeros(8, 2, DIM)}, r"bounds: expected shape \[pages, 3=3"),
        ({"bounds": torch.zeros(8, 3, DIM).double()}, "bounds: expected float32"),
        ({"bounds": torch.zeros(3, 8, DIM).transpose(0, 1)}, "bounds: expected C-contiguous"),
        ({"bounds": torch.zeros(5, 3, DIM)}, "expected a block within the cache|bounds"),
        ({"entries": np.zeros((1, 4), np.int32)}, "entries: expected shape"),
        ({"entries": np.array([[4, 0, PAGE + 1, 0, 0]], np.int32)}, "entry slots"),
        ({"entries": np.array([[-1, 0, PAGE, 0, 0]], np.int32)}, "entry block"),
        ({"entry_offsets": np.array([0, 2], np.int32)}, "entry_offsets"),
        ({"entry_offsets": [0, 1]}, "entry_offsets: expected a tensor"),
        ({"kv_heads": 0}, "."),
        ({"kv_heads": -1}, "kv_heads: expected a number"),
        ({"page_tokens": -1}, "page_tokens"),
        ({"layer": LAYERS}, "layer"),
        ({"scale": math.nan}, "scale"),
        ({"softcap": 0.0}, "softcap"),
        ({"score": "max"}, "score: expected min-max or mean"),
        ({"shared": "mean"}, "shared: expected highest or sum"),
    ],
)
def test_what_cannot_be_scored_is_refused(changes, words) -> None:
    with pytest.raises(InvalidArgument, match=words):
        scoring(**changes)


def test_pages_are_named_as_such() -> None:
    with pytest.raises(InvalidArgument, match="pages: expected a BoundedPages"):
        ops.score_pages(torch.zeros(0, 1, 1), np.zeros((0, 5)), None, entry_offsets=np.zeros(1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": torch.zeros(2, 3).double()}, "scores: expected float32"),
        ({"scores": torch.zeros(3, 2).T}, "scores: expected C-contiguous"),
        ({"scores": torch.zeros(3)}, r"scores: expected shape \[R, S\]"),
        ({"counts": np.array([1, 4], np.int32)}, "counts: expected numbers from 0 to 3"),
        ({"counts": np.array([1, -1], np.int32)}, "counts"),
        ({"counts": np.array([1], np.int32)}, "."),
        ({"budgets": np.array([1, 3], np.int32)}, "budgets: expected numbers from 2 to 3"),
        ({"budgets": np.array([2.0, 3.0])}, "budgets: expected int32"),
        ({"budgets": [2, 3]}, "budgets: expected a tensor"),
        ({"sink": -1}, "sink"),
        ({"most": 2}, "budgets: expected numbers from 2 to 2"),
        ({"most": -1}, "most: expected a number"),
    ],
)
def test_what_cannot_be_selected_is_refused(changes, words) -> None:
    given = {
        "scores": torch.zeros(2, 3),
        "counts": np.array([3, 3], np.int32),
        "budgets": np.array([2, 3], np.int32),
        "sink": 1,
        "recent": 1,
    } | changes
    with pytest.raises(InvalidArgument, match=words):
        ops.select_pages(given.pop("scores"), given.pop("counts"), given.pop("budgets"), **given)


def test_cuda_by_name_wants_tensors_there() -> None:
    counts = np.array([3], np.int32)
    with pytest.raises(InvalidArgument, match="scores: expected a tensor on cuda"):
        ops.select_pages(torch.zeros(1, 3), counts, counts, backend="cuda")

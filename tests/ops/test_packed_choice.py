"""Packed blocks chosen by their mean keys, and attention to them alone (MosaicKV, section 5.1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from packed_texts import CLOSE, Text, random_bases, read_back, text_of
from paged import causal_mask, dense_attention, rope_table
from versions import CPU, REFERENCE, RUNNABLE, VERSIONS

HEADS, DIM, PAGE = 2, 64, 32


def packed_text(generator, kind: str, tokens: int, dtype=torch.bfloat16) -> Text:
    of = ops.packed_format(kind, DIM, PAGE)
    bases = random_bases(generator, of, HEADS) if of.kind == "top-r" else None
    given = {"kv_heads": HEADS, "dtype": dtype, "bases": bases}
    return text_of(generator, tokens, of=of, version=CPU, **given)


def bounds_of(text: Text, packs: np.ndarray | torch.Tensor | None = None) -> torch.Tensor:
    bounds = torch.full((len(text.packed.data), 3, DIM), 7.0)
    rows = text.packs if packs is None else packs
    ops.bound_packed(text.cache, bounds, rows, pages=HEADS, page_tokens=PAGE)
    return bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bounds_are_those_of_the_exact_keys(generator, dtype) -> None:
    text = packed_text(generator, "int4", 3 * PAGE + 5, dtype)
    text.packs[-1, 3:] = 999_999
    got = bounds_of(text)
    for row, keys in zip(text.packs, text.k.split(PAGE), strict=True):
        for head in range(HEADS):
            of = keys[:, head]
            wanted = torch.stack((of.amin(0), of.amax(0), of.mean(0))).float()
            torch.testing.assert_close(got[row[0] + head], wanted)
    written = np.unique(text.packs[:, 0, None] + np.arange(HEADS))
    left = np.delete(np.arange(len(got)), written)
    assert (got[left] == 7).all(), "no other page has bounds"


def test_nan_keys_have_nan_bounds_of_their_element_alone(generator) -> None:
    text = packed_text(generator, "int4", PAGE)
    block = int(text.packs[0, 2])
    text.cache[block, 0, 3, 11] = torch.nan
    nan = bounds_of(text).isnan()
    assert nan[int(text.packs[0, 0]), :, 11].all()
    assert nan.sum() == 3


@pytest.mark.parametrize(
    ("column", "number"), [(0, 0), (0, 10**6), (1, 0), (1, PAGE + 1), (2, 0), (2, 10**6), (3, -1)]
)
def test_rows_that_point_outside_are_refused(generator, column, number) -> None:
    text = packed_text(generator, "int4", PAGE)
    text.packs[0, column] = number
    with pytest.raises(InvalidArgument, match="packs: expected a packed block"):
        bounds_of(text)


def test_tensors_of_other_shapes_are_refused(generator) -> None:
    text = packed_text(generator, "int4", PAGE)
    bounds = torch.zeros(3, 3, DIM)
    for cache, held, packs, named in (
        (text.cache[0], bounds, text.packs, "cache"),
        (text.cache[:, :, :15], bounds, text.packs, "cache"),
        (text.cache, bounds.double(), text.packs, "bounds"),
        (text.cache, bounds[:, :2], text.packs, "bounds"),
        (text.cache, bounds[..., :8], text.packs, "bounds"),
        (text.cache, bounds, text.packs[:, :3], "packs"),
        (text.cache, bounds, text.packs.astype(np.int64), "packs"),
        (text.cache, bounds, "rows", "packs"),
    ):
        with pytest.raises(InvalidArgument, match=f"{named}: expected"):
            ops.bound_packed(cache, held, packs, pages=HEADS, page_tokens=PAGE)


def chosen(text: Text, version, q: torch.Tensor, budget: int, shared: str):
    """Pages i32 [1, G, K] and how many, of the blocks of a text, for its last token's row."""
    scoring = (PAGE, 0, HEADS, DIM**-0.5, rope_table(1, DIM))
    pages = ops.BoundedPages(bounds_of(text), *scoring, score="mean", shared=shared)
    entries, offsets = text.entries(), np.array([0, len(text.packs)], np.int32)
    scores, counts = version.score_pages(q, entries, pages, entry_offsets=offsets)
    budgets = np.full(HEADS, budget, np.int32)
    listed = counts.numpy().reshape(-1)
    return version.select_pages(scores.view(HEADS, -1), listed, budgets)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["int4", "half-int4", "quarter-bf16"]),
    tokens=st.integers(1, 400),
    group=st.sampled_from([1, 4]),
    budget=st.integers(1, 6),
    shared=st.sampled_from(["highest", "sum"]),
    window=st.none() | st.integers(1, 200),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**20),
)
def test_what_is_selected_is_attended_and_nothing_else(
    kind, tokens, group, budget, shared, window, version, seed
) -> None:
    """Against f64: blocks by what their mean keys score, then softmax over their tokens alone."""
    generator = torch.Generator().manual_seed(seed)
    text = packed_text(generator, kind, tokens)
    q = torch.randn(1, HEADS * group, DIM, generator=generator).bfloat16()
    pages, selected = chosen(text, version, q, budget, shared)
    entries, offsets = text.entries(), np.array([0, len(text.packs)], np.int32)
    wide = (pages.view(1, HEADS, -1), selected.view(1, HEADS))
    rows, ends = ops.gather_entries(*wide, entries, entry_offsets=offsets)
    own = ops.Reach(
        2 * HEADS, np.array([(2 * g, g, window or 0, 0) for g in range(HEADS)], np.int32)
    )
    kv = ops.PackedKv(text.packed, 0, HEADS, DIM**-0.5, rope_table(1, DIM), reach=own)
    at = np.array([tokens - 1], np.int32)
    out, lse = version.attend_packed(q, at, rows.numpy(), kv, entry_offsets=ends.numpy())
    k, v = (part.double() for part in read_back(text, REFERENCE))
    means = torch.stack([part.mean(0) for part in text.k.split(PAGE)])
    seen = causal_mask(torch.tensor([tokens - 1]), tokens, window)
    for head in range(HEADS):
        mine = slice(head * group, (head + 1) * group)
        asked = q[0, mine].double() @ means[:, head].T * DIM**-0.5
        score = asked.sum(0) if shared == "sum" else asked.amax(0)
        best = score.topk(min(budget, len(means))).indices.sort().values
        got = pages[head][: int(selected[head])].long()
        # Where means score within f32 of each other either is right.
        worst = score[got].sort().values - score[best].sort().values
        assert worst.abs().max() < 1e-3 * score.abs().max().clamp_min(1)
        of_blocks = torch.zeros(tokens, dtype=torch.bool)
        for block in got.tolist():
            of_blocks[block * PAGE : (block + 1) * PAGE] = True
        wanted, of_lse, _ = dense_attention(
            q[:, mine], k[:, head : head + 1], v[:, head : head + 1], seen & of_blocks, DIM**-0.5
        )
        limit = CLOSE[torch.bfloat16]
        close = {"rtol": limit, "atol": limit * float(wanted.abs().max().clamp_min(1))}
        nothing = of_lse == -torch.inf
        torch.testing.assert_close(out[:, mine].double(), wanted, check_dtype=False, **close)
        assert torch.equal(lse[:, mine] == -torch.inf, nothing)
        there = of_lse.masked_fill(nothing, 0.0)
        spread = {"rtol": limit, "atol": limit * float(there.abs().max().clamp_min(1))}
        found = lse[:, mine].masked_fill(nothing, 0.0).double()
        torch.testing.assert_close(found, there, **spread)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["int4", "half-int4"])
def test_all_blocks_selected_are_dense(generator, kind, version) -> None:
    text = packed_text(generator, kind, 200)
    q = torch.randn(1, 4, DIM, generator=generator).bfloat16()
    pages, selected = chosen(text, version, q, len(text.packs), "sum")
    assert (selected == len(text.packs)).all()
    entries, offsets = text.entries(), np.array([0, len(text.packs)], np.int32)
    wide = (pages.view(1, HEADS, -1), selected.view(1, HEADS))
    rows, ends = ops.gather_entries(*wide, entries, entry_offsets=offsets)
    kv = ops.PackedKv(text.packed, 0, HEADS, DIM**-0.5, rope_table(1, DIM))
    own = ops.Reach(2 * HEADS, np.array([(2 * g, g, 0, 0) for g in range(HEADS)], np.int32))
    of_heads = ops.PackedKv(text.packed, 0, HEADS, DIM**-0.5, rope_table(1, DIM), reach=own)
    at = np.array([199], np.int32)
    some = version.attend_packed(q, at, rows.numpy(), of_heads, entry_offsets=ends.numpy())
    whole = version.attend_packed(q, at, entries, kv, entry_offsets=offsets)
    for one, other in zip(some, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)

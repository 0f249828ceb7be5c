"""What strategies choose: each KV head in the smallest format that loses little enough, or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from document_decoding import documents, fresh
from families import random_tokens, tiny
from kvweave import InvalidArgument, Unsupported, ops
from kvweave.adapters.kvpress import PressedCache
from kvweave.runner import Packing, Segment, Strategy
from kvweave.runner.tiers import strategies
from kvweave.runner.tiers.packed_losses import Part
from packed_decoding import packed_runner
from packed_texts import rounded
from strategy_runners import (
    DIM,
    HEADS,
    LAYERS,
    LONG,
    SIZES,
    all_is_back,
    formats_of,
    runner_of,
    text_of,
    uneven_model,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


@contextmanager
def heard(monkeypatch: Any) -> Iterator[list[Any]]:
    """What the thread is told of texts that it packs: parts and what follows."""
    told: list[Any] = []
    made = strategies.ChosenFormats

    def listens(*given: Any) -> Any:
        told.append(given)
        return made(*given)

    with monkeypatch.context() as patched:
        patched.setattr(strategies, "ChosenFormats", listens)
        yield told


# ---- the choice ---------------------------------------------------------------------------


def exact_of(parts: list[Part]) -> np.ndarray:
    """Keys and values f64 [pages, 2, T, D] that packs name."""
    rows = []
    pages = LAYERS * HEADS
    for part in parts:
        for tokens, *blocks in part.packs[:, 1:].tolist():
            some = np.concatenate([part.cache[b : b + pages].double() for b in blocks if b], 2)
            rows.append(some[:, :, :tokens])
    return np.concatenate(rows, 2)


def loss_of(x: np.ndarray, of: ops.PackedFormat, basis: np.ndarray, left_out: int = 0) -> float:
    """The share of Σ |x|² [T, D] that top-r pages of bf16 lose: by sorting, in f64.

    So many tokens at the beginning do not count.
    """
    x = x[left_out:]
    mean, directions = basis[0], basis[1 : of.channels + 1]
    along = (x - mean) @ directions.T
    groups = along.reshape(len(x), -1, of.group)
    order = np.argsort(-np.square(groups).sum(-1), axis=1, kind="stable")
    kept = np.zeros(groups.shape[:2], bool)
    np.put_along_axis(kept, order[:, : of.kept // of.group], True, 1)
    stored = torch.from_numpy(np.where(kept[..., None], groups, 0.0)).bfloat16().double().numpy()
    back = mean + stored.reshape(along.shape) @ directions
    return float(np.square(x - back).sum() / np.square(x).sum())


def loss_of_codes(x: np.ndarray, side: int, left_out: int = 0) -> float:
    """The same of INT4 pages, whose steps keys have by channel and page, values by token."""
    of = torch.from_numpy(x)
    parts = of.split(64, 0) if side == 0 else (of,)
    back = torch.cat([rounded(part, -2 if side == 0 else -1, "bf16", 15)[0] for part in parts])
    return float((of - back)[left_out:].square().sum() / of[left_out:].square().sum())


@pytest.mark.parametrize("bound", [0.001, 0.13, 0.6, 0.8])
def test_each_head_has_the_smallest_format_within_the_bound(
    model: Any, monkeypatch: Any, bound: float
) -> None:
    """Against arithmetic in f64, in the bases that the text has; what has none falls back."""
    runner = runner_of(model, bound, "quarter-bf16")
    with heard(monkeypatch) as told:
        packing = runner.encode(random_tokens(LONG, 1), "long").packing
        runner.flush()
    (parts, _, _, bases, candidates, fallback, _) = told[0]
    assert {"own", "own, not centred"} <= bases.keys()
    x, seen = exact_of(parts), formats_of(text_of(runner))
    # The first token is exact beside its pages, whose steps it has a part in all the same.
    assert [part.left_out for part in parts] == [1] + [0] * (len(parts) - 1)
    most = []
    for rank in range(LAYERS * HEADS):
        of, basis = seen[rank]
        # Of each side the basis in which the largest candidate loses least.
        widest = max(candidates, key=lambda each: (each.channels, each.page_bytes))
        named = [each[rank].double().numpy() for each in bases.values()]
        best = [
            min(named, key=lambda each, side=side: loss_of(x[rank, side], widest, each[side], 1))
            for side in (0, 1)
        ]
        sides = x[rank], best[0][0], best[1][1]
        losses = {
            each: max(loss_of(sides[0][s], each, sides[1 + s], 1) for s in (0, 1))
            for each in candidates
        }
        losses[fallback] = max(loss_of_codes(x[rank, s], s, 1) for s in (0, 1))
        fits = [each for each, lost in losses.items() if lost <= bound]
        if not fits:
            assert of == fallback
        else:
            assert of.page_bytes == min(each.page_bytes for each in fits)
            assert of in fits
        if of != fallback:
            for side in (0, 1):
                assert np.array_equal(basis[side].double(), sides[1 + side][: of.channels + 1])
        most.append(losses[of])
    assert packing.most_lost == pytest.approx(max(most), rel=1e-3)
    assert sum(packing.formats.values()) == LAYERS * HEADS
    assert packing.bytes == text_of(runner).nbytes
    assert packing.over_bound == (LAYERS * HEADS if bound == 0.001 else 0)


def test_pages_that_lose_more_than_their_sample_are_chosen_anew(
    model: Any, monkeypatch: Any
) -> None:
    """Tried on few tokens, the choice is that of all of them."""
    monkeypatch.setattr("kvweave.runner.tiers.packed_losses.SAMPLED_TOKENS", 64)
    x = torch.randn(1 + 4 * 20, 2, 64, DIM, generator=torch.Generator().manual_seed(1))
    # What is tried is easy; all the rest is not.
    x[1:5] *= torch.linspace(4, 0.01, DIM)
    packs = np.zeros((20, 3), np.int32)
    packs[:, 1], packs[:, 2] = 64, 1 + 4 * np.arange(20)
    axes = torch.zeros(4, 2, DIM + 1, DIM)
    axes[:, :, 1:] = torch.eye(DIM)
    found = ops.top_r_candidates(DIM)
    fallback = ops.packed_format("int4", DIM)
    known = found, fallback, 0.3
    made = strategies.ChosenFormats([Part(x, packs)], 4, 20 * 64, {"axes": axes}, *known)
    assert made.most_lost <= 0.3
    assert sum(made.formats.values()) == 4
    for of, ranks, data in ((each.format, each.ranks, each.data) for each in made.made):
        assert data.shape == (20, len(ranks), of.page_bytes)
        y = exact_of([Part(x, packs)])[ranks]
        basis, sides = axes[0, 0].double().numpy(), y.reshape(-1, 1280, DIM)
        fits = [each for each in found if max(loss_of(s, each, basis) for s in sides) <= 0.3]
        if max(loss_of_codes(row[s], s) for row in y for s in (0, 1)) <= 0.3:
            fits.append(fallback)
        assert of.page_bytes == min(each.page_bytes for each in fits)


# ---- hostile ------------------------------------------------------------------------------


def test_nothing_within_the_bound_falls_back_and_says_so(model: Any) -> None:
    runner = runner_of(model, 0.0, "half-int4")
    report = runner.encode(random_tokens(LONG, 1), "long").packing
    runner.flush()
    assert report.formats == {"int4/64/bf16": LAYERS * HEADS}
    assert report.over_bound == LAYERS * HEADS
    assert 0.0 < report.most_lost < 0.05
    assert max(report.lost) < min(report.lost_first)
    assert runner.packing_stats()["over_bound"] == LAYERS * HEADS
    same = runner_of(model, 0.0).encode(random_tokens(LONG, 1), "long")
    assert same.packing.format == "int4"


def test_what_is_as_small_in_the_pool_stays_there(model: Any) -> None:
    runner = runner_of(model, 0.0)
    report = runner.encode(random_tokens(LONG, 1), "long").packing
    runner.flush()
    assert report.why == "no candidate loses as little as the bound"
    runner = runner_of(model, 0.3)
    report = runner.encode(random_tokens(100, 1), "short").packing
    runner.flush()
    assert report.why == "as little is lost in the pool's format, which has no more bytes"
    assert max(report.lost_first) <= 0.3


@pytest.mark.parametrize("count", [1, 63, 64, 65])
def test_short_documents(model: Any, count: int) -> None:
    """Shorter than a page too: they have no basis of their own."""
    doc = documents([count])[0]
    runner = runner_of(model, 0.9)
    report = runner.encode(doc.tokens, "short").packing
    runner.flush()
    assert not report.waiting
    prompt = [fresh(70, 1), doc, fresh(150, 2)]
    answer = runner.generate(prompt, "naive", max_new_tokens=5, stop=[])
    assert len(answer.tokens) == 5
    runner.delete("short")
    assert all_is_back(runner)


def test_what_is_not_finite_is_packed_in_the_fallback(model: Any) -> None:
    broken = tiny("llama", **SIZES)
    broken.get_input_embeddings().weight.data[7] = torch.nan
    tokens = np.asarray(random_tokens(LONG, 1))
    tokens[tokens == 7] = 8
    tokens[-1] = 7
    runner = runner_of(broken, 0.5, "half-int4")
    report = runner.encode(tokens.tolist(), "long").packing
    runner.flush()
    assert report.formats == {"int4/64/bf16": LAYERS * HEADS}
    assert report.over_bound == LAYERS * HEADS
    assert report.most_lost == np.inf
    sound = Segment(tokens=random_tokens(300, 2).tolist())
    runner.insert(sound.tokens, "sound")
    prompt = [fresh(70, 1), sound, fresh(5, 2)]
    assert runner.prefill(prompt, "naive", watched=False).logits.isfinite().all()


@pytest.mark.parametrize("bound", [-1e-9, np.nan, np.inf, "0.1", None, True])
def test_what_is_no_bound_is_refused(bound: Any) -> None:
    with pytest.raises(InvalidArgument, match="^bound: expected"):
        Strategy(bound)


def test_what_is_no_strategy_is_refused(model: Any) -> None:
    for given in (
        (),
        [ops.top_r_candidates(DIM)[0]],
        (ops.packed_format("int4", DIM),),
        ("top-r",),
    ):
        with pytest.raises(InvalidArgument, match="^candidates: expected None or a tuple of top-r"):
            Strategy(0.1, given)
    with pytest.raises(InvalidArgument, match="^fallback: expected 'int4' or 'int8', got 'fp8'"):
        Strategy(0.1, fallback="fp8")
    for share in (0.0, -0.5, 1.5, np.nan):
        with pytest.raises(InvalidArgument, match="^final_share: expected"):
            Strategy(0.1, final_share=share)
    with pytest.raises(InvalidArgument, match="^strategy: expected a Strategy or None, got 0.1"):
        Packing("int4", strategy=0.1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="^kept: expected a multiple of 4"):
        ops.PackedFormat("top-r", DIM, kept=6, group=4, numbers="bf16")
    other = (ops.top_r_candidates(2 * DIM)[0],)
    with pytest.raises(InvalidArgument, match="^kv_dtype: expected a format with head_dim=32"):
        packed_runner(model, kv_dtype=Packing("int4", strategy=Strategy(0.1, other)))
    narrow = tiny("llama", head_dim=16)
    with pytest.raises(InvalidArgument, match="^kept: expected"):
        packed_runner(narrow, kv_dtype=Packing("int4", strategy=Strategy(0.1)))


def test_what_does_not_go_with_it_is_refused_by_name(model: Any) -> None:
    given = Packing("int4", strategy=Strategy(0.5))
    runner = runner_of(model, 0.5)
    for made in (kvweave.PagedCache, PressedCache):
        with pytest.raises(Unsupported, match="^kv_dtype: expected a Packing without a strategy"):
            made(model, kv_dtype=given)
    assert all_is_back(runner)

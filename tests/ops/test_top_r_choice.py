"""The choice of a top-r format: by losses that are computed again here, in f64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument, ops
from packed_texts import text_of

FORMATS = ops.top_r_candidates(64, 32)


def test_candidates_are_the_papers_and_the_smallest_come_first() -> None:
    assert len(set(FORMATS)) == 18
    assert {of.kept for of in FORMATS} == {8, 16, 24}
    assert {of.group for of in FORMATS} == {1, 2, 4}
    assert {of.channels for of in FORMATS} == {48, 64}
    sizes = [of.page_bytes for of in FORMATS]
    assert sizes == sorted(sizes)
    assert all(of.numbers == "int4" for of in ops.top_r_candidates(80, numbers="int4"))


def test_losses_are_what_is_left_out(generator) -> None:
    text = text_of(generator, 70, of=ops.PackedFormat("top-r", 64, 32, kept=64))
    moments = ops.Moments(text.packed.format, 2)
    moments.add(text.cache, text.packs)
    basis = torch.from_numpy(moments.basis())
    losses = ops.top_r_losses(text.cache, text.packs, basis, FORMATS, pages=2)
    assert losses.shape == (18, 2, 2)
    for of, loss in zip(FORMATS, losses, strict=True):
        for side, exact in enumerate((text.k, text.v)):
            for page in range(2):
                x, part = exact[:, page], basis[page, side].double()
                c = ((x - part[0]) @ part[1:].T)[:, : of.channels]
                energy = c.square().unflatten(-1, (-1, of.group)).sum(-1)
                kept = energy.topk(of.kept // of.group).values.sum()
                wanted = ((x - part[0]).square().sum() - kept) / x.square().sum()
                assert abs(float(loss[page, side] - wanted)) < 1e-3


def test_the_smallest_below_the_bound_is_chosen() -> None:
    formats = FORMATS[:3]
    nan = float("nan")
    losses = torch.tensor(
        [
            [[0.4, 0.3], [0.1, 0.4], [nan, 0.1], [0.05, 0.05], [nan, nan]],
            [[0.2, 0.1], [0.3, 0.3], [0.1, 0.1], [0.01, 0.02], [nan, nan]],
            [[0.3, 0.1], [0.2, 0.25], [0.05, 0.02], [0.01, 0.01], [nan, nan]],
        ],
        dtype=torch.float64,
    )
    wanted = [1, 2, 1, 0, 2]
    assert ops.choose_top_r(losses, formats, 0.2) == [formats[i] for i in wanted]
    mixed = ops.choose_top_r(losses.flip(0), formats[::-1], 0.2)
    assert mixed == [formats[i] for i in wanted], "whatever order they come in"


def test_a_bound_of_nothing_takes_what_loses_least(generator) -> None:
    text = text_of(generator, 40, of=FORMATS[0])
    whole = ops.Moments(ops.PackedFormat("top-r", 64, 32, kept=64), 2)
    whole.add(text.cache, text.packs)
    basis = torch.from_numpy(whole.basis())
    losses = ops.top_r_losses(text.cache, text.packs, basis, FORMATS, pages=2)
    for chosen in ops.choose_top_r(losses, FORMATS, 0.0):
        assert (chosen.kept, chosen.group) == (24, 1)
    assert ops.choose_top_r(losses, FORMATS, 2.0) == [FORMATS[0]] * 2


def test_what_is_no_choice_is_refused() -> None:
    losses = torch.zeros(18, 2, 2)
    for bound in (-0.1, float("nan")):
        with pytest.raises(InvalidArgument, match="bound: expected a loss from 0 on"):
            ops.choose_top_r(losses, FORMATS, bound)
    for formats in ((), FORMATS[:3]):
        with pytest.raises(InvalidArgument, match="losses: expected"):
            ops.choose_top_r(losses, formats, 0.1)
    cache, basis = torch.zeros(5, 2, 16, 64), torch.zeros(2, 2, 65, 64)
    with pytest.raises(InvalidArgument, match="packs: expected rows"):
        ops.top_r_losses(cache, np.zeros((1, 2), np.int32), basis, FORMATS, pages=2)

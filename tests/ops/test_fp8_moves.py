"""Pages that are kept as e4m3 numbers with powers of two: against torch's own rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from versions import RUNNABLE

PAGE = (2, 4, 8)
GREATEST_EXPONENT = {torch.float32: 127, torch.bfloat16: 127, torch.float16: 15}
HOSTILE = [0.0, -0.0, 1.0, 448.0, 464.0, 465.0, 6e4, -65504.0, 1e-6, 6e-8, 3e38, -1e-44]
NOT_FINITE = [np.inf, -np.inf, np.nan]


def i32(*numbers) -> np.ndarray:
    return np.array(numbers, np.int32)


def kept(side: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The power of two of keys or values, and they in e4m3: by torch, in f64."""
    numbers = side.double()
    finite = numbers[numbers.isfinite()].abs()
    greatest = float(finite.max()) if len(finite) else 0.0
    power = max(-126, -GREATEST_EXPONENT[side.dtype])
    while power < GREATEST_EXPONENT[side.dtype] - 8 and greatest > 464.0 * 2.0**power:
        power += 1
    quotients = (numbers / 2.0**power).clamp(-448, 448)
    # A quotient that is no f32 is far below what e4m3 tells from 0.
    return power, quotients.float().to(torch.float8_e4m3fn)


def pages(count: int, dtype: torch.dtype, hostile: float, generator) -> torch.Tensor:
    """Pages of any size of numbers, with some that are extreme."""
    drawn = generator.standard_normal((count, *PAGE))
    drawn *= 10.0 ** generator.uniform(-8, 6, (count, 2, 1, 1))
    odd = generator.random(drawn.shape) < hostile
    drawn[odd] = generator.choice(HOSTILE + NOT_FINITE * (hostile > 0.05), odd.sum())
    return torch.from_numpy(drawn).float().to(dtype)


@settings(max_examples=120, deadline=None)
@given(
    dtype=st.sampled_from([*GREATEST_EXPONENT]),
    ranks=st.integers(1, 3),
    width=st.integers(1, 4),
    hostile=st.sampled_from([0.0, 0.02, 0.3]),
    seed=st.integers(0, 2**16),
    version=st.sampled_from(RUNNABLE),
)
def test_pages_are_rounded_once_and_widened(dtype, ranks, width, hostile, seed, version) -> None:
    generator = np.random.default_rng(seed)
    rows = 2 * ranks
    of_slots = (1 + ranks * generator.permutation(2 * width)).astype(np.int32).reshape(2, width)
    of_home = (ranks * generator.permutation(4 * width)).astype(np.int32).reshape(2, 2 * width)
    slots = pages(rows * width + 1, dtype, hostile, generator)
    home = torch.zeros((4 * ranks * width, *PAGE)).to(torch.float8_e4m3fn)
    scales = torch.zeros((len(home), 2), dtype=torch.uint8)
    moves = [(row, 2 * slot + row % 2, slot) for row in range(rows) for slot in range(width)]
    count = int(generator.integers(0, len(moves) + 1))
    wanted, powers = home.clone(), scales.clone()
    back = torch.full_like(slots, 7.0)
    for row, page, slot in moves[:count]:
        at = int(of_home[row // ranks, page]) + row % ranks
        where = int(of_slots[row // ranks, slot]) + row % ranks
        for side in (0, 1):
            power, wanted[at, side] = kept(slots[where, side])
            powers[at, side] = power + 127
            back[where, side] = (wanted[at, side].double() * 2.0**power).to(dtype)
    there = ops.RowPages(home, of_home, ranks, scales)
    steps = i32(*moves), i32(count)
    version.move_pages(*steps, ops.RowPages(slots, of_slots, ranks), there, way="spill")
    same = (home.float() == wanted.float()) | (home.float().isnan() & wanted.float().isnan())
    assert same.all()
    assert torch.equal(scales, powers)
    found = torch.full_like(slots, 7.0)
    version.move_pages(*steps, ops.RowPages(found, of_slots, ranks), there, way="fetch")
    torch.testing.assert_close(found, back, rtol=0, atol=0, equal_nan=True)
    # What has come back is kept as the same bits: nothing is rounded twice.
    again, scales_again = torch.zeros_like(home), torch.zeros_like(scales)
    beside = ops.RowPages(again, of_home, ranks, scales_again)
    version.move_pages(*steps, ops.RowPages(found, of_slots, ranks), beside, way="spill")
    assert torch.equal(again.view(torch.uint8), home.view(torch.uint8))
    assert torch.equal(scales_again, scales)


ARENA, TABLE = torch.ones(3, *PAGE), i32([0, 1, 2])
HOME = torch.zeros(3, *PAGE).to(torch.float8_e4m3fn)
SCALES = torch.zeros(3, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("slots", "home", "scales", "words"),
    [
        (ARENA.double(), HOME, SCALES, "slots: expected"),
        (HOME.clone(), HOME, SCALES, "slots: expected"),
        (ARENA, ARENA.clone(), SCALES, "home: expected float8_e4m3fn"),
        (ARENA, HOME[:, :, :2].contiguous(), SCALES, "home: expected pages of 64 numbers"),
        (ARENA, HOME, SCALES[:2], "scales: expected shape"),
        (ARENA, HOME, SCALES.int(), "scales: expected uint8"),
        (ARENA, HOME, SCALES.T.contiguous().T, "scales: expected C-contiguous"),
        (ARENA[:, :1, :1, :1].contiguous(), HOME[:, :1, :1, :1].contiguous(), SCALES, "as many of"),
    ],
)
@pytest.mark.parametrize("way", ["fetch", "spill"])
def test_what_cannot_be_rounded_is_refused(slots, home, scales, words, way) -> None:
    sides = ops.RowPages(slots, TABLE), ops.RowPages(home, TABLE, 1, scales)
    with pytest.raises(InvalidArgument, match=words):
        ops.move_pages(i32([0, 1, 2]), i32(1), *sides, way=way)
    assert not HOME.view(torch.uint8).any()
    assert (ARENA == 1).all()
    with pytest.raises(InvalidArgument, match="scales: expected those of home alone"):
        ops.move_pages(i32([0, 1, 2]), i32(1), sides[1], sides[1], way=way)

"""From which size on a copy engine carries pieces, by timings that are made up."""

from __future__ import annotations

import math

import pytest

from kvweave.runner.kv.copy_engine import NEVER, PIECES, PieceTiming, engine_from


def of_ratios(*ratios: float) -> list[PieceTiming]:
    """Timings of pieces in which the engine takes so many times what processors take."""
    return [
        PieceTiming(size, ratio * 1e-4, 1e-4) for size, ratio in zip(PIECES, ratios, strict=True)
    ]


@pytest.mark.parametrize(
    ("ratios", "wanted"),
    [
        ((4.0, 2.0, 0.9, 0.8), PIECES[2]),
        ((0.5, 0.5, 0.5, 0.5), PIECES[0]),
        ((4.0, 3.0, 2.0, 1.5), NEVER),
        # Where both take as long processors are left to others.
        ((1.0, 1.0, 1.0, 1.0), PIECES[0]),
        ((3.0, 1.0, 1.0, 1.0), PIECES[1]),
        # Noise is no difference.
        ((3.0, 0.98, 1.04, 0.97), PIECES[1]),
        ((3.0, 2.0, 1.3, 1.049), PIECES[3]),
        # One size at which it is slower: sizes below that do not count.
        ((0.5, 0.5, 2.0, 0.5), PIECES[3]),
        ((0.5, 0.5, 0.5, 2.0), NEVER),
        ((3.0, 2.0, 0.9, math.nan), NEVER),
    ],
)
def test_the_least_size_from_which_on_it_is_as_fast(ratios: tuple[float, ...], wanted: int) -> None:
    timings = of_ratios(*ratios)
    assert engine_from(timings) == wanted
    assert engine_from(timings[::-1]) == wanted


def test_without_timings_processors_carry_everything() -> None:
    assert engine_from([]) == NEVER


@pytest.mark.parametrize("clock", [1e-9, 1.0, 1e6])
def test_a_clock_that_goes_faster_changes_nothing(clock: float) -> None:
    timings = of_ratios(4.0, 2.0, 0.9, 0.8)
    scaled = [PieceTiming(t.piece_bytes, t.engine * clock, t.processors * clock) for t in timings]
    assert engine_from(scaled) == engine_from(timings)

"""Pages of blocks carried in as few pieces as they lie in, against a copy of each page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvweave.runner.kv.block_pages import carry_blocks
from kvweave.runner.kv.carry_pages import Way, carry_pages
from kvweave.runner.kv.copy_engine import NEVER

SIZES = (2, 4, 8)


def starts(draws: np.random.Generator, block: int, offset: int) -> Any:
    """First pages of 5 blocks of 9, in any order, `offset` pages further."""
    return (block * draws.permutation(9)[:5] + offset).astype(np.int32)


@pytest.mark.parametrize("way", ["fetch", "spill"])
@pytest.mark.parametrize("engine_bytes", [0, NEVER])
@pytest.mark.parametrize(
    ("ranks", "first", "offsets"),
    [
        (range(6), 0, (0, 0)),
        (range(6), 0, (3, 6)),
        (range(6), 2, (0, 1)),
        (range(4, 8), 4, (4, 0)),
        ((0, 2, 3, 7), 1, (0, 2)),
        ((5,), 5, (0, 0)),
        ((), 0, (0, 0)),
    ],
)
def test_every_page_of_every_block_is_carried_and_no_other(
    ranks: Any, first: int, offsets: tuple[int, int], engine_bytes: int, way: Way
) -> None:
    draws = np.random.default_rng(len(ranks) + first)
    slots, home = (torch.from_numpy(draws.normal(size=(90, *SIZES))) for _ in range(2))
    here, there = starts(draws, 8, offsets[0]), starts(draws, 8, offsets[1])
    on_device = np.asarray(ranks, np.int32)
    at_home = np.arange(len(ranks), dtype=np.int32) + (first if len(ranks) < 6 else 0)
    wanted = {"slots": slots.clone(), "home": home.clone()}
    for one, other in zip(here.tolist(), there.tolist(), strict=True):
        for page, kept in zip(on_device.tolist(), at_home.tolist(), strict=True):
            if way == "fetch":
                wanted["slots"][one + page] = home[other + kept]
            else:
                wanted["home"][other + kept] = slots[one + page]
    asked: list[int] = []

    def carry(*given: Any, processors: int = 2) -> None:
        asked.append(processors)
        carry_pages(*given, pinned=True, processors=processors)

    sides = (slots, on_device, here), (home, at_home, there)
    carry_blocks(*sides, way, carry, engine_bytes=engine_bytes)
    assert torch.equal(slots, wanted["slots"])
    assert torch.equal(home, wanted["home"])
    by_engine = [0] if engine_bytes == 0 else [2]
    assert asked == (by_engine if len(ranks) else [])


@pytest.mark.parametrize(("heads", "wanted"), [(3, 2), (4, 0)])
def test_blocks_are_large_enough_for_the_copy_engine_as_a_whole(heads: int, wanted: int) -> None:
    slots, home = torch.ones(24, *SIZES), torch.zeros(24, *SIZES)
    ranks, first = np.arange(heads, dtype=np.int32), np.asarray([0, 8], np.int32)
    asked: list[int] = []

    def carry(*given: Any, processors: int = 2) -> None:
        asked.append(processors)
        carry_pages(*given, pinned=True, processors=processors)

    size = 4 * slots[0].nbytes
    sides = (slots, ranks, first), (home, ranks, first + 5)
    carry_blocks(*sides, "spill", carry, engine_bytes=size)
    assert asked == [wanted]
    assert home.sum() == 2 * heads * slots[0].numel()
    # Heads that lie apart are not one piece.
    apart = (slots, 2 * ranks, first[:1]), (home, ranks, first[:1])
    carry_blocks(*apart, "spill", carry, engine_bytes=size)
    assert asked == [wanted, 2]

"""`PoolBases.expect_room`: what it accepts has room, whichever blocks are taken for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import ops
from kvweave.errors import PoolFull
from kvweave.runner.kv.pool_bases import BlockBases, PoolBases, basis_shape, shared_bases

PAGES, BLOCKS, OWN, DIM = 2, 9, 3, 16


def pool(kind: str, refines: bool) -> PoolBases:
    of = ops.packed_format(kind, DIM)
    bases = torch.zeros((shared_bases(refines=refines) + OWN, *basis_shape(of, PAGES)))
    pages = ops.PackedPages.zeros(PAGES * (1 + BLOCKS), of, bases=bases)
    assert pages.bases is not None
    return PoolBases(pages.bases, of, PAGES, None, refines=refines)


@pytest.mark.parametrize("kind", ["half-int4", "planes-3"])
@pytest.mark.parametrize("refines", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_accepted_has_room(kind: str, seed: int, refines: bool) -> None:
    """Documents that share bases, name some twice and others not at all, in blocks of any."""
    draws, made = np.random.default_rng(seed), pool(kind, refines)
    shape = basis_shape(made.format, PAGES)
    known = [torch.full(shape, float(number)) for number in range(1, 7)]
    there: dict[int, torch.Tensor] = {}
    answers = set()
    for _ in range(300):
        blocks = PAGES * (1 + draws.permutation(BLOCKS)[: draws.integers(1, 5)]).astype(np.int32)
        count = draws.integers(1, 5)
        bases = tuple(known[number] for number in draws.integers(0, len(known), count))
        which = draws.integers(1, count + 1, len(blocks)).astype(np.int32)
        before = made.bases.data.clone()
        try:
            made.expect_room(BlockBases(which, bases))
        except PoolFull:
            answers.add("refused")
            assert torch.equal(made.bases.data, before)
            continue
        answers.add("taken")
        made.put(blocks, BlockBases(which, bases))
        there |= {block: bases[n - 1] for block, n in zip(blocks.tolist(), which, strict=True)}
        for block, basis in there.items():
            [number] = made.numbers(np.array([block], np.int32))
            assert torch.equal(made.bases.data[number], basis)
    assert answers == {"refused", "taken"}


def test_a_basis_of_no_block_needs_no_more_room_than_one() -> None:
    """More bases than there is room for are refused, though some have no block."""
    made = pool("half-int4", True)
    shape = basis_shape(made.format, PAGES)
    bases = tuple(torch.full(shape, float(number)) for number in range(1, OWN + 2))
    which = np.array([1], np.int32)
    with pytest.raises(PoolFull, match="bases: expected room for 4 more of 3, got 3"):
        made.expect_room(BlockBases(which, bases))
    made.expect_room(BlockBases(which, bases[:OWN]))
    made.expect_room(BlockBases(which, bases[:OWN] * 2))

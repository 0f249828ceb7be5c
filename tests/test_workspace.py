"""Memory that attention on CUDA is given: what it returns, and that it stops growing."""

from __future__ import annotations

import torch

from kvweave.ops import Workspace


def test_it_is_large_enough_and_counters_are_zero() -> None:
    values, zeros = Workspace("cpu").numbers(12, 5)
    assert (values.dtype, len(values)) == (torch.float32, 12)
    assert (zeros.dtype, zeros.tolist()) == (torch.int32, [0] * 5)


def test_a_call_that_needs_less_gets_the_same_memory() -> None:
    space = Workspace("cpu")
    first = space.numbers(12, 5)
    again = space.numbers(7, 0)
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in first]


def test_calls_of_two_kinds_in_turns_do_not_grow() -> None:
    space = Workspace("cpu")
    for kind in ((100, 0), (3, 8)):
        space.numbers(*kind)
    settled = [t.data_ptr() for t in space.numbers(100, 0)]
    for kind in ((3, 8), (100, 0), (3, 8)):
        assert [t.data_ptr() for t in space.numbers(*kind)] == settled

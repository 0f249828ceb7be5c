"""Memory that attention on CUDA is given: what it returns, and that it stops growing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

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


def test_what_it_holds_is_what_the_next_call_gets() -> None:
    space = Workspace("cpu")
    assert space.held is None
    first = space.numbers(12, 5)
    assert space.held is not None
    assert all(a is b for a, b in zip(space.held, first, strict=True))
    larger = space.numbers(100, 0)
    assert all(a is b for a, b in zip(space.held, larger, strict=True))


def test_calls_of_two_kinds_in_turns_do_not_grow() -> None:
    space = Workspace("cpu")
    for kind in ((100, 0), (3, 8)):
        space.numbers(*kind)
    settled = [t.data_ptr() for t in space.numbers(100, 0)]
    for kind in ((3, 8), (100, 0), (3, 8)):
        assert [t.data_ptr() for t in space.numbers(*kind)] == settled


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1))
def test_calls_of_many_sizes_keep_less_than_twice_the_largest(sizes: list[tuple[int, int]]) -> None:
    space, kept = Workspace("cpu"), {}
    for floats, counters in sizes:
        values, zeros = space.numbers(floats, counters)
        assert len(values) >= floats
        assert len(zeros) >= counters
        # All that was ever handed out is alive, so no two share an address.
        kept |= {(tensor.dtype, tensor.data_ptr()): tensor for tensor in (values, zeros)}
    for number, dtype in enumerate([torch.float32, torch.int32]):
        lengths = [len(tensor) for tensor in kept.values() if tensor.dtype == dtype]
        largest = max(size[number] for size in sizes)
        assert max(lengths) < max(2 * largest, 1)
        assert sum(lengths) < max(2 * max(lengths), 1)

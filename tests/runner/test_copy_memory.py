"""Memory for copies: what is there together does not overlap, and what nobody has is free again."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave import OutOfMemory
from kvweave.runner.kv.aside import Aside
from kvweave.runner.tiers import copy_memory
from kvweave.runner.tiers.copy_memory import CHUNK_BYTES, CopyMemory
from versions import needs_cuda

CPU, PIECE = torch.device("cpu"), 64 << 10
PIECES = 40


def pages_of(nbytes: int) -> torch.Tensor:
    return torch.zeros((nbytes // 64, 2, 16), dtype=torch.bfloat16)


@given(
    st.lists(
        st.tuples(st.integers(1, 12 * PIECE // 64), st.booleans(), st.randoms()),
        min_size=1,
        max_size=40,
    )
)
def test_tensors_have_memory_of_their_own_until_nobody_has_them(asked) -> None:
    memory, held = CopyMemory(PIECES * PIECE, CPU), list[tuple[torch.Tensor, int]]()
    for number, (pages, goes, random) in enumerate(asked):
        room = memory.room_for(pages_of(64 * pages))
        free = PIECES - sum(-(-one.nbytes // PIECE) for one, _ in held)
        if room is None:
            # In one piece there is less than all that is free.
            assert -(-pages * 64 // PIECE) > free / (1 + len(held))
        else:
            assert room.shape == (pages, 2, 16)
            assert room.is_contiguous()
            room.fill_(number)
            held.append((room, number))
        if goes and held:
            held.pop(random.randrange(len(held)))
        del room
        assert all((one == what).all() for one, what in held)
    held.clear()
    assert memory.room_for(pages_of(PIECES * PIECE)) is not None


def test_a_view_keeps_the_bytes_of_its_tensor() -> None:
    memory = CopyMemory(2 * PIECE, CPU)
    whole = memory.room_for(pages_of(PIECE))
    assert whole is not None
    whole.fill_(1)
    view = whole[3:5, 1]
    del whole
    other = memory.room_for(pages_of(PIECE))
    assert other is not None
    other.fill_(2)
    assert (view == 1).all()
    assert memory.room_for(pages_of(PIECE)) is None
    del view
    assert memory.room_for(pages_of(PIECE)) is not None


def test_what_is_held_outlives_a_memory_that_is_closed() -> None:
    memory = CopyMemory(2 * PIECE, CPU)
    held = memory.room_for(pages_of(PIECE))
    assert held is not None
    held.fill_(3)
    arena = weakref.ref(memory._arena)
    memory.close()
    assert arena() is None
    assert memory.room_for(pages_of(PIECE)) is None
    assert (held == 3).all()


def test_more_than_there_is_has_no_room() -> None:
    assert CopyMemory(PIECE, CPU).room_for(pages_of(2 * PIECE)) is None
    assert CopyMemory(0, CPU).room_for(pages_of(64)) is None
    assert CopyMemory(PIECE, CPU).room_for(pages_of(0)) is None


def test_a_host_without_addresses_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OutOfMemory("no addresses", expected="1", got="0")

    monkeypatch.setattr(copy_memory, "HostArena", refused)
    memory = CopyMemory(PIECES * PIECE, CPU)
    assert memory.room_for(pages_of(PIECE)) is None
    tensor = pages_of(PIECE)
    assert memory.on_host(tensor, Aside(CPU)) is tensor


def test_no_part_of_a_copy_lies_in_two_that_are_pinned_by_themselves() -> None:
    memory = CopyMemory(3 * CHUNK_BYTES, CPU)
    before = memory.room_for(pages_of(CHUNK_BYTES - PIECE))
    room = memory.room_for(pages_of(CHUNK_BYTES + 5 * PIECE // 2))
    assert before is not None
    assert room is not None
    room.view(torch.uint8).view(-1).copy_(torch.arange(room.nbytes) % 251)
    (first,), *others = memory._parts(room)
    assert [len(part) for (part,) in [(first,), *others]] == [PIECE, CHUNK_BYTES, 3 * PIECE // 2]
    parts = torch.cat([part for (part,) in [(first,), *others]])
    assert torch.equal(parts, room.view(torch.uint8).view(-1))
    base = before.data_ptr()
    for (part,) in [(first,), *others]:
        at = part.data_ptr() - base
        assert at // CHUNK_BYTES == (at + len(part) - 1) // CHUNK_BYTES


@needs_cuda
def test_copies_of_a_gpu_are_what_they_were_copied_from() -> None:
    device = torch.device("cuda:0")
    memory, aside = CopyMemory(4 * CHUNK_BYTES, device), Aside(device)
    for _ in range(3):
        held = []
        for nbytes in (CHUNK_BYTES - PIECE, 2 * CHUNK_BYTES, 64, 2 * CHUNK_BYTES):
            there = torch.empty(nbytes // 64, 2, 16, dtype=torch.bfloat16, device=device).normal_()
            aside.follow()
            held.append((there, memory.on_host(there, aside)))
        for there, copy in held:
            assert copy.device == CPU
            assert torch.equal(there.cpu(), copy)
        # The last found no room in one piece; the others lie here.
        base = memory._arena.pages.data_ptr()
        pinned = [0 <= copy.data_ptr() - base < 4 * CHUNK_BYTES for _, copy in held]
        assert pinned == [True, True, True, False]
        del there, copy
        held.clear()

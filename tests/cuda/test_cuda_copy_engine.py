"""From which size on the copy engine of this GPU carries pieces; what either way carries."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from kvweave.device_memory import arena_pages
from kvweave.runner.kv.block_pages import carry_blocks
from kvweave.runner.kv.carry_pages import Way, carry_pages
from kvweave.runner.kv.copy_engine import NEVER, PIECES, WAYS, measured
from kvweave.runner.kv.host_arena import CHUNK_BYTES, HostArena
from kvweave.runner.kv.pinned import pin
from versions import needs_cuda

pytestmark = needs_cuda


def pages(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of a GPU, and as many of the host that it reads."""
    home = arena_pages((count, 2, 16, 128), dtype, torch.device("cpu"))
    if not pin(home, torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the driver pins no memory")
    home.view(torch.uint8).random_(0, 256)
    return torch.zeros((count, 2, 16, 128), dtype=dtype, device="cuda"), home


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_measured_and_leaves_memory_as_it_was(dtype: torch.dtype) -> None:
    arena, home = pages(2048, dtype)
    before = home.view(torch.uint8).clone()
    found = measured(arena, home)
    assert set(found) == set(WAYS)
    assert set(found.values()) <= {*PIECES, NEVER}
    assert torch.equal(home.view(torch.uint8), before)
    assert not arena.view(torch.uint8).any()
    print(dict(found))


def test_memory_that_holds_no_two_pieces_is_left_to_processors() -> None:
    arena, home = pages(7, torch.bfloat16)
    assert set(measured(arena, home).values()) == {NEVER}


@pytest.mark.parametrize("way", WAYS)
def test_blocks_in_memory_that_was_pinned_in_parts_are_carried_whole(way: Way) -> None:
    """The driver refuses a copy that lies in two parts: one block here does, and neighbours do."""
    device = torch.device("cuda", torch.cuda.current_device())
    heads, page = 96, 24 << 10
    count = 2 * CHUNK_BYTES // (heads * page) + 1
    assert CHUNK_BYTES % (heads * page)
    home = HostArena((count * heads, page), torch.uint8, device)
    if not home.pinned:
        pytest.skip("the driver pins no memory")
    first = heads * np.arange(count, dtype=np.int32)
    home.reserve(first, heads)
    slots = torch.randint(256, (count * heads, page), dtype=torch.uint8, device=device)
    if way == "fetch":
        home.pages.copy_(slots.cpu())
        wanted = slots.clone()
        slots.zero_()
    ranks = np.arange(heads, dtype=np.int32)
    for order in (first, first[::-1].copy()):
        sides = (slots, ranks, order), (home.pages, ranks, order)
        carry_blocks(*sides, way, partial(carry_pages, pinned=True), engine_bytes=0)
        torch.cuda.synchronize()
        if way == "fetch":
            assert torch.equal(slots, wanted)
            slots.zero_()
        else:
            assert torch.equal(home.pages, slots.cpu())
            home.pages.zero_()


@pytest.mark.parametrize("engine_bytes", [0, NEVER])
def test_either_way_carries_the_same(engine_bytes: int) -> None:
    arena, home = pages(256, torch.bfloat16)
    ranks, draws = np.arange(8, dtype=np.int32), np.random.default_rng(1)
    here, there = (8 * draws.permutation(32)[:9].astype(np.int32) for _ in range(2))
    carry = partial(carry_pages, pinned=True)
    sides = (arena, ranks, here), (home, ranks, there)
    carry_blocks(*sides, "fetch", carry, engine_bytes=engine_bytes)
    torch.cuda.synchronize()
    wanted = home.view(torch.uint8).clone()
    for one, other in zip(here, there, strict=True):
        assert torch.equal(arena[one : one + 8].cpu().view(torch.uint8), wanted[other : other + 8])
    home.zero_()
    carry_blocks(*sides, "spill", carry, engine_bytes=engine_bytes)
    torch.cuda.synchronize()
    for other in there:
        of = home[other : other + 8].view(torch.uint8)
        assert torch.equal(of, wanted[other : other + 8])

"""Transfers behind virtual pages that fail, and memory that is not to be had; needs no vLLM.

FAR_EVENTS (300) says how many steps of random events each map has, and FAR_EVENTS_SEED which.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

from far_world import CLASSES, DIM, SEATS, P, World
from kvweave import InvalidArgument, OutOfMemory
from kvweave.adapters.vllm.virtual_pages import far_memory
from kvweave.adapters.vllm.virtual_pages.far_memory import host_arena, waits_for_host
from kvweave.adapters.vllm.virtual_pages.layout import layout_of
from kvweave.runner.kv.transfers import TRIES
from ranked_pages import top_k
from versions import needs_cuda

STEPS = int(os.environ.get("FAR_EVENTS", "300"))
SEED = int(os.environ.get("FAR_EVENTS_SEED", "7"))
MAPS = [pytest.param(classes, paced, id=f"{name}, paced {paced}")
        for name, classes in CLASSES.items() for paced in (False, True)]  # fmt: skip


@pytest.mark.parametrize(("classes", "paced"), MAPS)
def test_whoever_fails_fails_alone(classes: Any, paced: bool) -> None:
    """Random events, transfers breaking off half-way: once, or until they are given up."""
    world = World(classes, "cpu", SEED, paced)
    with world.faults():
        for _ in range(STEPS):
            if world.random.random() < 0.4:
                world.breaks = int(world.random.choice([1, TRIES, TRIES + 1, 2 * TRIES]))
            world.events()
    transfers = world.host.transfers
    assert 0 < world.failed <= transfers.failed
    assert transfers.retried > TRIES * transfers.failed
    assert world.fetched > 100
    world.breaks = 0
    world.nothing_is_held()


@pytest.mark.parametrize("times", [1, TRIES])
def test_a_transfer_that_is_tried_again_fails_nobody(times: int) -> None:
    """All requests' together, then each one's by itself up to three times."""
    world = World(CLASSES["two heads of four"], "cpu", 1)
    with world.faults():
        for _ in range(150):
            world.breaks = times
            world.events()
            world.breaks = 0
    assert world.failed == 0
    assert world.host.transfers.retried > 20
    assert world.fetched > 100
    world.nothing_is_held()


def test_a_call_that_is_wrong_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(CLASSES["every head"], "cpu", 1)

    def wrong(*given: Any, **named: Any) -> None:
        raise InvalidArgument("moves: expected i32")

    for _ in range(200):
        world.grow()
        world.start()
        if world.far._copies:
            break
        world.step()
    monkeypatch.setattr(far_memory, "carry_pages", wrong)
    with pytest.raises(InvalidArgument, match="moves"):
        world.step()
    assert world.host.transfers.retried == 0


def test_a_request_that_ends_before_its_copies_has_none_made() -> None:
    """What is given back in the very step that spills it is neither copied nor failed."""
    world, copied = World(CLASSES["every head"], "cpu", 2), 0
    for _ in range(200):
        world.grow()
        world.start()
        if world.far._copies:
            pending = len(world.far._copies)
            for request in list(world.requests.values()):
                if world.far.at_home(request.request_id):
                    world.end(request)
            assert not world.far._copies
            copied += pending
        world.step()
    assert copied > 5
    world.nothing_is_held()


def test_a_device_that_slept_goes_on() -> None:
    """It forgets tables, bounds and pages; requests have been ended or begun anew by then."""
    world = World(CLASSES["budgets and windows"], "cpu", 4, paced=True)
    for _ in range(100):
        world.events()
    before = world.memory.tables.clone()
    world.memory.tables.random_(0, 50)
    world.memory.restore()
    assert torch.equal(world.memory.tables, before)
    world.nothing_is_held()
    world.findable.clear()
    before = world.memory.tables.clone()
    far = world.host
    held = [room.held for room in far.rooms.values()]
    lost = [far.seat_of, far.counts, far.home, far.chosen_at, *far.chosen, *held]
    for tensor in (world.memory.tables, *lost):
        tensor.random_(0, SEATS)
    world.memory.arena.fill_(torch.nan)
    world.memory.restore()
    far.forget()
    assert torch.equal(world.memory.tables, before)
    spilled, fetched = world.far.spilled, world.fetched
    for _ in range(250):
        world.events()
    assert world.far.spilled > spilled
    assert world.fetched > fetched
    world.nothing_is_held()


def test_memory_that_the_host_does_not_have_is_refused_by_type() -> None:
    layout = layout_of([[top_k(4)] * 2] * 2, P)
    with pytest.raises(OutOfMemory, match="host memory: expected .* bytes more"):
        host_arena(layout, 1 << 44, (P, DIM), torch.float32, torch.device("cpu"))


@needs_cuda
def test_pageable_memory_does_where_none_is_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver refuses: the log says so, and the host copies the same pages."""
    from kvweave.runner.kv import host_arena as arenas

    monkeypatch.setattr(arenas, "register", lambda *given: False)
    with caplog.at_level(logging.WARNING):
        world = World(CLASSES["two heads of four"], "cuda", 3)
    assert waits_for_host(world.host.host)
    assert "got pageable memory" in caplog.text
    with world.faults():
        for _ in range(150):
            world.breaks = int(world.random.choice([0, 0, 1, 3 * TRIES]))
            world.events()
    assert world.fetched > 100
    assert world.failed > 0
    world.breaks = 0
    world.nothing_is_held()

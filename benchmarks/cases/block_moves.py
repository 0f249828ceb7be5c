"""What a decode step on a GPU loses while whole blocks of pages are carried beside it.

Blocks of heads that are ranked seldom, of Llama-3.1-8B's shape: three heads in four of 32 layers,
1.5 MiB each. They go to the host's memory when requests are spilled, and come back as a whole for
whoever reads them all. On the device they lie in any order, at home one behind the other, in memory
that is pinned in parts. They are carried by the device's processors and by its copy engine, each
alone and beside the layers of `page_moves`: "slower by" is what these lose, "asked for" what they
may, and "host µs" how long the thread that asks for it is at it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.cases.page_choice import Layer
from benchmarks.cases.page_moves import DECODED, KIB, ROUNDS, Layers, slowed
from kvweave.lab.bench.device_timing import replayed
from kvweave.lab.bench.rows import Row, expect
from kvweave.runner.kv.block_pages import carry_blocks
from kvweave.runner.kv.carry_pages import Way, carry_pages
from kvweave.runner.kv.copy_engine import NEVER, WAYS, measured
from kvweave.runner.kv.host_arena import HostArena

PAGE = 8 * KIB
HEADS = 192
"""Heads of a block."""
BLOCKS = 683
"""A GiB of them."""
BY = {"processors": NEVER, "the copy engine": 0}


class Blocks:
    """Blocks of a device and of the host, and where each lies."""

    def __init__(self, count: int, device: torch.device) -> None:
        pages = count * HEADS
        self.home = HostArena((pages, PAGE), torch.uint8, device)
        expect(self.home.pinned, "host memory: expected the driver to pin it")
        first = HEADS * np.arange(count, dtype=np.int32)
        self.home.reserve(first, HEADS)
        self.slots = torch.randint(256, (pages, PAGE), dtype=torch.uint8, device=device)
        order = np.random.default_rng(count).permutation(first)
        self._ranks, self._here, self._there = np.arange(HEADS, dtype=np.int32), order, first

    def carry(self, way: Way, engine_bytes: int) -> None:
        carry_blocks(
            (self.slots, self._ranks, self._here),
            (self.home.pages, self._ranks, self._there),
            way,
            partial(carry_pages, pinned=True),
            engine_bytes=engine_bytes,
        )

    def check(self) -> None:
        """Either way carries the same."""
        before = self.slots.clone()
        for engine_bytes in BY.values():
            self.home.pages.zero_()
            self.carry("spill", engine_bytes)
            self.slots.zero_()
            self.carry("fetch", engine_bytes)
            torch.cuda.synchronize()
            expect(torch.equal(self.slots, before), "blocks: expected what was spilled")


def run(quick: bool) -> list[Row]:
    device = torch.device("cuda", torch.cuda.current_device())
    blocks, rounds = Blocks(BLOCKS, device), 3 if quick else ROUNDS
    blocks.check()
    found = measured(blocks.slots, blocks.home.first)
    rows = [
        Row(f"measured: {way}", found[way] / KIB, "KiB", None, {})
        for way in WAYS
        if found[way] != NEVER
    ]
    calls: dict[str, Callable[[], Any]] = {
        f"{way} by {by}": partial(blocks.carry, way, engine_bytes)
        for way in WAYS
        for by, engine_bytes in BY.items()
    }
    rows += [_alone(name, carry, rounds) for name, carry in calls.items()]
    layers = Layers(Layer.of(40, 10_240, 64))
    for computes, call in {
        "attention": layers.attend,
        "attention and products": layers.decode,
    }.items():
        graph = replayed(call)
        for name, carry in calls.items():
            title = f"{computes} of {DECODED} layers beside a {name}"
            rows.append(slowed(title, graph, carry, rounds, blocks.slots.nbytes))
    return rows


def _alone(name: str, carry: Callable[[], Any], rounds: int) -> Row:
    """How fast blocks are carried, and how long who asks for it is at it."""
    taken, asked = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        carry()
        asked.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    nbytes = BLOCKS * HEADS * PAGE
    host = {"host µs": median(asked) * 1e6}
    title = f"{name}: {BLOCKS} blocks of {HEADS * PAGE / KIB:g} KiB"
    return Row(title, nbytes / median(taken) / 1e9, "GB/s", None, host)

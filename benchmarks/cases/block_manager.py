"""The block manager: criterion's figures of the Rust core, and look-ups through Python.

Ten million cached blocks take 3 GiB of books here; their pages have no memory.

Figures of peers stand beside ours as quoted in `benchmarks/peers.py`; they were not run here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import kvweave
from benchmarks.criterion import criterion_rows
from benchmarks.peers import VLLM_LOOKUP_128K_MS, VLLM_NS_PER_BLOCK
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import compare

TOKENS = 128 * 1024
PAGE = 16
# What the design asks for.
LIMIT_MS = {"xxh3-128": 0.4, "sha256": 1.2}
LIMIT_NS_PER_BLOCK = {
    "allocate_and_free/4096": 15.0,
    "allocate_complete_register/4096": 150.0,
    "lookup/active_hashed_before/8192": 20.0,
}
RESIDENT, QUICK_RESIDENT = 10_000_000, 40_000
"""Blocks that are cached while prompts are looked up."""
THREADS, LOOKED_S = (1, 16), 3.0
LEAST_PER_S = 50e6
"""Look-ups of blocks a second that the design asks for, of 16 threads on the host of a GPU."""


def run(quick: bool) -> list[Row]:
    found = [*core(quick), *(lookup(hash_name, quick) for hash_name in LIMIT_MS)]
    return [*found, *lookups_beside(QUICK_RESIDENT if quick else RESIDENT, quick)]


def lookup(hash_name: str, quick: bool) -> Row:
    """A 128K-token prompt, all of it cached: hash it, walk the index, compare the ids."""
    shape = kvweave.KvShape(1, 1, 8, PAGE, "f32")
    cache = kvweave.KvCache(shape, blocks=TOKENS // PAGE + 8, hash=hash_name)
    tokens = np.random.default_rng(0).integers(0, 50_000, TOKENS).astype(np.int32)
    request = cache.admit(tokens, reuse="prefix")
    request.commit(TOKENS, TOKENS)
    request.release()
    found = cache.match_prefix(tokens)
    expect(found >= TOKENS - 1, f"{hash_name}: expected {TOKENS} tokens found, got {found}")
    other = tokens.copy()
    other[TOKENS // 2] += 1
    found = cache.match_prefix(other)
    expect(found == TOKENS // 2, f"{hash_name}: expected {TOKENS // 2} tokens found, got {found}")
    timed = compare(
        {"lookup": lambda: cache.match_prefix(tokens)},
        rounds=20 if quick else 200,
        warm_up=5,
    )["lookup"]
    ms = timed.median_s * 1e3
    beside = {
        "limit": LIMIT_MS[hash_name],
        "vLLM (quoted)": VLLM_LOOKUP_128K_MS[hash_name],
        "vLLM ÷ ours": VLLM_LOOKUP_128K_MS[hash_name] / ms,
    }
    return Row(f"look up 128K tokens in Python, {hash_name}", ms, "ms", timed.p95_s * 1e3, beside)


def lookups_beside(resident: int, quick: bool) -> list[Row]:
    """The same among so many cached blocks of other prompts, and by several threads at once."""
    shape = kvweave.KvShape(1, 1, 8, PAGE, "f32")
    cache = kvweave.KvCache(shape, blocks=resident + 8, memory=False)
    numbers, some = np.random.default_rng(0), []
    prompts = resident // (TOKENS // PAGE)
    for number in range(prompts):
        tokens = numbers.integers(0, 50_000, TOKENS).astype(np.int32)
        with cache.admit(tokens, reuse="none") as request:
            request.commit(TOKENS, TOKENS)
        if number % max(1, prompts // 32) == 0:
            some.append(tokens)
    cached = cache.stats()["cached"]
    expect(cached >= prompts * TOKENS // PAGE, f"expected all blocks cached, got {cached}")

    def looked_up(at: int) -> None:
        found = cache.match_prefix(some[at % len(some)])
        expect(found >= TOKENS - 1, f"expected {TOKENS} tokens found, got {found}")

    turn = iter(range(1_000_000))
    rounds = 20 if quick else 200
    timed = compare({"lookup": lambda: looked_up(next(turn))}, rounds=rounds, warm_up=5)["lookup"]
    name = f"look up 128K tokens in Python beside {cached / 1e6:.3g} M blocks, xxh3-128"
    rows = [
        Row(name, timed.median_s * 1e3, "ms", timed.p95_s * 1e3, {"limit": LIMIT_MS["xxh3-128"]})
    ]
    for threads in THREADS:
        done = _done_by(threads, looked_up, 0.1 if quick else LOOKED_S)
        name = f"the same by {threads} threads, blocks"
        rows.append(
            Row(name, done * TOKENS / PAGE / 1e6, "M/s", None, {"limit": LEAST_PER_S / 1e6})
        )
    return rows


def _done_by(threads: int, work: Callable[[int], None], seconds: float) -> float:
    """Times a second that threads together have done something."""
    counts, begun = [0] * threads, time.perf_counter()

    def go_on(number: int) -> None:
        while time.perf_counter() < begun + seconds:
            work(number + counts[number])
            counts[number] += 1

    running = [threading.Thread(target=go_on, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(counts) / (time.perf_counter() - begun)


def core(quick: bool) -> list[Row]:
    """What criterion measured, beside limits and quoted figures."""
    rows = []
    for row in criterion_rows("block_manager", quick):
        beside: dict[str, Any] = {}
        if row.name in LIMIT_NS_PER_BLOCK:
            beside["limit"] = LIMIT_NS_PER_BLOCK[row.name]
        if row.name in VLLM_NS_PER_BLOCK:
            quoted = VLLM_NS_PER_BLOCK[row.name]
            beside |= {"vLLM (quoted)": quoted, "vLLM ÷ ours": quoted / row.value}
        rows.append(replace(row, of={**row.of, **beside}))
    return rows

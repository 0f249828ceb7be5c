"""The block manager: criterion's figures of the Rust core, and look-ups through Python.

Figures of peers stand beside ours as quoted in `benchmarks/peers.py`; they were not run here.
"""

from __future__ import annotations

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


def run(quick: bool) -> list[Row]:
    return [*core(quick), *(lookup(hash_name, quick) for hash_name in LIMIT_MS)]


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

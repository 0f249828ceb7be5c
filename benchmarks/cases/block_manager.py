"""The block manager: criterion's figures of the Rust core, and look-ups through Python.

Figures of peers stand beside ours as quoted in `benchmarks/peers.py`; they were not run here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import kvweave
from benchmarks.peers import VLLM_LOOKUP_128K_MS, VLLM_NS_PER_BLOCK
from benchmarks.report.record import ROOT
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
    """Runs the criterion bench of the core crate and reads what it wrote."""
    cargo = shutil.which("cargo")
    expect(cargo is not None, "the core's figures need cargo on PATH")
    with tempfile.TemporaryDirectory() as folder:
        words = [str(cargo), "bench", "--locked", "-p", "kvweave-core", "--bench", "block_manager"]
        if quick:
            words += ["--", "--measurement-time", "0.5", "--warm-up-time", "0.2"]
        environment = {**os.environ, "CRITERION_HOME": folder}
        subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        measured = sorted(Path(folder).rglob("new/benchmark.json"))
        expect(bool(measured), "expected criterion to write figures, got none")
        return [_criterion_row(path) for path in measured]


def _criterion_row(path: Path) -> Row:
    """Nanoseconds an element: criterion's median over the elements of one iteration."""
    about = json.loads(path.read_text())
    estimates = json.loads((path.parent / "estimates.json").read_text())
    sample = json.loads((path.parent / "sample.json").read_text())
    throughput = about.get("throughput") or {}
    elements = throughput.get("Elements", 1)
    each = np.array(sample["times"]) / np.array(sample["iters"]) / elements
    name = about["full_id"]
    beside: dict[str, Any] = {"elements": elements}
    if name in LIMIT_NS_PER_BLOCK:
        beside["limit"] = LIMIT_NS_PER_BLOCK[name]
    if name in VLLM_NS_PER_BLOCK:
        quoted = VLLM_NS_PER_BLOCK[name]
        beside["vLLM (quoted)"] = quoted
        beside["vLLM ÷ ours"] = quoted / (estimates["median"]["point_estimate"] / elements)
    value = estimates["median"]["point_estimate"] / elements
    return Row(name, value, "ns", float(np.percentile(each, 95)), beside)

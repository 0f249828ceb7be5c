"""Time to first token where documents lie packed, beside documents in exact pages.

The prompt of `ttft_heads`, 97 % of it cached documents, with random weights; no head map. Exact
documents are copied to their places or read where they lie; packed ones are always read where they
lie, and what a policy computes lies aside. How near answers stay is told by
`benchmarks.quality.packed_documents`.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from benchmarks.cases.ttft_heads import LOOKED_AT, Bench, beside
from kvweave.lab.bench.rows import Row
from kvweave.policies import Full, Naive, Policy

LONG = ("Llama-3.1-8B", 32768, 5)
SHORT = ("small Llama", 8192, 3)
QUICK = ("tiny Llama", 8192, 1)
"""A model, tokens of the prompt, rounds: on a GPU, on a CPU, and to see that it runs."""
FULL: dict[str, Policy] = {"full": Full()}
REUSING: dict[str, Policy] = {"naive": Naive(), "foresight": LOOKED_AT}
KEPT: dict[str, dict[str, Any]] = {
    "exact, copied": {"mode": "materialise"},
    "exact, in place": {"mode": "share"},
    "INT4": {"kv_dtype": "int4"},
    "half-int4": {"kv_dtype": "half-int4"},
    "planes-3": {"kv_dtype": "planes-3"},
}
"""How documents lie, and what a runner is asked for that."""
ROOM = 16
"""Prompts that a runner has room for: a policy may have a whole prompt aside, in exact pages, of
which a runner of packed ones has a sixteenth."""


def run(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    name, tokens, rounds = QUICK if quick else LONG if on_gpu else SHORT
    bench = Bench(name, "cuda" if on_gpu else "cpu")
    parts, rows, whole = bench.prompt(tokens), [], None
    for kept, how in KEPT.items():
        asked = {"max_tokens": ROOM * tokens, **how}
        policies = REUSING if rows else {**FULL, **REUSING}
        for policy, found in bench.measure(parts, policies, rounds, **asked):
            whole = whole or found
            spent, of = found.timing, beside(found, whole)
            title = f"{name}, {tokens} tokens: {policy}, {kept}"
            rows.append(Row(title, spent.median_s, "s", spent.p95_s, of))
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return rows

"""Time to first token where documents lie packed, beside documents in exact pages.

The prompt of `ttft_heads`, 97 % of it cached documents, with random weights; no head map. Exact
documents are copied to their places or read where they lie; packed ones are always read where they
lie, and what a policy computes lies aside. How near answers stay is told by
`benchmarks.quality.packed_documents`.

`parts` says where a first token of naive reading goes on a GPU, which computes as many rows over
packed documents as over exact ones: the time that the GPU works, kernel class by kernel class as
one prefill under torch's profiler has it, and what is left of the first token's time, in which it
waits for the host. "Two chunks" has as many rows in two passes through the layers, of which each
unpacks what it reads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from benchmarks.cases.ttft_heads import LOOKED_AT, Bench, beside
from benchmarks.device.profile import profile
from kvweave.lab.bench.rows import Row
from kvweave.lab.bench.timing import Timing, summarise
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


def parts(quick: bool) -> list[Row]:
    """Where a first token of naive reading goes, over documents that lie in each way."""
    on_gpu = torch.cuda.is_available()
    name, tokens, rounds = QUICK if quick or not on_gpu else LONG
    bench = Bench(name, "cuda" if on_gpu else "cpu")
    prompt, rows = bench.prompt(tokens), []
    # Some 3 % of the tokens are rows of its own text.
    ways = {**KEPT, "INT4, two chunks": {"kv_dtype": "int4", "chunk_tokens": tokens // 60}}
    for kept, how in ways.items():
        spent, of = _part(bench, prompt, rounds, {"max_tokens": ROOM * tokens, **how})
        title = f"{name}, {tokens} tokens: naive, {kept}"
        rows.append(Row(title, spent.median_s * 1e3, "ms", spent.p95_s * 1e3, of))
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return rows


def _part(
    bench: Bench, prompt: list[Any], rounds: int, asked: dict[str, Any]
) -> tuple[Timing, dict[str, Any]]:
    """First tokens of a runner, which is gone then: no two arenas have room beside each other."""
    with closing(bench.opened(prompt, **asked)) as runner:
        reports = [bench.prefilled(runner, prompt, Naive()) for _ in range(1 + rounds)]
        spent = summarise([report.ttft_s for report in reports[1:]])
        of: dict[str, Any] = {"look-up ms": reports[-1].timings.lookup_s * 1e3}
        if torch.cuda.is_available():
            of |= _classes(lambda: bench.prefilled(runner, prompt, Naive()), spent.median_s)
    return spent, of


def _classes(call: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Milliseconds of a call by class of kernel; what is left of so many seconds, unprofiled."""
    spent, kernels = profile(call)
    # Under the profiler the host takes longer: these gaps say nothing.
    spent.pop("gaps", None)
    busy = sum(spent.values())
    shown = {f"{kind} ms": round(ms, 2) for kind, ms in sorted(spent.items())}
    return {"GPU ms": busy, "waits ms": seconds * 1e3 - busy, "kernels": kernels, **shown}

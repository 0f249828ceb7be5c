"""Rows of a prompt over packed pages as they lie, and over a copy of these in exact pages.

One layer of Llama-3.1-8B's shape and 32K tokens before the rows, as a `Runner` has prefilled and
packed them. Either way attends the rows to what is packed and puts it together with the rest; by
the host's clock, with all that the device does for it. `rows_in_place` says how many rows read
pages as they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.device.models import random_model
from kvweave import Runner
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import compare

FORMATS = ("int4", "half-int4", "planes-3")
ROWS = (1, 2, 4, 8, 16, 32, 64)
APART = 0.02
"""How far the two may be apart, as a share of the largest number: codes meet rounded queries."""


def run(quick: bool) -> list[Row]:
    if torch.cuda.is_available() and not quick:
        return compared(random_model("Llama-3.1-8B", layers=1), 32_768, ROWS, rounds=9)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return compared(random_model("small Llama", device, layers=1), 1024, ROWS[::3], rounds=3)


def compared(model: Any, tokens: int, counts: tuple[int, ...], rounds: int) -> list[Row]:
    """So many rows behind so many tokens, over pages of each format."""
    prompt = np.random.default_rng(tokens).integers(0, model.config.vocab_size, tokens).tolist()
    rows = []
    for name in FORMATS:
        room = {"max_tokens": 8 * tokens, "check": False, "progress": False}
        with closing(Runner(model, kv_dtype=name, **room)) as runner:
            # This makes the basis that the prompt is packed in.
            runner.prefill(prompt, "full", remember=False).release()
            with runner.prefill(prompt, "full", remember=False) as done:
                ways = [_ways(runner, done.kv.packed, tokens, count) for count in counts]
                times = [compare(way, rounds=rounds, at_least_s=0.002) for way in ways]
        for count, timed in zip(counts, times, strict=True):
            copied, in_place = timed["copied"], timed["as they lie"]
            beside = {"copied": copied.median_s * 1e6}
            beside["copied ÷ this"] = copied.median_s / in_place.median_s
            title = f"{name}, {count} rows behind {tokens} tokens"
            p95 = in_place.p95_s * 1e6
            rows.append(Row(title, in_place.median_s * 1e6, "µs", p95, beside))
    return rows


@torch.inference_mode()
def _ways(runner: Runner, packed: Any, tokens: int, count: int) -> dict[str, Callable[[], Any]]:
    """Both ways to read, of random queries, which say the same."""
    spec = runner.spec
    generator = torch.Generator(spec.device).manual_seed(count)
    shape = (count, spec.query_heads, spec.head_dim)
    q = torch.randn(shape, generator=generator, device=spec.device).to(spec.dtype)
    positions: Any = np.arange(tokens, tokens + count, dtype=np.int32)
    if spec.device.type == "cuda":
        positions = torch.from_numpy(positions).to(spec.device)
    nothing = torch.zeros_like(q), torch.full(shape[:2], -torch.inf, device=spec.device)
    rope = runner._prefiller.rotary.table(1).rope
    known = 0, spec.layers[0], rope, (q, positions), tokens, nothing

    def waited(read: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        with torch.inference_mode():
            out = read()[0]
        if spec.device.type == "cuda":
            torch.cuda.synchronize()
        return out

    ways = {
        "copied": partial(waited, partial(packed.read_packed, *known, (None, 1))),
        "as they lie": partial(waited, partial(packed.read_in_place, *known)),
    }
    one, other = (way().float() for way in ways.values())
    apart = float((one - other).abs().max() / one.abs().max())
    expect(apart < APART, f"expected two ways within {APART}, got {apart}")
    return ways

"""Rounds of self-speculation beside dense steps: drafts by chosen pages, verified by all.

A model of Llama-3.1-8B's shape with random weights decodes over an arena of random keys and values:
*dense* is a step of a token a request that reads everything, and a round is its drafts and one
verification. What a round takes does not depend on what is accepted; how many a random model
accepts says nothing of others, for which see `benchmarks.cases.speculation_text`. So a row has the
speed-up at that number, the one if all were accepted, and how many accepted drafts a round is worth
it from. Contenders run one after the other in one process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.cases.top_k_step import (
    EVERY,
    MODEL,
    Load,
    Stepped,
    arena_of,
    as_a_runner_has_it,
)
from benchmarks.device.models import random_model
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise
from kvweave.runner.model.model_spec import describe

PAGES, DRAFTS = 64, (2, 4, 7)
LOADS = (
    Load(1, 16_384, 32),
    Load(1, 131_072, 32),
    Load(8, 16_384, 32),
    # 128K tokens of eight requests in all 32 layers are 137 GB.
    Load(8, 65_536, 32),
)
WARM_ROUNDS = 2 * EVERY + 4
"""Rounds until the graphs of drafts, with a ranking and without, and of verifications are there."""


def run(quick: bool) -> list[Row]:
    loads = (Load(1, 16_384, 4), Load(8, 16_384, 4)) if quick else LOADS
    return rows_of(random_model(MODEL), loads, PAGES, DRAFTS, rounds=8 if quick else 48)


@torch.inference_mode()
def rows_of(
    model: Any, loads: Sequence[Load], budget: int, drafts: Sequence[int], rounds: int
) -> list[Row]:
    """Every load: dense steps, and as many rounds of each number of drafts."""
    whole = as_a_runner_has_it(describe(model))
    steps = (WARM_ROUNDS + rounds + 1) * (1 + max(drafts))
    arena = arena_of(whole, loads, steps)
    rows = []
    for load in loads:
        spec = replace(whole, layers=whole.layers[: load.layers])
        pages = arena[: load.pages(whole.kv_heads, steps)]
        dense = Stepped.of(spec, pages, load, None, steps)
        times = [dense.step(dense.batch) for _ in range(WARM_ROUNDS + rounds)]
        timing = summarise(times[WARM_ROUNDS:])
        dense_ms, title = timing.median_s * 1e3, load.title()
        rows.append(Row(f"{title}: dense", dense_ms, "ms", timing.p95_s * 1e3, {}))
        del dense
        for count in drafts:
            drafting = Stepped.of(spec, pages, load, budget, steps, drafts=count)
            rows.append(_round_row(f"{title}: {count} drafts", drafting, rounds, dense_ms))
            del drafting
    return rows


def _round_row(name: str, drafting: Stepped, rounds: int, dense_ms: float) -> Row:
    """What a round takes on average, beside a dense step; those that rank are among them."""
    for _ in range(WARM_ROUNDS):
        _round(drafting)
    told = [sequence.speculation for sequence in drafting.batch]
    before = [(one.rounds, one.accepted) for one in told]
    times = np.asarray([_round(drafting) for _ in range(rounds)])
    drafting.decoder.heads.cache.check()
    carried = sum(one.rounds - first for one, (first, _) in zip(told, before, strict=True))
    accepted = sum(one.accepted - first for one, (_, first) in zip(told, before, strict=True))
    expect(carried == rounds * len(told), f"expected {rounds} rounds of each, got {carried}")
    drafts, mean = drafting.decoder.drafts, float(times.mean()) * 1e3
    beside = {
        "accepted": accepted / carried,
        "dense ÷ this": (1 + accepted / carried) * dense_ms / mean,
        "if all are accepted": (1 + drafts) * dense_ms / mean,
        "worth it from": mean / dense_ms - 1,
    }
    return Row(name, mean, "ms", float(np.percentile(times, 95)) * 1e3, beside)


def _round(drafting: Stepped) -> float:
    """Seconds of one round of a batch, whose tokens are then on the host."""
    start = time.perf_counter()
    runs = drafting.decoder.round(drafting.batch)
    taken = time.perf_counter() - start
    expect(len(runs) == len(drafting.batch), f"expected a run of each, got {len(runs)}")
    for sequence, run in zip(drafting.batch, runs, strict=True):
        sequence.tokens += run.tokens
    return taken

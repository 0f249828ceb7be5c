"""Segments of requests that are packed finally, on a GPU: they are read as the CPU reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from families import random_tokens
from kvweave.runner import Packing, Runner, Strategy
from packed_decoding import packed_runner, said_behind
from page_meaning import random_packing
from strategy_runners import HEADS, LAYERS, all_is_back, uneven_model
from versions import needs_cuda

pytestmark = needs_cuda

STEPS = 40
NEAR = 0.06
"""Largest difference of a logit, as a share of the largest."""


def packing_of(kind: str) -> tuple[Packing, int]:
    """A packing with segments, and how many tokens these have."""
    if kind == "strategy":
        return Packing("int4", strategy=Strategy(0.3)), 2112
    return random_packing(kind, LAYERS * HEADS, 64)[0], 5632


def there(place: str, kind: str) -> tuple[Runner, int]:
    packing, tokens = packing_of(kind)
    given: dict[str, Any] = {"kv_dtype": replace(packing, segment_tokens=tokens)}
    model = uneven_model(64).to(place, torch.bfloat16)
    return packed_runner(model, chunk_tokens=1024, max_tokens=65536, **given), tokens


@pytest.mark.parametrize("kind", ["strategy", "half-int4"])
def test_it_says_what_the_cpu_says(kind: str) -> None:
    """Behind a prompt of one segment and a part of the next, packed finally before it goes on."""
    asked: dict[str, Any] = {"reserve_tokens": STEPS + 1, "remember": False, "watched": False}
    logits, said = [], None
    for place in ("cpu", "cuda"):
        runner, tokens = there(place, kind)
        prompt = random_tokens(tokens + 300, 1)
        with runner.prefill(prompt, "full", **asked) as done:
            runner.flush()
            first = done.report.packed.segments[0]
            assert first.formats or first.basis == "own"
            said, seen = said_behind(runner, done, STEPS, said)
            logits.append(torch.stack(seen).cpu())
        with runner._prefiller.computing:
            pass
        if kind == "strategy":
            assert all_is_back(runner)
    wanted, got = logits
    assert float((got - wanted).abs().max() / wanted.abs().max()) < NEAR

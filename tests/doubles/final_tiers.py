"""Runners that pack documents by a strategy, with tiers, and what they say of documents there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from families import random_tokens
from head_maps import class_map
from kvweave.runner import Runner, Strategy
from kvweave.runner.tiers.choice import Speeds
from page_meaning import random_packing
from strategy_runners import DIM, HEADS, LAYERS, LONG, all_is_back, runner_of
from tiered_runners import FAST, SLOW, Stated

SIGHTS = np.array([[[128, 64], [0, 0]], [[0, 0], [17, 1]]], np.int32)
"""Windows of the heads of a map, and sinks."""
DOC = random_tokens(LONG, 1).tolist()
SHORT = random_tokens(200, 2).tolist()


def final_runner(
    model: Any,
    kind: str = "quarter-bf16",
    bound: float = 0.13,
    share: float = 0.5,
    sights: Any = None,
    **settings: Any,
) -> Runner:
    """One for which loading is always worth it; the shared basis is drawn."""
    packing, _ = random_packing(kind, LAYERS * HEADS, DIM)
    given = {"kv_dtype": replace(packing, strategy=Strategy(bound, final_share=share)), **settings}
    if sights is not None:
        plain = Runner(model, max_tokens=64, check=False, progress=False)
        given["heads"] = class_map(sights, plain.spec.fingerprint)
    runner = runner_of(model, bound, **given)
    assert runner.tiers is not None
    runner.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    return runner


def leave_the_device(runner: Runner) -> None:
    """Deletes all documents, lets go of what is cached, and spoils the memory of the pool."""
    pool = runner.packed
    assert pool is not None
    for segment in runner.segments():
        runner.delete(segment.name, segment.namespace)
    assert pool.documents is not None
    for namespace in ("", "mine", "fresh"):
        pool.documents.forget_cached(namespace)
    for cache, known in ((pool.cache, pool.stats()), (runner.cache, runner.cache.stats())):
        room = (known["total"] - known["held"]) * cache.shape.page_tokens
        cache.admit(np.zeros(room, np.int32), reuse="none").release()
    assert all_is_back(runner)
    pool.pages.data.fill_(0xA5)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two are the same to the bit, and numbers."""
    return bool(one.isfinite().all()) and torch.equal(one, other)

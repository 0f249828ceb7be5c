"""Runners with a store or host memory for documents, and prompts that read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from families import random_tokens
from kvweave import PoolFull, Runner, Segment
from kvweave.runner.tiers.choice import Speeds
from kvweave.runner.tiers.measured import Measured
from local_heads import local_heads

FRESH = random_tokens(30, 6).tolist()
FIRST, LAST = FRESH[:11], FRESH[11:]
FAST, SLOW = 1e15, 1e-3


class Stated(Measured):
    """Speeds that somebody has stated, whatever is measured."""

    def __init__(self, speeds: Speeds) -> None:
        super().__init__()
        self._stated = speeds

    @property
    def speeds(self) -> Speeds:
        return self._stated

    def speeds_for(self, size: int, flops: int, beside: int = 0) -> Speeds:
        return self._stated


def tiered(model: Any, local: int = 0, **more: Any) -> Runner:
    """A runner in which `local` heads of each layer keep a window; loading is always worth it."""
    heads = None
    if local:
        plain = Runner(model, max_tokens=64, check=False, progress=False)
        heads = local_heads(plain.cache.shape, local, 4, 24, model=plain.spec.fingerprint)
    options = {"max_tokens": 2048, "check": False, **more}
    runner = Runner(model, heads=heads, progress=False, **options)
    if runner.tiers is not None:
        runner.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    return runner


def prompt_of(*documents: list[int], namespace: str = "") -> list[Any]:
    """Fresh text, documents, and a question."""
    marked = [Segment(tokens=document, namespace=namespace) for document in documents]
    return [Segment(tokens=FIRST, namespace="fresh"), *marked, Segment(tokens=LAST)]


def logits_behind(
    runner: Runner, *documents: list[int], namespace: str = "", said: int = 30
) -> tuple[Any, list[str]]:
    """Logits of so many tokens behind a prompt with documents, and where these came from."""
    prompt = prompt_of(*documents, namespace=namespace)
    with runner.prefill(prompt, "naive", remember=False, watched=False) as done:
        found = [one.source for one in done.report.documents[1:-1]]
        return runner.extend(done, list(range(200, 200 + said))), found


def answer(runner: Runner, *documents: list[int], policy: str = "naive", **more: Any) -> Any:
    """What a runner says to documents that are marked, remembering nothing of the prompt."""
    options: dict[str, Any] = {"max_new_tokens": 8, "stop": (), "remember": False, **more}
    where = options.pop("of", "")
    return runner.generate(prompt_of(*documents, namespace=where), policy, **options)


def sources(done: Any) -> list[str]:
    """Where the documents of a prompt came from, but for its fresh text."""
    return [one.source for one in done.report.documents[1:-1]]


def evict(runner: Runner) -> None:
    """Has all blocks of the device taken that nobody holds, and given back empty."""
    cache = runner.cache
    blocks = cache.stats()["arena_pages"] // (cache.shape.layers * cache.shape.kv_heads)
    while blocks:
        try:
            tokens = np.zeros(blocks * cache.shape.page_tokens, np.int32)
            cache.admit(tokens, reuse="none").release()
            return
        except PoolFull:
            blocks -= 1

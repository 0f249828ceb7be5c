"""What a scheduler promises of several head groups can be had of each of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvweave import PoolFull
from kvweave.cache import HeadClassMap, KvCache, KvRequest, KvShape
from kvweave.scheduler import Scheduler

LAYERS, HEADS, PAGE, CHUNK, SLOTS, EVERY = 4, 8, 16, 1024, 18, 16


def two_groups() -> HeadClassMap:
    """One head in four keeps everything, the others choose pages and may be spilled."""
    few = {"kind": "top_k", "pages": 16, "rerank_every": EVERY}
    chooses = {"class": few, "reach": "global", "stability": "stable"}
    full = {"class": {"kind": "full"}, "reach": "global", "stability": "unstable"}
    places = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    made = {
        "schema_version": 1,
        "model_fingerprint": "none",
        "layers": LAYERS,
        "kv_heads": HEADS,
        "heads": [
            {"layer": layer, "head": head, **(full if head % 4 == layer % 4 else chooses)}
            for layer, head in places
        ],
    }
    return HeadClassMap.from_json(json.dumps(made))


class Load:
    """Requests that come at once, are prefilled in chunks, decode, and are spilled at rankings."""

    def __init__(self, seed: int, requests: int, pages: int) -> None:
        shape, heads = KvShape(LAYERS, HEADS, 16, PAGE, "bf16"), two_groups()
        size = pages * shape.page_bytes
        known = {"heads": heads, "fingerprint": "none", "memory": False}
        self.cache = KvCache(shape, arena_bytes=size, **known)
        self.scheduler = Scheduler(
            self.cache, token_budget=CHUNK, chunk_tokens=CHUNK, span_tokens=CHUNK
        )
        draws = np.random.default_rng(seed)
        self.prompts = draws.integers(600, 2000, requests)
        self.answers = draws.integers(20, 200, requests)
        self.held: dict[int, KvRequest] = {}
        self.said = dict.fromkeys(range(requests), 0)
        self.spilled = dict.fromkeys(range(requests), 0)
        self.short, self.now = 0, 0
        for number, tokens in enumerate(self.prompts.tolist()):
            self.scheduler.arrive(number, tokens, 0)

    def run(self) -> None:
        answered: list[int] = []
        finished: list[int] = []
        while self.said:
            plan = self.scheduler.plan(self.now, answered=answered, finished=finished)
            self.now += 1_000_000
            for number, _ in plan.preempted.tolist():
                self.held.pop(number).release()
                self.spilled[number] = 0
            answered = [n for n, _, _, last in plan.prefill.tolist() if self.prefill(n) and last]
            answered += [n for n in plan.decode.tolist() if self.decode(n)]
            finished = [n for n in answered if self.said[n] == self.answers[n]]
            for number in finished:
                self.held.pop(number).release()
                del self.said[number]

    def prefill(self, number: int) -> bool:
        if number in self.held:
            return True
        tokens = np.zeros(int(self.prompts[number]) + self.said[number], np.int32)
        try:
            self.held[number] = self.cache.admit(tokens, reuse="none")
        except PoolFull:
            self.short += 1
            self.scheduler.not_done(number, no_room=True)
            return False
        return True

    def decode(self, number: int) -> bool:
        request = self.held[number]
        try:
            request.append(np.zeros(1, np.int32))
        except PoolFull:
            self.scheduler.not_done(number, no_room=True)
            return False
        self.said[number] += 1
        pages = (request.length - 1) // PAGE - self.spilled[number]
        if self.said[number] % EVERY == 0 and pages + self.spilled[number] > SLOTS:
            request.spill(1, np.arange(pages, dtype=np.int32), SLOTS)
            self.spilled[number] += pages
        return True


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_that_is_planned_finds_its_blocks(seed: int) -> None:
    load = Load(seed, requests=80, pages=16_384)
    load.run()
    assert load.short == 0
    assert load.scheduler.metrics()["preempted"] < 8
    load.cache.check()
    assert load.cache.stats()["held"] == 0


def test_a_prompt_that_no_slabs_suffice_for_is_refused_when_it_comes() -> None:
    """Pages enough for all of its tokens, and slabs of each group too few."""
    load = Load(0, requests=0, pages=16_384)
    most = next(n for n in range(16_384 * PAGE, 0, -PAGE) if fits(load, n))
    assert load.scheduler.pages_of(most + PAGE) <= load.cache.stats()["arena_pages"]
    load.cache.admit(np.zeros(most, np.int32), reuse="none").release()
    with pytest.raises(PoolFull):
        load.cache.admit(np.zeros(most + PAGE, np.int32), reuse="none")


def fits(load: Load, tokens: int) -> bool:
    """Whether a prompt of so many tokens may wait for room at all."""
    try:
        load.scheduler.arrive(0, tokens, load.now)
    except PoolFull:
        return False
    load.scheduler.cancel(0)
    return True

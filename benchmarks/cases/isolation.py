"""Whether one tenant can tell from the time to his first token what another has cached.

Tenant A has computed a text, or another one of the same length; then tenant B asks for the text, in
his own namespace, and the seconds to his first token are taken. Both classes come in an order that
is drawn, so whatever else the machine does hits both alike. A classifier that sees half of the
trials (a threshold on the time, on either side) is held to the other half: its accuracy with a 95 %
interval (Wilson). 50 % is what somebody has who tells nothing.

Beside it the same classifier on what is no secret: whether B himself has cached the text. If it did
not tell that, the first figure would mean nothing.

A tenant whose first tokens are held back to a multiple of some time is to tell neither: he asks for
what he has cached himself, through `Tenant(quantum_s=…)`.

In the tiers the texts are marked documents: A has frozen them, they lie in the host's memory and in
a store, and their blocks on the device are given up before B asks.

Trials are spread over processes, one for two cores, each with a runner of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import sqrt
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.device.models import random_model
from kvweave import PoolFull, Runner, Segment, Tenant
from kvweave.lab.bench.rows import Row, expect

Floats = npt.NDArray[np.float64]
TEXT, TRIALS, QUICK_TRIALS, CONTROLS = 768, 10_000, 60, 1000
HELD, QUANTUM_S = 4000, 0.05
"""Trials of a tenant whose tokens are held back, and to multiples of which time."""
_Z = 1.96


@dataclass(frozen=True)
class Trials:
    """Seconds to B's first token, and whether the text had been cached."""

    seconds: Floats
    cached: npt.NDArray[np.bool_]

    def accuracy(self) -> tuple[float, float, float]:
        """Of a threshold that half of the trials chose, on the other half; and its interval."""
        half = len(self.seconds) // 2
        cut, faster = threshold(self.seconds[:half], self.cached[:half])
        guessed = (self.seconds[half:] < cut) == faster
        right, of = int((guessed == self.cached[half:]).sum()), len(self.seconds) - half
        return right / of, *interval(right, of)

    @staticmethod
    def of_parts(parts: list[Trials]) -> Trials:
        """Those of several runners, mixed."""
        mixed = np.random.default_rng(7).permutation(sum(len(part.seconds) for part in parts))
        seconds, cached = ([getattr(p, name) for p in parts] for name in ("seconds", "cached"))
        return Trials(np.concatenate(seconds)[mixed], np.concatenate(cached)[mixed])


def threshold(seconds: Floats, cached: npt.NDArray[np.bool_]) -> tuple[float, bool]:
    """The cut that tells most of the trials apart, and whether what is faster was cached."""
    order = np.argsort(seconds)
    # How many are told right if the first k in order are said to be cached, and the others not.
    right = np.concatenate([[0], np.cumsum(np.where(cached[order], 1, -1))]) + (~cached).sum()
    faster = right.max() >= len(seconds) - right.min()
    place = int(right.argmax() if faster else right.argmin())
    edges = np.concatenate([seconds[order], [np.inf]])
    return float(edges[place]), bool(faster)


def interval(right: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, square = right / of, _Z**2
    middle = share + square / (2 * of)
    width = _Z * sqrt(share * (1 - share) / of + square / (4 * of * of))
    return (middle - width) / (1 + square / of), (middle + width) / (1 + square / of)


def run(quick: bool) -> list[Row]:
    trials = QUICK_TRIALS if quick else TRIALS
    controls = QUICK_TRIALS if quick else CONTROLS
    processes = 1 if quick else max(1, len(os.sched_getaffinity(0)) // 2)
    rows = []
    for where in ("device", "tiers"):
        others = measured(where, "a", trials, processes)
        rows.append(row(f"{where}: what another has cached", others))
        own = measured(where, "b", controls, processes)
        rows.append(row(f"{where}: what he has cached himself", own))
    held = measured("held back", "b", QUICK_TRIALS if quick else HELD, processes)
    name = f"device: what he has cached himself, held back to multiples of {QUANTUM_S * 1e3:.0f} ms"
    return [*rows, row(name, held)]


def measured(where: str, owner: str, count: int, processes: int) -> Trials:
    """Trials in which the texts were cached by `owner`, over so many processes."""
    part = partial(measured_here, where, owner, -(-count // processes))
    if processes == 1:
        return part(0)
    alone = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), **alone) as pool:
        return Trials.of_parts(list(pool.map(part, range(processes))))


def measured_here(where: str, owner: str, count: int, seed: int) -> Trials:
    """So many of them, with one runner."""
    model = random_model("tiny Llama", "cpu", torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        kind = HeldAsked if where == "held back" else Asked
        asked = kind(model, where, folder, seed)
        try:
            return asked.trials(count, owner)
        finally:
            asked.close()


def row(name: str, trials: Trials) -> Row:
    share, low, high = trials.accuracy()
    medians = [float(np.median(trials.seconds[trials.cached == kind])) for kind in (True, False)]
    beside = {"from": low, "to": high, "cached, s": medians[0], "not cached, s": medians[1]}
    return Row(name, share, "told right", None, {**beside, "trials": len(trials.seconds)})


class Asked:
    """A runner through which A computes and B asks."""

    def __init__(self, model: Any, where: str, folder: str, seed: int) -> None:
        beyond = {"store": folder, "document_bytes": 1 << 24} if where == "tiers" else {}
        self.where = where
        self.runner = Runner(model, max_tokens=4096, check=False, progress=False, **beyond)
        self.random = np.random.default_rng(seed)

    def close(self) -> None:
        self.runner.close()

    def trials(self, count: int, owner: str) -> Trials:
        """Trials in which the texts were cached by `owner`."""
        cached = self.random.permutation(np.arange(count) % 2 == 0)
        for _ in range(20):
            self.seconds(True, owner)
        times = [self.seconds(bool(one), owner) for one in cached]
        return Trials(np.asarray(times), cached)

    def seconds(self, cached: bool, owner: str) -> float:
        """Seconds to B's first token of a text that was cached, or of one that nobody has seen."""
        text, other = (self._text() for _ in range(2))
        self._cache(text if cached else other, owner)
        prompt = self._prompt(text, "b")
        engine = self.runner.engine()
        begun = time.perf_counter()
        asked = engine.submit(prompt, "naive", max_new_tokens=1, stop=(), namespace="b")
        engine.run()
        taken = time.perf_counter() - begun
        report = asked.result().report
        # Random texts may begin with the same token.
        reused = report.reused_prefix + report.reused_segment > TEXT // 2
        expect(reused == (cached and owner == "b"), f"expected another reuse, got {report}")
        return taken

    def _cache(self, text: list[int], owner: str) -> None:
        if self.where == "device":
            how: dict[str, Any] = {"max_new_tokens": 1, "stop": (), "namespace": owner}
            self.runner.generate([*text, 1], "prefix", **how)
            return
        self.runner.insert(text, "text", owner)
        self.runner.flush()
        self.runner.cache.delete("text", owner)
        self._evict()

    def _prompt(self, text: list[int], namespace: str) -> Any:
        if self.where == "device":
            return [*text, 1]
        return [Segment(tokens=text, namespace=namespace), Segment(tokens=[1])]

    def _text(self) -> list[int]:
        return [int(token) for token in self.random.integers(2, self.runner.spec.vocabulary, TEXT)]

    def _evict(self) -> None:
        """Has all blocks of the device taken that nobody holds, and given back empty."""
        cache = self.runner.cache
        tokens = cache.stats()["arena_pages"] * cache.shape.page_tokens
        tokens //= cache.shape.layers * cache.shape.kv_heads
        while tokens > 0:
            try:
                cache.admit(np.zeros(tokens, np.int32), reuse="none").release()
                return
            except PoolFull:
                tokens -= cache.shape.page_tokens


class HeldAsked(Asked):
    """A runner whose server B asks as a tenant, whose tokens are held back."""

    def __init__(self, model: Any, where: str, folder: str, seed: int) -> None:
        super().__init__(model, where, folder, seed)
        self.server = self.runner.serve()
        self.tenant = Tenant(self.runner, self.server, "b", quantum_s=QUANTUM_S)

    def close(self) -> None:
        self.server.close()
        super().close()

    def seconds(self, cached: bool, owner: str) -> float:
        """Seconds to B's first token of a text that he has cached, or of a new one."""
        text, other = (self._text() for _ in range(2))
        how: dict[str, Any] = {"max_new_tokens": 1, "stop": ()}
        known = [*(text if cached else other), 1]
        self.server.submit(known, "prefix", namespace=owner, **how).result()
        before = self.tenant.stats()["reused_tokens"]
        begun = time.perf_counter()
        answer = self.tenant.submit([*text, 1], "prefix", **how)
        next(iter(answer))
        taken = time.perf_counter() - begun
        answer.result()
        reused = self.tenant.stats()["reused_tokens"] - before
        expect((reused > TEXT // 2) == cached, f"expected another reuse, got {reused} tokens")
        return taken

"""Whether one tenant can tell from the time to his first token what another has cached.

Tenant A has computed a text, or another one of the same length; then tenant B asks for the text, in
his own namespace, and the seconds to his first token are taken. Both classes come in an order that
is drawn, so whatever else the machine does hits both alike. A classifier that sees half of the
trials (a threshold on the time, on either side) is held to the other half.

Beside it the same classifier on what is no secret: whether B himself has cached the text. If it did
not tell that, the first figure would mean nothing.

A tenant whose first tokens are held back to a multiple of some time is to tell neither: he asks for
what he has cached himself, through `Tenant(quantum_s=…)`.

Behind the device the texts are marked documents, in one tier each: A has frozen them, they lie in
the host's memory, in a store on the disk, or in a remote one (a folder, through OpenDAL), and their
blocks on the device are given up before B asks. The runner looks there in any case: to it that tier
is faster than computing.

Trials are spread over processes, one for two cores, each with a runner of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cases.tiers import Preferred, evict
from benchmarks.classifier import Trials, row
from benchmarks.device.models import random_model
from kvweave import RemoteStore, Runner, Segment, Store, Tenant
from kvweave.lab.bench.rows import Row, expect

TEXT, TRIALS, QUICK_TRIALS, CONTROLS = 768, 10_000, 60, 1000
HELD, QUANTUM_S = 4000, 0.05
"""Trials of a tenant whose tokens are held back, and to multiples of which time."""
DOCUMENT_BYTES = 1 << 24
"""Of the host's memory, or of a store on the disk: it lets go of what is old."""
TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "host": lambda _: {"document_bytes": DOCUMENT_BYTES},
    "disk": lambda folder: {"store": Store(folder, capacity_bytes=DOCUMENT_BYTES)},
    "remote": lambda folder: {"remote": RemoteStore("fs", {"root": str(folder)})},
}


def run(quick: bool) -> list[Row]:
    trials = QUICK_TRIALS if quick else TRIALS
    controls = QUICK_TRIALS if quick else CONTROLS
    processes = 1 if quick else max(1, len(os.sched_getaffinity(0)) // 2)
    rows = []
    for where in ("device", *TIERS):
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
        if where in TIERS:
            asked: Asked = DocumentsAsked(model, seed, where, Path(folder))
        else:
            asked = HeldAsked(model, seed) if where == "held back" else Asked(model, seed)
        try:
            return asked.trials(count, owner)
        finally:
            asked.close()


class Asked:
    """A runner through which A computes and B asks."""

    def __init__(self, model: Any, seed: int, **beyond: Any) -> None:
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
        self.cache(text if cached else other, owner)
        prompt = self.prompt(text)
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

    def cache(self, text: list[int], owner: str) -> None:
        """Has a tenant compute a text."""
        how: dict[str, Any] = {"max_new_tokens": 1, "stop": (), "namespace": owner}
        self.runner.generate([*text, 1], "prefix", **how)

    def prompt(self, text: list[int]) -> Any:
        """What B asks."""
        return [*text, 1]

    def _text(self) -> list[int]:
        return [int(token) for token in self.random.integers(2, self.runner.spec.vocabulary, TEXT)]


class DocumentsAsked(Asked):
    """One in which A's documents lie in a tier behind the device, and nowhere else."""

    def __init__(self, model: Any, seed: int, where: str, folder: Path) -> None:
        super().__init__(model, seed, **TIERS[where](folder))
        tiers = self.runner.tiers
        assert tiers is not None
        tiers.measured, self.remote = Preferred(where), tiers.remote

    def cache(self, text: list[int], owner: str) -> None:
        """Has a tenant freeze a document, and its blocks on the device given up."""
        self._clear()
        self.runner.insert(text, "text", owner)
        self.runner.flush()
        self.runner.cache.delete("text", owner)
        evict(self.runner.cache)

    def prompt(self, text: list[int]) -> Any:
        """What B asks, in his own namespace."""
        return [Segment(tokens=text, namespace="b"), Segment(tokens=[1])]

    def _clear(self) -> None:
        """Keeps a remote store small, which lets go of nothing itself."""
        if self.remote is not None:
            for shard in self.remote.store.list():
                self.remote.store.delete(shard.name)


class HeldAsked(Asked):
    """A runner whose server B asks as a tenant, whose tokens are held back."""

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__(model, seed)
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

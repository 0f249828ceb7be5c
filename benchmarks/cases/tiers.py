"""Time to the first token of a prompt of documents: computed, and brought from each tier.

The same prompt on runners in one process: SmolLM2 on the CPU, a Llama-3.1-8B shape with random
weights on a GPU. Before each sample all blocks that nobody holds are evicted from the device, so
that documents lie where the row says. The store is read past the page cache where its file system
lets it; it lies in the folder that `KVWEAVE_BENCH_DISK` names, else where temporary files do. The
last row has the runner choose by what it has measured. Documents come layer by layer while the
prompt is prefilled, but in the rows that say that all had come before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvweave
from benchmarks.device.models import random_model
from kvweave.cache import KvCache
from kvweave.errors import PoolFull
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise, turns
from kvweave.models import load_smollm2
from kvweave.runner.tiers.choice import TIERS, Speeds
from kvweave.runner.tiers.measured import Measured

DOCUMENTS = 4
FRESH = 32
EVER = 1e18
SOURCES = ("computed", "device", "host", "disk")
BEFORE = ", all before the prefill"
WHOLE = ("host" + BEFORE, "disk" + BEFORE)


class Preferred(Measured):
    """Speeds by which one source is always the fastest, whatever is measured."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def speeds_for(self, size: int, flops: int, beside: int = 0) -> Speeds:
        # What lies nowhere is computed; it would be looked for in a store that is faster.
        host, disk, remote = (EVER if name == self._source else 1 / EVER for name in TIERS)
        compute = EVER if self._source in ("computed", "device") else 1.0
        return Speeds(host=host, disk=disk, remote=remote, compute=compute)


def evict(cache: KvCache) -> None:
    """Has all blocks taken that nobody holds, and given back empty."""
    length = cache.stats()["total"]
    while length:
        tokens = np.zeros(length * cache.shape.page_tokens, np.int32)
        try:
            cache.admit(tokens, reuse="none").release()
            return
        except PoolFull:
            length -= 1


class Bench:
    """A prompt whose documents lie in host memory and a store, and a runner that has both."""

    def __init__(self, model: Any, tokens: int, folder: Path) -> None:
        spec = {"max_tokens": 3 * tokens, "frozen_share": 0.9, "check": False, "progress": False}
        probe = kvweave.Runner(model, max_tokens=64, check=False, progress=False)
        size = 2 * tokens * probe.cache.shape.token_bytes
        self.runner = kvweave.Runner(model, store=folder, document_bytes=size, **spec)
        rng = np.random.default_rng(tokens)
        each = (tokens - 2 * FRESH) // DOCUMENTS

        def drawn(count: int) -> kvweave.Segment:
            ids = rng.integers(0, model.config.vocab_size, count).tolist()
            return kvweave.Segment(tokens=ids, namespace=f"{count}")

        documents = [drawn(each) for _ in range(DOCUMENTS)]
        self.parts = [drawn(FRESH), *documents, drawn(FRESH + 1)]
        for number, document in enumerate(documents):
            self.runner.insert(list(document.tokens or ()), f"{number}", document.namespace)
        self.runner.flush()
        # Frozen blocks would be kept on the device.
        for number, document in enumerate(documents):
            self.runner.cache.delete(f"{number}", document.namespace)
        self.bytes = DOCUMENTS * each * self.runner.cache.shape.token_bytes

    def prefill(self, how: str | None) -> tuple[kvweave.Report, torch.Tensor]:
        """The report and the last logits of the prompt, its documents coming from one source."""
        assert self.runner.tiers is not None
        self.runner.tiers.overlaps = how not in WHOLE
        source = None if how is None else how.removesuffix(BEFORE)
        if source != "device":
            evict(self.runner.cache)
        if source is not None:
            self.runner.tiers.measured = Preferred(source)
        with self.runner.prefill(self.parts, "naive", remember=False, watched=False) as done:
            found = [one.source for one in done.report.documents[1:-1]]
            expected = found if source is None else [source] * DOCUMENTS
            expect(found == expected, f"{source}: expected all from there, got {found}")
            return done.report, done.logits[-1].float().cpu()


def run(quick: bool) -> list[Row]:
    if torch.cuda.is_available():
        name, lengths = "Llama-3.1-8B", (4096,) if quick else (8192, 32768)
        model: Any = random_model(name)
    else:
        name, lengths = "SmolLM2-135M", (512,) if quick else (1024, 4096)
        model = load_smollm2()[0]
    rows = []
    for tokens in lengths:
        with tempfile.TemporaryDirectory(dir=os.environ.get("KVWEAVE_BENCH_DISK")) as folder:
            bench = Bench(model, tokens, Path(folder) / "store")
            rows += rows_of(name, bench, tokens, rounds=2 if quick else 6)
            bench.runner.close()
    return rows


def rows_of(name: str, bench: Bench, tokens: int, rounds: int) -> list[Row]:
    """A row a source, with its share of the time of computing, and one of the runner's choice."""
    every = SOURCES + WHOLE
    reports: dict[str, list[kvweave.Report]] = {source: [] for source in every}
    # Brought from anywhere, documents are the same bits; warms all of them up.
    some = ("host", "device", "disk", "computed", *WHOLE)
    last = {source: bench.prefill(source)[1] for source in some}
    bench.prefill("disk")
    for source in ("device", "disk", *WHOLE):
        expect(torch.equal(last[source], last["host"]), f"{source}: expected the host's logits")
    for source in turns(every, rounds):
        if source == "device":
            bench.prefill("host")
        reports[source].append(bench.prefill(source)[0])
    measured = Measured()
    chosen = _chosen(bench, measured, rounds)
    whole = summarise([report.ttft_s for report in reports["computed"]]).median_s

    def row(title: str, some: Sequence[kvweave.Report], **beside: object) -> Row:
        spent = summarise([report.ttft_s for report in some])
        load = float(np.median([report.timings.load_s for report in some]))
        of = {"÷ computed": spent.median_s / whole, "load s": load, **beside}
        label = f"{name}, {tokens} tokens, {title}"
        return Row(label, spent.median_s, "s", spent.p95_s, of)

    megabytes = bench.bytes / 1e6
    rows = [row(source, found, MB=megabytes) for source, found in reports.items()]
    came = ", ".join(sorted({one.source for report in chosen for one in report.documents[1:-1]}))
    return [*rows, row("as the runner chooses", chosen, MB=megabytes, source=came)]


def _chosen(bench: Bench, measured: Measured, rounds: int) -> list[kvweave.Report]:
    """Prefills by a runner that has measured each of its tiers and computing."""
    assert bench.runner.tiers is not None
    learn: list[Callable[[], object]] = [lambda: bench.prefill(None)] * 4
    bench.runner.tiers.measured = measured
    for prefill in learn:
        prefill()
    return [bench.prefill(None)[0] for _ in range(rounds)]

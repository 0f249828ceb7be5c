"""How often a runner takes a document from where it comes sooner: a slow store, or computing.

Documents of SmolLM2 lie in a remote store alone, a folder whose reads are slowed by a wait, so many
bytes a second: what loads a document as fast as computing one of `MIDDLE` tokens does, and a
multiple of it. At each of these speeds a runner is asked for documents of all lengths, in an order
that is drawn, and chooses as it always does: one of each length by which it learns, as it had
measured nothing, and then those that count. Behind each choice the other way is timed with the same
document, of which the runner learns nothing. Right is the way that is faster by the medians of a
length's documents, whose both ways were so taken at the same moments: a machine's prefills of the
same text differ by tens of percent within minutes. `lost`: what wrong choices took longer, of the
time of right ones.
`apart`: of the choices between ways that are `APART` apart or more, those that are right, and how
many there were. What is nearer than that is not told apart by medians of so few prefills.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvweave
from benchmarks.cases.tiers import Preferred, evict
from benchmarks.classifier import interval
from kvweave.lab.bench.rows import Row, expect
from kvweave.models import load_smollm2
from kvweave.remote.remote_store import RemoteShard
from kvweave.runner.tiers.measured import Measured

LENGTHS = (64, 128, 256, 512, 768)
MIDDLE = 256
TIMES = (0.5, 0.8, 1.25, 2.0)
"""Speeds of loading, of that at which a document of `MIDDLE` tokens takes as long to compute."""
FRESH = 32
ASKED, TRIED = 10, 11
"""Documents of each length whose choices count, and prefills that say how fast a store is even."""
LEAST_RIGHT = 0.95
APART = 0.05
"""Of the faster way's time."""


class SlowStore(kvweave.RemoteStore):
    """One whose documents come no faster than `bytes_per_s`; None: as fast as they do."""

    bytes_per_s: float | None = None

    def get(self, *asked: Any, **how: Any) -> RemoteShard | None:
        """As `RemoteStore.get`, and a wait."""
        begun = time.perf_counter()
        shard = super().get(*asked, **how)
        if shard is not None and self.bytes_per_s is not None:
            due = begun + sum(shard.parts.values()) / self.bytes_per_s
            time.sleep(max(0.0, due - time.perf_counter()))
        return shard


@dataclass(frozen=True)
class Took:
    """Seconds to the first token of a prompt over one document, and where that came from."""

    seconds: float
    source: str


class Documents:
    """Documents of some lengths in a slow store, and a runner that asks for them."""

    def __init__(self, model: Any, folder: Path, lengths: tuple[int, ...], count: int) -> None:
        self.store = SlowStore("fs", {"root": str(folder)}, timeout_s=60.0)
        self.runner = kvweave.Runner(
            model,
            remote=self.store,
            max_tokens=2 * max(lengths) + 1024,
            frozen_share=0.9,
            check=False,
            progress=False,
        )
        assert self.runner.tiers is not None
        # A slow store is no dead one.
        self.runner.tiers.patience_s = 600.0
        self._draws = np.random.default_rng(0)
        self._words = model.config.vocab_size
        self.texts = {n: [self._drawn(n) for _ in range(count)] for n in lengths}
        for texts in self.texts.values():
            for text in texts:
                self.runner.insert(text, "one", "library")
                self.runner.flush()
                self.runner.delete("one", "library")

    def ask(self, text: list[int] | None) -> Took:
        """A prompt over a document that is nowhere but in the store, or over none."""
        evict(self.runner.cache)
        question = kvweave.Segment(tokens=self._drawn(FRESH))
        parts = [question]
        if text is not None:
            parts.insert(0, kvweave.Segment(tokens=text, namespace="library"))
        with self.runner.prefill(parts, "naive", remember=False) as done:
            return Took(done.report.ttft_s, done.report.documents[0].source)

    @contextmanager
    def measured_by(self, measured: Measured) -> Iterator[None]:
        """Has the runner choose by what was measured, and learn by that alone, until it is left."""
        tiers = self.runner.tiers
        assert tiers is not None
        before, tiers.measured = tiers.measured, measured
        try:
            yield
        finally:
            tiers.measured = before

    def ask_for(self, text: list[int] | None, source: str) -> float:
        """Seconds of a prompt whose document comes from one source; the runner learns nothing."""
        with self.measured_by(Preferred(source)):
            took = self.ask(text)
        expect(text is None or took.source == source, f"expected it from {source}, got {took}")
        return took.seconds

    def _drawn(self, count: int) -> list[int]:
        drawn: list[int] = self._draws.integers(0, self._words, count).tolist()
        return drawn


@dataclass(frozen=True)
class Asked:
    """A document of a length that came from where the runner chose, and seconds of either way."""

    length: int
    chosen: str
    seconds: dict[str, float]


@dataclass(frozen=True)
class Choices:
    """What was chosen at one speed: lengths, where each came from, and seconds of both ways."""

    chosen: list[tuple[int, str]]
    loaded: dict[int, float]
    computed: dict[int, float]

    @staticmethod
    def of(asked: list[Asked]) -> Choices:
        """Those of documents; both ways take the medians of a length's."""

        def median(length: int, way: str) -> float:
            return float(np.median([one.seconds[way] for one in asked if one.length == length]))

        lengths = sorted({one.length for one in asked})
        loaded, computed = ({n: median(n, way) for n in lengths} for way in ("remote", "computed"))
        return Choices([(one.length, one.chosen) for one in asked], loaded, computed)

    @property
    def right(self) -> list[bool]:
        """Of each choice, whether it is the way that is faster for the length."""
        return [self._of(*one) == self._best(one[0]) for one in self.chosen]

    @property
    def apart(self) -> list[bool]:
        """Of each choice between ways that are clearly apart, whether it is the faster one."""
        pairs = zip(self.right, self.chosen, strict=True)
        return [right for right, (length, _) in pairs if self._is_apart(length)]

    @property
    def lost(self) -> float:
        """What wrong choices took beyond right ones, as a share of these."""
        best = sum(self._best(length) for length, _ in self.chosen)
        return sum(self._of(*one) for one in self.chosen) / best - 1

    @property
    def crossover(self) -> int | None:
        """The least length from which on loading is faster at all that were tried."""
        slow = [n for n in self.loaded if self.loaded[n] > self.computed[n]]
        return min((n for n in self.loaded if n > max(slow, default=0)), default=None)

    def _is_apart(self, length: int) -> bool:
        return abs(self.loaded[length] - self.computed[length]) >= APART * self._best(length)

    def _of(self, length: int, source: str) -> float:
        return self.loaded[length] if source == "remote" else self.computed[length]

    def _best(self, length: int) -> float:
        return min(self.loaded[length], self.computed[length])


def run(quick: bool) -> list[Row]:
    lengths = (64, MIDDLE) if quick else LENGTHS
    asked, tried, times = (2, 1, (0.5, 2.0)) if quick else (ASKED, TRIED, TIMES)
    with tempfile.TemporaryDirectory() as folder:
        documents = Documents(load_smollm2()[0], Path(folder), lengths, asked + 1)
        try:
            return rows_of(documents, tried, times)
        finally:
            documents.runner.close()


def rows_of(
    documents: Documents, tried: int, times: tuple[float, ...], middle: int = MIDDLE
) -> list[Row]:
    """A row a speed, and one of all."""
    size = middle * documents.runner.cache.shape.token_bytes
    text = documents.texts[middle][0]
    with_it, alone = (
        float(np.median([documents.ask_for(one, "computed") for _ in range(tried)]))
        for one in (text, None)
    )
    even = size / (with_it - alone)
    found = {}
    for faster in times:
        documents.store.bytes_per_s = faster * even
        found[faster] = Choices.of(asked_of(documents))
    rows = [row(f"{faster * even / 1e6:.3g} MB/s", one) for faster, one in found.items()]
    all_of = [right for one in found.values() for right in one.right]
    apart = [right for one in found.values() for right in one.apart]
    of = {"apart": share(apart), "choices apart": len(apart), **_between(apart)}
    beside = {**of, "choices": len(all_of), "aim": LEAST_RIGHT}
    return [*rows, Row("SmolLM2, all speeds: the faster way", share(all_of), "", None, beside)]


def share(right: list[bool]) -> float:
    """How many of some are right; all of none."""
    return sum(right) / len(right) if right else 1.0


def _between(right: list[bool]) -> dict[str, float]:
    low, high = interval(sum(right), len(right)) if right else (0.0, 1.0)
    return {"from": low, "to": high}


def asked_of(documents: Documents) -> list[Asked]:
    """What a runner chooses for all documents but the first of each length, of which it learns."""
    with documents.measured_by(Measured()):
        for first, *_ in documents.texts.values():
            documents.ask(first)
        every = [(n, text) for n, texts in documents.texts.items() for text in texts[1:]]
        order = np.random.default_rng(1).permutation(len(every))
        return [_asked(documents, *every[at]) for at in order]


def _asked(documents: Documents, length: int, text: list[int]) -> Asked:
    took = documents.ask(text)
    other = "computed" if took.source == "remote" else "remote"
    seconds = {took.source: took.seconds, other: documents.ask_for(text, other)}
    return Asked(length, took.source, seconds)


def row(speed: str, found: Choices) -> Row:
    loads = sum(source == "remote" for _, source in found.chosen) / len(found.chosen)
    beside = {"apart": share(found.apart), "choices apart": len(found.apart), "lost": found.lost}
    beside |= {"loaded": loads, "loading wins from": found.crossover or "none"}
    of = share(found.right)
    return Row(f"SmolLM2, a store of {speed}: the faster way", of, "", None, beside)

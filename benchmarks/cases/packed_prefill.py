"""What packing adds to the prefill of a prompt.

A model of Llama-3.1-8B's shape with random weights, some of its layers, and one prompt of random
tokens: its prefill into pages of each format beside that into exact ones, which computes the same
and packs nothing. A `Runner` packs each layer while the layers behind it are computed; "behind" is
one that packs what rows fill once all layers have them (`Packing.beside`), to the same bytes. The
runners take turns, so that what a device does meanwhile falls on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import torch

from benchmarks.device.models import random_model
from kvweave import Runner
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise, turns
from kvweave.runner import Packing
from kvweave.runner.report import PackedReport

FORMATS = ("int4", "int8", "half-int4", "quarter-bf16", "planes-3")
BOTH = ("int4", "half-int4", "planes-3")
"""Formats that are packed both ways."""

Shape = tuple[str, int, int]
"""A model, so many of its layers, and tokens of a prompt."""

ON_GPU: Shape = ("Llama-3.1-8B", 8, 65_536)
QUICK: Shape = ("small Llama", 2, 512)
WARM, PREFILLS = 1, 5
BEHIND = ", behind"

Timed = tuple[float, PackedReport | None]
"""Seconds of a prefill, and how its pages were packed."""


def run(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    ways = [Packing(name, beside=beside) for name in BOTH for beside in (True, False)]
    shape = ON_GPU if on_gpu and not quick else QUICK
    return prefilled(shape, "cuda" if on_gpu else "cpu", ways)


def of_each_format(quick: bool) -> list[Row]:
    """The prompt over exact pages and over those of every format, as a `Runner` packs them."""
    on_gpu = torch.cuda.is_available()
    shape = ON_GPU if on_gpu and not quick else QUICK
    return prefilled(shape, "cuda" if on_gpu else "cpu", [Packing(name) for name in FORMATS])


def prefilled(shape: Shape, device: str, ways: Sequence[Packing]) -> list[Row]:
    """What a prompt takes, over exact pages and packed in these ways."""
    name, layers, length = shape
    model = random_model(name, device, layers=layers)
    words = model.config.vocab_size
    tokens = np.random.default_rng(length).integers(0, words, length).tolist()
    of = f"{name}, {layers} layers, a prompt of {length}"
    with ExitStack() as opened:
        calls: dict[str, Callable[[], Timed]] = {}
        for way in (None, *ways):
            # As much room as a device has beside such a model: chunks are as long as that says.
            given = {"max_tokens": 8 * length, "check": False, "progress": False}
            runner = opened.enter_context(closing(Runner(model, kv_dtype=way, **given)))
            calls[titled(way)] = partial(_timed, runner, tokens)
        samples: dict[str, list[float]] = {what: [] for what in calls}
        for turn, what in enumerate(turns(list(calls), WARM + PREFILLS)):
            seconds, packed = calls[what]()
            if turn >= WARM * len(calls):
                # The first of all has made the basis that the others are packed in.
                as_said = packed is None or (packed.behind > 0) == what.endswith(BEHIND)
                expect(as_said, f"{what}: expected pages packed so, got {packed}")
                samples[what].append(seconds)
    times = {what: summarise(some) for what, some in samples.items()}
    exact = times[titled(None)].median_s
    return [
        Row(f"{of}: {what}", t.median_s * 1e3, "ms", t.p95_s * 1e3, {"÷ exact": t.median_s / exact})
        for what, t in times.items()
    ]


def titled(way: Packing | None) -> str:
    """What a row is of."""
    if way is None:
        return "exact"
    return way.format if way.beside else way.format + BEHIND


def _timed(runner: Runner, tokens: list[int]) -> Timed:
    """A prefill by the host's clock, with all that the device does for it."""
    waited()
    start = time.perf_counter()
    done = runner.prefill(tokens, "full", remember=False)
    waited()
    seconds = time.perf_counter() - start
    done.release()
    return seconds, done.report.packed


def waited() -> None:
    """Waits for all that the device was asked to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()

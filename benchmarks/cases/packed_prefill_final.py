"""What it adds to the prefill of a prompt that its text is packed finally, segment by segment.

The prompt of `packed_prefill`, in fewer layers. Its pages are packed at once, and copied to the
host, whose thread sums up their moments while the prompt goes on, and packs each segment anew once
it is full (`Packing(segment_tokens=…)`): in a basis of its own, or, by a strategy, each KV head in
the format that it loses little enough in. A prefill is timed to its logits; "final s" is how long
the thread goes on behind it, and "formats" how many formats the segments have then. Between two
prefills the thread is waited for. Models have KV heads of unlike spread (`uneven_heads`), so that a
strategy finds one format for some and another for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.cases.packed_prefill import WARM, waited
from benchmarks.device.models import random_model, uneven_heads
from kvweave import Runner, ops
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise, turns
from kvweave.runner import Packing, Strategy
from kvweave.runner.report import PackingReport

PREFILLS = 3
BOUND = 0.03
"""What a strategy may lose: heads of all directions stay in INT4 then."""


@dataclass(frozen=True)
class Load:
    """A prompt of so many `tokens`, in so many layers of a model.

    `segment`: tokens of a segment; `planes`: of one that is packed in planes, whose bases are as
    large again.
    """

    model: str
    layers: int
    tokens: int
    segment: int
    planes: int

    @property
    def title(self) -> str:
        return f"{self.model}, {self.layers} layers, a prompt of {self.tokens}"


# A basis takes an eighth of a segment's bytes from 10 561 tokens on there, of planes from 21 953.
# The newest 128 tokens of a prompt are not packed yet: four segments, or two, and no more are full.
ON_GPU = Load("Llama-3.1-8B", 2, 65_536, 16_320, 32_640)
QUICK = Load("tiny Llama", 2, 6_144, 2_944, 5_888)


@dataclass(frozen=True)
class Timed:
    """Seconds of a prefill and of the thread behind it, and what became of the segments."""

    seconds: float
    final_s: float
    segments: list[PackingReport]

    @property
    def formats(self) -> int:
        """How many formats the segments have."""
        return len({name for each in self.segments for name in each.formats or [each.format]})


def run(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    load = ON_GPU if on_gpu and not quick else QUICK
    return prefilled(load, "cuda" if on_gpu else "cpu")


def prefilled(load: Load, device: str) -> list[Row]:
    """What a prompt takes over exact pages, packed once, and packed finally in these ways."""
    model = uneven_heads(random_model(load.model, device, layers=load.layers))
    words = model.config.vocab_size
    tokens = np.random.default_rng(load.tokens).integers(0, words, load.tokens).tolist()
    with ExitStack() as opened:
        calls: dict[str, Callable[[], Timed]] = {}
        for what, way in _ways(model, load).items():
            # As in `packed_prefill`.
            given = {"max_tokens": 8 * load.tokens, "check": False, "progress": False}
            runner = opened.enter_context(closing(Runner(model, kv_dtype=way, **given)))
            calls[what] = partial(_timed, runner, tokens, way)
        samples: dict[str, list[Timed]] = {what: [] for what in calls}
        for turn, what in enumerate(turns(list(calls), WARM + PREFILLS)):
            found = calls[what]()
            if turn >= WARM * len(calls):
                samples[what].append(found)
    return _rows(load, samples)


def _ways(model: torch.nn.Module, load: Load) -> dict[str, Packing | None]:
    """How a prompt is packed, by what a row is called."""
    strategy = Strategy(BOUND, four_bit_candidates(model.config.head_dim), final_share=1.0)
    segment = load.segment
    ways: dict[str, Packing | None] = {
        "exact": None,
        "int4, behind": Packing("int4", beside=False),
        f"int4, by a strategy in segments of {segment}": Packing(
            "int4", strategy=strategy, segment_tokens=segment
        ),
    }
    for name, tokens in (("half-int4", segment), ("planes-3", load.planes)):
        ways[f"{name}, in segments of {tokens}"] = Packing(name, segment_tokens=tokens)
    return ways


def four_bit_candidates(head_dim: int) -> tuple[ops.PackedFormat, ...]:
    """Half and a quarter of a vector's numbers, in four bits."""
    quarter = ops.PackedFormat("top-r", head_dim, kept=head_dim // 4, numbers="int4")
    return ops.packed_format("half-int4", head_dim), quarter


def _timed(runner: Runner, tokens: list[int], way: Packing | None) -> Timed:
    """A prefill by the host's clock, with all that the device does for it, and what follows."""
    waited()
    start = time.perf_counter()
    with runner.prefill(tokens, "full", remember=False) as done:
        waited()
        seconds = time.perf_counter() - start
        runner.flush()
        waited()
        final_s = time.perf_counter() - start - seconds
        packed = done.report.packed
        # What is behind the last whole segment waits for more.
        begun = [] if packed is None else packed.segments
        segments = [report for report in begun if not report.waiting]
        wanted = (
            0 if way is None or way.segment_tokens is None else len(tokens) // way.segment_tokens
        )
        final = sum(report.basis == "own" for report in segments)
        expect(final == wanted, f"expected {wanted} segments in bases of their own, got {begun}")
        return Timed(seconds, final_s, segments)


def _rows(load: Load, samples: dict[str, list[Timed]]) -> list[Row]:
    times = {what: summarise([each.seconds for each in some]) for what, some in samples.items()}
    exact = times["exact"].median_s
    rows = []
    for what, timing in times.items():
        beside = {"÷ exact": timing.median_s / exact}
        last = samples[what][-1]
        if last.segments:
            beside["final s"] = float(np.median([each.final_s for each in samples[what]]))
            beside["formats"] = last.formats
        name = f"{load.title}: {what}"
        rows.append(Row(name, timing.median_s * 1e3, "ms", timing.p95_s * 1e3, beside))
    return rows

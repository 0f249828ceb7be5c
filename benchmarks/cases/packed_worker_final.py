"""Decode steps while the host packs text in several formats, and the switches to these.

The load of `packed_worker`, in fewer layers, over INT4 pages with a strategy: a document comes
between two steps, and the thread finds a format for each KV head (`uneven_heads` has three kinds of
them), packs it anew, and has it lie beside the pool from then on (`kv/text_memory.py`), between two
steps. With segments the requests' own prompts are packed so, one segment each, of some of them: of
the others there is no room for a copy on the host. Steps are timed in quiet, beside the thread, and
once the segments lie in their formats, which the steps read then. A switch is the step in which a
text comes to lie beside the pool, and two behind it, in which steps may be captured anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.cases.packed_prefill_final import BOUND, four_bit_candidates
from benchmarks.cases.packed_worker import WARM_STEPS, Load, steps_of
from benchmarks.device.models import random_model, uneven_heads
from kvweave import Runner
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise
from kvweave.runner import Engine, Packing, Strategy

COPIED = 4
"""So many requests have a segment that is packed finally."""
EXACT = 256
"""The newest tokens of a prompt, which are in no segment: some of them are not packed yet."""
PATIENCE = 50
"""A text is to be packed finally within so many times the steps that are timed."""
BEHIND = 2
"""Steps behind a switch that count as part of it."""

# A document of that shape has a basis of its own from 7 550 tokens on.
ON_GPU = Load("Llama-3.1-8B", 4, 16, 8192, 12_288, 200)
WHOLE = Load("Llama-3.1-8B", 32, 8, 8192, 12_288, 100)
QUICK = Load("tiny Llama", 2, 2, 2816, 2560, 12)


def run(quick: bool) -> list[Row]:
    model, load = _model_of(ON_GPU, quick)
    return stepped([*_document(model, load), *_segments(model, load)])


def whole(quick: bool) -> list[Row]:
    """Steps of all layers, of which what the host adds is a smaller share; a document alone."""
    return stepped(_document(*_model_of(WHOLE, quick)))


def _model_of(load: Load, quick: bool) -> tuple[Any, Load]:
    on_gpu = torch.cuda.is_available()
    load = load if on_gpu and not quick else QUICK
    model = random_model(load.model, "cuda" if on_gpu else "cpu", layers=load.layers)
    return uneven_heads(model), load


def stepped(rows: list[Row]) -> list[Row]:
    """What steps take, the first of them in quiet, each beside that."""
    quiet = rows[0]
    for row in rows:
        row.of["÷ quiet"] = row.value / quiet.value
    return rows


@contextmanager
def _decoding(model: Any, load: Load, **segments: Any) -> Iterator[tuple[Runner, Engine]]:
    """Requests of a load that decode, and their runner."""
    random = np.random.default_rng(load.tokens)
    answer = (4 + PATIENCE) * load.steps
    room = 8 * (load.requests * (load.tokens + answer + 256) + 2 * load.document)
    strategy = Strategy(BOUND, four_bit_candidates(model.config.head_dim))
    packing = replace(Packing("int4", strategy=strategy), **segments)
    runner = Runner(model, max_tokens=room, kv_dtype=packing, check=False, progress=False)
    with closing(runner), closing(runner.engine()) as engine:
        prompts = random.integers(0, model.config.vocab_size, (load.requests, load.tokens))
        asked = [engine.submit(one.tolist(), max_new_tokens=answer, stop=()) for one in prompts]
        while not all(request.tokens for request in asked):
            engine.step()
        steps_of(engine, WARM_STEPS)
        yield runner, engine
        expect(not any(request.ended for request in asked), "expected requests that decode on")


def _document(model: Any, load: Load) -> list[Row]:
    """Steps in quiet, beside the thread at a document, and its switch."""
    words, title = model.config.vocab_size, "a document, by a strategy"
    document = np.random.default_rng(load.document).integers(0, words, load.document).tolist()
    with _decoding(model, load) as (runner, engine):
        quiet = steps_of(engine, load.steps // 2)
        packing = runner.encode(document, "document").packing
        beside, switches = _until_final(runner, engine, load, 1)
        assert packing is not None
        expect(len(packing.formats) > 1, f"expected several formats, got {packing}")
        quiet += steps_of(engine, load.steps // 2)
    of = {"formats": len(packing.formats)}
    return [
        _row(load, "in quiet", quiet),
        _row(load, f"{title}: beside the thread", beside),
        _row(load, f"{title}: switched", switches, of),
    ]


def _segments(model: Any, load: Load) -> list[Row]:
    """Steps beside the thread at the requests' own segments, their switches, and over them."""
    shape, title = model.config, "segments, by a strategy"
    token = 2 * load.layers * shape.num_key_value_heads * shape.head_dim * model.dtype.itemsize
    copied, segment = min(COPIED, load.requests), load.tokens - EXACT
    how = {"segment_tokens": segment, "copy_bytes": int((copied + 0.5) * segment * token)}
    with _decoding(model, load, **how) as (runner, engine):
        beside, switches = _until_final(runner, engine, load, copied)
        runner.flush()
        assert runner.packed is not None
        assert runner.packed.final is not None
        texts = runner.packed.final.texts
        formats = {part.format for text in texts for part in text.parts}
        expect(len(formats) > 1, f"expected segments in several formats, got {formats}")
        lie = f"{len(texts)} of {load.requests} lie so"
        steps_of(engine, WARM_STEPS)
        over = steps_of(engine, load.steps)
    of = {"formats": len(formats)}
    rows = [_row(load, f"{title}: switched", switches, of)]
    if beside:
        rows.insert(0, _row(load, f"{title}: beside the thread", beside))
    return [*rows, _row(load, f"{title}: {lie}", over, of)]


def _until_final(
    runner: Runner, engine: Engine, load: Load, texts: int
) -> tuple[list[float], list[float]]:
    """Seconds of steps until so many texts are packed finally: those beside the thread, switches.

    Of the former no more are kept than a load times, as requests grow longer meanwhile.
    """
    beside: list[float] = []
    switches: list[float] = []
    final, left = 0, PATIENCE * load.steps
    while final < texts and left:
        (seconds,), left = steps_of(engine, 1), left - 1
        done = runner.packing_stats()["final"]
        if done > final:
            switches += [seconds, *steps_of(engine, BEHIND)]
            final = done
        else:
            beside.append(seconds)
    expect(final >= texts, f"expected {texts} texts packed finally, got {runner.packing_stats()}")
    return beside[: load.steps], switches


def _row(load: Load, what: str, times: list[float], of: dict[str, Any] | None = None) -> Row:
    timing = summarise(times)
    beside = {"worst ms": 1e3 * max(times), **(of or {})}
    return Row(f"{load.title}, {what}", 1e3 * timing.median_s, "ms", 1e3 * timing.p95_s, beside)

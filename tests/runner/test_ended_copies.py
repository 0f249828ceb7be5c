"""Copies of texts that end before they are packed finally: memory and work go with them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

from families import random_tokens
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.tiers import final_packing
from kvweave.runner.tiers.final_packing import TextCopy
from kvweave.runner.tiers.packed_losses import Part
from kvweave.runner.worker import Job
from packed_decoding import packed_runner
from strategy_runners import DIM, HEADS, LAYERS, all_is_back, uneven_model

SEGMENT = 640
ASKED: dict[str, Any] = {"reserve_tokens": 480, "remember": False, "watched": False}


def runner_of(packing: Packing) -> Runner:
    return packed_runner(uneven_model(), kv_dtype=packing, max_tokens=16384, chunk_tokens=400)


def test_texts_that_end_early_have_no_memory_while_the_thread_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is anything of them measured any more, once the thread comes to it."""
    one = SEGMENT * 2 * HEADS * DIM * LAYERS * 4
    packing = Packing("int4", strategy=Strategy(0.3), segment_tokens=SEGMENT, copy_bytes=one)
    runner, copies, measured = runner_of(packing), [], []
    final = runner._prefiller.final_packing
    take, part_losses = TextCopy.take, final_packing.part_losses

    def taken(copy: TextCopy, part: Part, *given: Any) -> None:
        copies.append(weakref.ref(part.cache))
        take(copy, part, *given)

    def counted(*given: Any) -> Any:
        measured.append(given)
        return part_losses(*given)

    monkeypatch.setattr(TextCopy, "take", taken)
    monkeypatch.setattr(final_packing, "part_losses", counted)
    go = threading.Event()
    final.worker.submit(_Waiting(go))
    for number in range(12):
        runner.prefill(random_tokens(SEGMENT - 40, number), "full", **ASKED).release()
    final.copier.wait()
    assert len(copies) >= 12
    there = [cache for cache in (copy() for copy in copies) if cache is not None]
    assert sum(cache.nbytes for cache in there) <= one
    assert runner.packing_stats()["copied_bytes"] == 0
    go.set()
    runner.flush()
    assert not measured
    with runner._prefiller.computing:
        pass
    assert all_is_back(runner)


class _Waiting(Job):
    """Keeps a thread at work, as a long text does."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go

    def run(self) -> None:
        self._go.wait()

"""Which tier a document comes from, and the threads that read and write: no model, no clock."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from families import random_tokens, tiny
from kvweave import Runner, StoreFull
from kvweave.flops import TextSizes, product_flops
from kvweave.runner.prefill.flops import RowFlops
from kvweave.runner.tiers.choice import Speeds, choose
from kvweave.runner.tiers.measured import Measured
from kvweave.runner.tiers.trouble import Trouble
from kvweave.runner.tiers.writes import Writes
from kvweave.runner.worker import Job, Worker

KNOWN = Speeds(host=1e9, disk=1e8, compute=1e12)


@pytest.mark.parametrize(
    ("there", "flops", "speeds", "source"),
    [
        ([], 10**12, KNOWN, "computed"),
        # 1e8 bytes: 0.1 s from the host, 1 s from the disk.
        (["host", "disk"], 10**12, KNOWN, "host"),
        (["disk"], 10**12, KNOWN, "disk"),
        (["disk"], 999 * 10**9, KNOWN, "computed"),
        (["host"], 99 * 10**9, KNOWN, "computed"),
        (["host", "disk"], 10**12, replace(KNOWN, disk=1e10), "disk"),
        # What was never measured is tried, the nearest first.
        (["disk", "host"], 1, Speeds(), "host"),
        (["disk"], 1, Speeds(host=1e9, compute=1e12), "disk"),
        (["disk"], 1, replace(KNOWN, compute=None), "disk"),
    ],
)
def test_the_fastest_is_chosen(there: Any, flops: int, speeds: Speeds, source: str) -> None:
    assert choose(there, 10**8, flops, speeds).source == source


@given(
    st.integers(1, 2**40),
    st.integers(1, 2**60),
    *(st.floats(1e-3, 1e18) for _ in range(3)),
)
def test_no_other_source_would_have_been_faster(
    size: int, flops: int, host: float, disk: float, compute: float
) -> None:
    times = {"host": size / host, "disk": size / disk, "computed": flops / compute}
    chosen = choose(["host", "disk"], size, flops, Speeds(host, disk, compute))
    assert times[chosen.source] == min(times.values())


def test_speeds_follow_what_happens_and_a_bad_impression_does_not_last() -> None:
    measured = Measured()
    assert measured.speeds == Speeds()
    measured.note("disk", 100, 1)
    measured.note("disk", 0, 1)
    measured.note("compute", 50, 0)
    assert measured.speeds == Speeds(disk=100)
    for _ in range(30):
        measured.note("disk", 1000, 1)
    speed = measured.speeds.disk
    assert speed is not None
    assert 990 < speed <= 1000
    for _ in range(15):
        measured.decline("disk", 1000)
    assert measured.speeds.disk == speed
    # What lies nearest is forgotten; by what is left, 100 bytes a second, it may be twice as fast.
    measured.decline("disk", 1000)
    assert measured.speeds_for(1000, 1).disk == 200
    for _ in range(32):
        measured.decline("disk", 1000)
    assert measured.speeds.disk is None
    for _ in range(64):
        measured.decline("disk", 1000)


def test_a_tier_that_stays_too_slow_is_tried_ever_more_seldom() -> None:
    measured, tried = Measured(), []
    measured.note("disk", 1000, 1.0)
    for asked in range(16 + 32 + 64):
        if measured.speeds_for(1000, 10).disk is None:
            tried.append(asked)
            measured.note("disk", 1000, 1.0)
        measured.decline("disk", 1000)
    assert tried == [16, 48]
    # Where it was worth reading from again for a while, it is tried as soon as at first.
    for _ in range(32):
        measured.note("disk", 1000, 0.1)
    for _ in range(16):
        measured.decline("disk", 1000)
    assert measured.speeds_for(1000, 10).disk is None


def test_a_size_takes_what_lies_between_those_that_were_measured() -> None:
    """Larger ones than any may be faster, until one was tried."""
    measured = Measured()
    assert measured.speeds_for(1, 1) == Speeds()
    measured.note("compute", 1000, 10)
    measured.note("disk", 1000, 10)
    assert measured.speeds_for(1, 1) == Speeds(disk=100, compute=100)
    assert measured.speeds_for(1500, 1500) == Speeds(disk=100, compute=100)
    assert measured.speeds_for(10**6, 10**6) == Speeds(disk=200, compute=800)
    measured.note("compute", 3000, 14)
    # 8 s and 0.002 s a FLOP: below, between and behind what was measured.
    for flops, seconds in ((500, 9), (1000, 10), (2000, 12), (4000, 16)):
        assert measured.speeds_for(1, flops).compute == pytest.approx(flops / seconds)
    # One that takes no time for itself takes its share of the least that was measured.
    assert measured.speeds_for(1, 10).compute == pytest.approx(10 / 8.02)
    measured.note("compute", 8000, 12)
    assert measured.speeds_for(1, 10_000).compute == pytest.approx(10_000 / 12)


def test_what_is_computed_anyway_is_no_reason_to_load() -> None:
    measured = Measured()
    measured.note("compute", 1000, 10)
    # All that is known is 0.01 s a FLOP.
    assert measured.speeds_for(1, 500, 400).compute == pytest.approx(100)
    measured.note("compute", 3000, 22)
    assert measured.speeds_for(1, 2000, 1000).compute == pytest.approx(2000 / 12)
    assert measured.speeds_for(1, 2000, 0).compute == pytest.approx(2000 / 16)
    # No less than half of what it takes at the fastest that was measured.
    measured.note("compute", 5000, 9)
    assert measured.speeds_for(1, 2000, 3000).compute == pytest.approx(2 * 5000 / 9)


@given(
    st.lists(st.integers(1, 40), min_size=3, max_size=12, unique=True),
    st.floats(0, 5),
    st.floats(1e-3, 10),
)
def test_sizes_on_a_line_say_what_more_takes_on_it(
    sizes: list[int], alone: float, unit: float
) -> None:
    measured = Measured()
    for size in sizes:
        measured.note("compute", 4.0**size, alone + unit * 4.0**size)
    least, most = 4 ** min(sizes), 4 ** max(sizes)
    speed = measured.speeds_for(1, most - least, least).compute
    assert speed == pytest.approx(1 / unit, rel=1e-6)


def test_a_size_that_was_measured_badly_does_not_say_alone_what_more_takes() -> None:
    """Of 32 rows that are there anyway and 64 more, all sizes near to them speak."""
    measured = Measured()
    for rows, seconds in ((32, 0.22), (96, 0.34 * 1.15), (160, 0.46), (288, 0.71), (800, 1.68)):
        measured.note("compute", rows, seconds)
    speed = measured.speeds_for(1, 64, 32).compute
    # 0.122 s by the line; 0.171 by the two sizes.
    assert speed is not None
    assert 0.12 < 64 / speed < 0.15


def test_choices_near_the_crossover_are_right_though_times_vary() -> None:
    """Loading takes 0.8 to 1.25 times what computing does; times of prefills vary by 7 to 15 %."""
    right, asked = 0, 0
    for seed, faster in itertools.product(range(12), (0.8, 1.25)):
        for is_right in choices_of(np.random.default_rng(seed), faster):
            right, asked = right + is_right, asked + 1
    assert right >= 0.95 * asked


def choices_of(draws: np.random.Generator, faster: float) -> list[bool]:
    """Whether each document of 64 to 768 tokens came the faster way, once one of each was seen."""
    lengths, measured = (64, 128, 256, 512, 768), Measured()
    unit = 0.0019

    def computed(rows: int) -> float:
        return (0.16 + rows * unit) * float(np.exp(draws.normal(0, 0.15 if rows < 100 else 0.07)))

    def ask(length: int) -> str:
        speeds = measured.speeds_for(length, length, 32)
        source = choose(["remote"], length, length, speeds).source
        if source == "computed":
            measured.note("compute", length + 32, computed(length + 32))
            measured.decline("remote", length)
        else:
            measured.note("remote", length, length * unit / faster)
            measured.note("compute", 32, computed(32))
        return source

    for length in lengths:
        ask(length)
    best = "remote" if faster > 1 else "computed"
    return [ask(int(length)) == best for length in draws.permutation(np.repeat(lengths, 10))]


AMOUNTS = st.lists(st.tuples(st.floats(1, 1e15), st.floats(1e-6, 1e3)), min_size=1)


@given(AMOUNTS, st.integers(1, 10**16), st.integers(0, 10**16))
def test_a_speed_is_between_those_that_were_measured_or_may_be(
    noted: list[tuple[float, float]], asked: int, beside: int
) -> None:
    measured = Measured()
    for amount, seconds in noted:
        measured.note("compute", amount, seconds)
    every = [amount / seconds for amount, seconds in noted]
    least, most = min(amount for amount, _ in noted), max(amount for amount, _ in noted)
    speed = measured.speeds_for(1, asked).compute
    assert speed is not None
    # What is smaller than all that was measured may take as long as that.
    smaller = min(1.0, asked / least)
    assert min(every) * smaller * (1 - 1e-6) <= speed <= 8 * max(every) * (1 + 1e-6)
    if asked <= most:
        assert speed <= max(every) * (1 + 1e-6)
    with_others = measured.speeds_for(1, asked, beside).compute
    assert with_others is not None
    assert 0 < with_others <= 16 * max(every) * (1 + 1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
def test_flops_of_rows_are_those_of_a_prefill_but_for_logits(family: str) -> None:
    """The last layer of a prefill computes one row behind its K and V; the others all of them."""
    runner = Runner(tiny(family), max_tokens=512, check=False, progress=False)
    tokens = random_tokens(100, 1).tolist()
    done = runner.prefill(tokens, "full", logits_from=0)
    ran = sum(done.report.flops.values()) - done.report.flops["logits"]
    rows = RowFlops(runner.spec, runner._prefiller.heads)
    assert rows(0, 100) == ran
    assert rows(0, 40) + rows(40, 100) == ran
    assert rows(7, 7) == 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_flops_by_a_configuration_are_those_of_the_modules(family: str) -> None:
    """But for a router, whose few weights no configuration names."""
    model = tiny(family)
    runner = Runner(model, max_tokens=64, check=False, progress=False)
    spec = runner.spec
    sizes = TextSizes.of_config(model.config, spec.kv_heads, spec.head_dim)
    rows = RowFlops(spec, runner._prefiller.heads)
    experts = getattr(model.config, "num_local_experts", 0)
    routers = product_flops(50, len(spec.layers) * experts * model.config.hidden_size)
    assert sizes.flops(10, 60) == rows(10, 60) - routers > 0


class Noted(Job):
    def __init__(self, number: int, done: list[Any], raises: BaseException | None = None) -> None:
        self.urgency = (number,)
        self.done = done
        self.raises = raises

    def run(self) -> None:
        if self.raises is not None:
            raise self.raises
        self.done.append(self.urgency[0])

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            self.done.append(f"{self.urgency[0]}: {error}")


class Gate(Job):
    """Keeps the worker busy until it is opened."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def run(self) -> None:
        self.begun.set()
        self.open.wait()


def test_the_most_urgent_job_goes_first_and_what_raises_stops_no_other() -> None:
    worker, gate, done = Worker("a worker"), Gate(), []
    worker.submit(gate)
    gate.begun.wait()
    dropped, hurried = Noted(0, done), Noted(7, done)
    others = Noted(5, done), Noted(2, done, ValueError("two")), Noted(1, done)
    for job in (dropped, hurried, *others):
        worker.submit(job)
    worker.drop(dropped)
    worker.hurry(hurried, (-1,))
    gate.open.set()
    worker.wait()
    assert done == [-1, 1, "2: two", 5]
    done.remove(-1)
    worker.submit(Noted(9, done, SystemExit("dies")))
    worker.wait()
    assert done[3].endswith("got SystemExit: dies")
    worker.submit(Noted(3, done))
    worker.close(finish=True)
    assert done[4:] == [3]
    worker.submit(Noted(4, done))
    assert done[5:] == ["4: a worker: expected one that is open, got a closed one"]
    worker.close(finish=True)


class Given:
    """A document of a part."""

    def __init__(self) -> None:
        self.parts = {"kv": np.zeros(1000, np.uint8)}


class TakingTier:
    """Takes what it is given, or has no room."""

    source, called, trouble, is_resting = "disk", "a tier", "", False

    def __init__(self, *, is_full: bool) -> None:
        self.is_full = is_full

    def read(self, document: Any, left: Any) -> None:
        raise AssertionError("nothing is read")

    def write(self, payload: Any, name: str | None) -> None:
        if self.is_full:
            raise StoreFull(f"{name}: expected room for {payload.parts['kv'].nbytes} bytes")


@pytest.mark.parametrize("is_full", [False, True])
def test_nothing_of_a_document_stays_with_who_wrote_it(is_full: bool) -> None:
    given: Any = Given()
    writes = Writes(TakingTier(is_full=is_full), 1 << 20, Trouble(), patient=True)
    kept = weakref.ref(given.parts["kv"])
    writes.write(given, "letter")
    del given
    end = time.monotonic() + 10
    while kept() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert kept() is None
    if is_full:
        with pytest.raises(StoreFull, match="letter: expected room for 1000 bytes"):
            writes.flush()
    writes.flush()
    writes.close(None)


def test_who_waits_is_told_when_a_worker_closes_without_them() -> None:
    worker, gate, done = Worker("a worker"), Gate(), []
    worker.submit(gate)
    gate.begun.wait()
    worker.submit(Noted(1, done))
    worker.close(finish=False, most_s=0)
    assert done == ["1: a worker: expected one that is open, got a closed one"]
    gate.open.set()
    worker.close(finish=False)


class ToldSlowly(Job):
    """Ends the worker's thread; what it is told is known only when `open` is set."""

    def __init__(self) -> None:
        self.told, self.open = threading.Event(), threading.Event()
        self.knows = False

    def run(self) -> None:
        raise SystemExit("dies")

    def end(self, error: BaseException | None) -> None:
        self.told.set()
        self.open.wait()
        self.knows = True


def test_a_job_whose_thread_died_has_ended_when_it_knows() -> None:
    worker, job, seen = Worker("a worker"), ToldSlowly(), []

    def waits() -> None:
        worker.wait()
        seen.append(job.knows)

    worker.submit(job)
    job.told.wait()
    waiter = threading.Thread(target=waits)
    waiter.start()
    waiter.join(0.05)
    job.open.set()
    waiter.join()
    assert seen == [True]


def test_a_thread_that_cannot_begin_leaves_no_job_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done = Worker("a worker"), []

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        worker.submit(Noted(1, done))
    worker.wait()
    worker.submit(Noted(2, done))
    worker.wait()
    assert done == ["1: a worker: expected a thread to begin, got: can't start new thread", 2]
    worker.close(finish=True)

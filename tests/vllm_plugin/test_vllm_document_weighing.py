"""Whether a document of a knowledge base is read or computed, by a clock that is set by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvweave.adapters.vllm.segments.document_weighing import (
    LEAST_ROWS,
    DocumentWeighing,
    StepWork,
)
from kvweave.flops import TextSizes, attention_flops, product_flops, visible_pairs
from kvweave.runner.clock import Clock, Mark

SIZES = TextSizes(weights=1000, width=8)
LAYERS, DOCUMENT = 4, 10_000


class Time(Clock):
    """A clock whose marks say `now`, and are reached where `reached` says so."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now, self.reached = 0.0, True

    def mark(self) -> Mark:
        return self.now

    def is_reached(self, mark: Mark) -> bool:
        return self.reached


@pytest.fixture
def clock() -> Time:
    return Time()


def read(weighing: DocumentWeighing, seconds: float) -> None:
    weighing.was_read(DOCUMENT, seconds)


def compute(
    weighing: DocumentWeighing, clock: Time, seconds: float, rows: int = 100, spared: int = 0
) -> None:
    work = StepWork()
    work.add(0, rows)
    weighing.begin(work, 5)
    clock.now += seconds
    weighing.end(5 + spared)


def is_read(weighing: DocumentWeighing, *, others: int = 0) -> bool:
    return weighing.is_worth_reading(DOCUMENT, 0, 100, others)


def test_what_takes_less_is_done(clock: Time) -> None:
    weighing = DocumentWeighing(SIZES, LAYERS, clock, always=False)
    assert is_read(weighing)
    read(weighing, 2.0)
    # Nothing was computed yet, or nothing of which the device is done.
    assert is_read(weighing)
    clock.reached = False
    compute(weighing, clock, 1.0)
    assert is_read(weighing)
    clock.reached = True
    assert not is_read(weighing)
    compute(weighing, clock, 9.0)
    compute(weighing, clock, 9.0)
    assert is_read(weighing)


def test_rows_that_are_computed_anyway_are_no_reason_to_read(clock: Time) -> None:
    """A forward of 100 rows takes 3 s and one of 200 rows 4: reading has to beat the second."""
    weighing = DocumentWeighing(SIZES, LAYERS, clock, always=False)
    compute(weighing, clock, 3.0, 100)
    compute(weighing, clock, 4.0, 200)
    read(weighing, 2.0)
    assert is_read(weighing)
    assert not is_read(weighing, others=100)


def test_a_folder_that_was_too_slow_is_tried_again(clock: Time) -> None:
    weighing = DocumentWeighing(SIZES, LAYERS, clock, always=False)
    read(weighing, 9.0)
    compute(weighing, clock, 1.0)
    tried = [is_read(weighing) for _ in range(17)]
    assert tried == [False] * 16 + [True]


def test_forwards_that_nobody_asks_about_are_not_gathered(clock: Time) -> None:
    weighing = DocumentWeighing(SIZES, LAYERS, clock, always=False)
    for _ in range(100):
        compute(weighing, clock, 1.0)
    assert len(weighing._ended) <= 1


def test_all_is_read_where_that_was_asked_for(clock: Time) -> None:
    weighing = DocumentWeighing(SIZES, LAYERS, clock, always=True)
    read(weighing, 9.0)
    compute(weighing, clock, 0.1)
    assert is_read(weighing)


def test_decode_says_nothing_and_spared_rows_do_not_count(clock: Time) -> None:
    weighing = DocumentWeighing(SIZES, LAYERS, clock, always=False)
    read(weighing, 2.0)
    compute(weighing, clock, 1e-6, rows=8)
    assert is_read(weighing)
    # Half of the rows were spared in all layers: for all of them it takes twice as long.
    compute(weighing, clock, 1.5, spared=50 * LAYERS)
    assert is_read(weighing)
    # A step in which all were says nothing of computing.
    compute(weighing, clock, 1e-6, spared=100 * LAYERS)
    assert is_read(weighing)


def test_work_counts_what_rows_see() -> None:
    work = StepWork()
    work.add(0, 7)
    work.add(40, 5)
    wanted = sum(range(1, 8)) + sum(range(41, 46))
    assert (work.rows, work.pairs) == (12, wanted)
    rows = torch.arange(40, 45).numpy()
    assert SIZES.flops(40, 45) == product_flops(5, 1000) + attention_flops(visible_pairs(rows), 8)


@pytest.mark.parametrize("prompt", [3, 40])
def test_work_of_a_step_is_of_all_requests_where_it_is_timed(prompt: int) -> None:
    """One that is computed from its 7th token on, and two that decode behind 10 and 20."""
    counts = {"new": prompt, "a": 1, "b": 1}
    scheduled = SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=6)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[10, 20]),
    )
    work = StepWork.of(scheduled)
    assert work.rows == prompt + 2
    seen = sum(range(7, 7 + prompt)) + 11 + 21
    assert work.pairs == (seen if work.rows >= LEAST_ROWS else 0)

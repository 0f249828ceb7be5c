"""The scheduler's border: a whole engine of no cost over a real cache, and bad input by name."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from kvweave import InvalidArgument, KvCache, KvShape, PoolFull
from kvweave.scheduler import Scheduler, StepPlan

P = 4
SECOND = 1_000_000_000


def small_cache(blocks: int = 64) -> KvCache:
    return KvCache(KvShape(1, 2, 8, P), blocks=blocks)


def small(cache: KvCache, **given: Any) -> Scheduler:
    chosen = {"token_budget": 64, "chunk_tokens": 16, "max_running": 8, **given}
    return Scheduler(cache, **chosen)


class Engine:
    """Carries plans out on a cache, with tokens that follow from those before them."""

    def __init__(self, cache: KvCache, scheduler: Scheduler) -> None:
        self.cache, self.scheduler = cache, scheduler
        self.tokens: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.held: dict[int, kvweave.KvRequest] = {}
        self.done: dict[int, list[int]] = {}
        self.answered: list[int] = []
        self.finished: list[int] = []
        self.now = 0

    def arrive(self, request: int, prompt: list[int], limit: int, **given: Any) -> None:
        self.scheduler.arrive(request, len(prompt), self.now, **given)
        self.tokens[request] = list(prompt)
        self.limits[request] = len(prompt) + limit

    def say(self, request: int) -> None:
        tokens = self.tokens[request]
        tokens.append(sum(tokens) % 997)
        self.answered.append(request)
        if len(tokens) == self.limits[request]:
            self.finished.append(request)
            self.held.pop(request).release()
            self.done[request] = self.tokens.pop(request)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now, answered=self.answered, finished=self.finished)
        self.now += SECOND // 100
        self.answered, self.finished = [], []
        for request, _ in plan.preempted.tolist():
            if held := self.held.pop(request, None):
                held.release()
        for request, known, _ in plan.admitted.tolist():
            assert known == len(self.tokens[request])
        for request, first, count, last in plan.prefill.tolist():
            if request not in self.held and not self.admits(request):
                continue
            self.held[request].commit(first + count, first + count)
            assert bool(last) == (first + count == len(self.tokens[request]))
            if last:
                self.say(request)
        for request in plan.decode.tolist():
            try:
                self.held[request].append(np.asarray(self.tokens[request][-1:], np.int32))
            except PoolFull:
                assert self.scheduler.not_done(request, no_room=True)
                continue
            self.say(request)
        self.cache.check()
        return plan

    def admits(self, request: int) -> bool:
        """Others may have taken the room since it was promised, or go on reading what gave way."""
        tokens = np.asarray(self.tokens[request], np.int32)
        try:
            held = self.held[request] = self.cache.admit(tokens, reuse="prefix")
        except PoolFull:
            assert self.scheduler.not_done(request, no_room=True)
            return False
        held.take_copies()
        held.finish_copies()
        return True

    def drain(self) -> None:
        for _ in range(5000):
            if not self.tokens:
                self.scheduler.plan(self.now, answered=self.answered, finished=self.finished)
                return
            self.step()
        raise AssertionError(self.scheduler.metrics())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(-1, 2)), max_size=20),
    st.integers(20, 60),
    st.sampled_from(["arrival", "short-first"]),
)
def test_every_request_says_what_it_would_alone(
    requests: list[tuple[int, int, int]], blocks: int, order: str
) -> None:
    cache = small_cache(blocks)
    engine = Engine(cache, small(cache, order=order))
    alone = {}
    for request, (length, limit, priority) in enumerate(requests):
        prompt = [(request % 3) * 7 + at for at in range(length)]
        alone[request] = list(prompt)
        for _ in range(limit):
            alone[request].append(sum(alone[request]) % 997)
        engine.arrive(request, prompt, limit, priority=priority, namespace=str(request % 2))
        engine.step()
    engine.drain()
    assert engine.done == alone
    assert cache.stats()["held"] == 0
    metrics = engine.scheduler.metrics()
    assert metrics["finished"] == len(requests)
    assert metrics["waiting"] == metrics["prefilling"] == metrics["decoding"] == 0


def test_who_gives_way_may_have_pages_that_others_read() -> None:
    cache = small_cache(20)
    engine = Engine(cache, small(cache, headroom=0))
    for request, (length, limit) in enumerate([(23, 4), (1, 1), (1, 1), (5, 2)]):
        engine.arrive(request, [request % 3 * 7 + at for at in range(length)], limit)
        engine.step()
    engine.arrive(4, [7 + at for at in range(49)], 1, priority=1)
    plan = engine.step()
    # Request 3 has its first page from request 0, which goes on reading it.
    assert (plan.admitted[:, 0].tolist(), plan.preempted.tolist()) == ([4], [[3, 4]])
    assert engine.scheduler.state(4) == "waiting"
    engine.drain()
    assert sorted(engine.done) == [0, 1, 2, 3, 4]


def test_a_plan_says_everything_in_plain_arrays() -> None:
    cache = small_cache()
    scheduler = small(cache)
    scheduler.arrive(3, 40, 0)
    scheduler.arrive(4, 8, 0, cached=4)
    plan = scheduler.plan(0)
    assert (plan.step, plan.kind, plan.tokens, plan.is_idle) == (1, 0, 20, False)
    assert plan.admitted.tolist() == [[3, 40, 0], [4, 8, 4]]
    assert plan.prefill.tolist() == [[3, 0, 16, 0], [4, 4, 4, 1]]
    assert plan.decode.shape == (0,)
    assert plan.preempted.shape == (0, 2)
    assert plan.refused == []
    assert plan.blocked is None
    for array in (plan.admitted, plan.prefill, plan.decode, plan.preempted):
        assert array.dtype == np.int64
    assert [scheduler.state(n) for n in (3, 4, 5)] == ["prefilling", "prefilling", None]
    plan = scheduler.plan(1, answered=np.array([4]))
    assert plan.decode.tolist() == [4]
    assert plan.prefill.tolist() == [[3, 16, 16, 0]]
    assert scheduler.state(4) == "decoding"
    assert scheduler.plan(2, answered=plan.decode, finished=plan.decode).decode.tolist() == []
    assert scheduler.state(4) is None
    assert scheduler.cancel(3)
    assert not scheduler.cancel(3)
    assert "step=1" in repr(small_plan())


def small_plan() -> StepPlan:
    scheduler = small(small_cache())
    scheduler.arrive(1, 8, 0)
    return scheduler.plan(0)


def test_the_same_events_give_the_same_plans() -> None:
    assert small_plan() == small_plan()


def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    scheduler = small(small_cache(blocks=8))
    with pytest.raises(PoolFull, match="prompt: expected 18 blocks to be available, got 16"):
        scheduler.arrive(1, 33, 0)
    assert scheduler.state(1) is None
    scheduler.arrive(1, 32, 0)
    assert scheduler.metrics()["refused"] == 1


def test_an_answer_that_outgrows_the_cache_is_ended_with_a_reason() -> None:
    cache = small_cache(blocks=8)
    engine = Engine(cache, small(cache))
    engine.arrive(1, list(range(30)), 100)
    plan = engine.step()
    while not plan.refused:
        plan = engine.step()
    assert plan.refused == [(1, "request: expected at most 16 pages, got 18")]
    assert engine.scheduler.state(1) is None


def test_other_users_of_the_cache_are_seen() -> None:
    cache = small_cache(blocks=8)
    scheduler = small(cache)
    other = cache.admit(np.arange(24, dtype=np.int32), reuse="none")
    scheduler.arrive(1, 16, 0)
    plan = scheduler.plan(0)
    assert plan.is_idle
    assert plan.blocked == (1, 8, 4)
    other.release()
    assert scheduler.plan(1).admitted.tolist() == [[1, 16, 0]]


def test_memory_that_falls_short_makes_the_last_yield() -> None:
    scheduler = small(small_cache(), headroom=0)
    for request in range(3):
        scheduler.arrive(request, 4, 0)
    plan = scheduler.plan(0)
    plan = scheduler.plan(1, answered=[0, 1, 2])
    assert plan.decode.tolist() == [0, 1, 2]
    # The second page of each was promised, and the first found none.
    assert scheduler.not_done(0, no_room=True)
    assert scheduler.not_done(1)
    assert scheduler.not_done(2)
    with pytest.raises(InvalidArgument, match="request 0: expected one of the last plan's"):
        scheduler.not_done(0)
    assert scheduler.not_done(9) is False
    plan = scheduler.plan(2)
    assert plan.preempted.tolist() == [[2, 0]]
    assert plan.decode.tolist() == [0, 1]
    assert scheduler.state(2) == "waiting"


def test_threads_may_send_events_while_others_plan() -> None:
    cache = small_cache(blocks=400)
    scheduler = small(cache)
    raised: list[BaseException] = []

    def send(first: int) -> None:
        try:
            for request in range(first, first + 200):
                scheduler.arrive(request, 4, 0, namespace=str(first))
                if request % 3 == 0:
                    scheduler.cancel(request)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=send, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    answered: list[int] = []
    while any(thread.is_alive() for thread in threads) or scheduler.metrics()["waiting"]:
        plan = scheduler.plan(0, answered=answered, finished=answered)
        answered = [row[0] for row in plan.prefill.tolist() if row[3]]
    scheduler.plan(0, answered=answered, finished=answered)
    assert not raised
    metrics = scheduler.metrics()
    assert metrics["arrived"] == 800
    assert metrics["finished"] + metrics["cancelled"] == 800
    assert metrics["namespaces"] == 0


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"token_budget": 8}, "token_budget: expected at least 24"),
    ({"token_budget": -1}, "token_budget: expected at least 0, got -1"),
    ({"token_budget": 1 << 80}, "token_budget: "),
    ({"chunk_tokens": 3}, "chunk_tokens: expected at least 4, got 3"),
    ({"chunk_tokens": 0}, "chunk_tokens: "),
    ({"max_running": 0}, "max_running: expected at least 1, got 0"),
    ({"partial_prefills": 1}, "partial_prefills: expected at least 2, got 1"),
    ({"lead_share": 1.5}, "lead_share: expected 0 <= share <= 1, got 1.5"),
    ({"lead_share": float("nan")}, "lead_share: "),
    ({"ageing_ns": -5}, "ageing_ns: expected at least 0, got -5"),
    ({"quantum": 0}, "quantum: expected at least 1, got 0"),
    ({"kind_patience": 0}, "kind_patience: expected at least 1, got 0"),
    ({"order": "newest"}, 'order: expected "arrival" or "short-first", got "newest"'),
    ({"order": "short-first", "doubling_ns": 0}, "doubling: expected at least 1, got 0"),
]


@pytest.mark.parametrize(("given", "says"), BAD_SETTINGS)
def test_bad_settings_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        small(small_cache(), **given)
    assert str(caught.value).startswith(says)


BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("arrive", (-1, 8, 9), {}, "request: expected at least 0, got -1"),
    ("arrive", (1, 8, 9), {}, "request: expected a number of no live request, got 1"),
    ("arrive", (2, 0, 9), {}, "tokens: expected 1 <= tokens <= 2147483647, got 0"),
    ("arrive", (2, 1 << 70, 9), {}, "tokens: "),
    ("arrive", (2, 8, 4), {}, "now: expected at least 5, got 4"),
    ("arrive", (2, 8, 9), {"cached": 9}, "cached: expected at most the 8 tokens"),
    ("arrive", (2, 8, 9), {"cached": -1}, "cached: expected at least 0, got -1"),
    ("arrive", (2, 8, 9), {"shared_pages": -1}, "shared_pages: expected at least 0, got -1"),
    ("arrive", (2, 8, 9), {"priority": 1 << 40}, "priority: expected 32 bits"),
    ("arrive", (2, 8, 9), {"kind": -1}, "kind: expected 0 to 2^32 − 1, got -1"),
    ("arrive", (2, 8, 9), {"namespace": "\udc80"}, "text: expected characters"),
    ("plan", (4,), {}, "now: expected at least 5, got 4"),
    ("plan", (9,), {"answered": [1]}, "tokens of request 1: expected one that a plan has asked"),
    ("plan", (9,), {"answered": [-3]}, "request: expected at least 0, got -3"),
    ("plan", (9,), {"answered": np.zeros(2, np.int32)}, "answered: "),
    ("plan", (9,), {"finished": np.zeros((2, 2), np.int64)}, "finished: "),
    ("produced", (1,), {}, "tokens of request 1: expected one that a plan has asked"),
    ("produced", (1, -1), {}, "count: expected at least 0, got -1"),
    ("not_done", (1,), {}, "request 1: expected one of the last plan's"),
    ("set_weight", ("a", 0), {}, "weight: expected at least 1, got 0"),
    ("set_weight", ("a", -1), {}, "weight: expected 1 to 2^32 − 1, got -1"),
    ("cancel", (-1,), {}, "request: expected at least 0, got -1"),
]


@pytest.mark.parametrize(("call", "arguments", "given", "says"), BAD_CALLS)
def test_bad_calls_are_refused_by_name_and_change_nothing(
    call: str, arguments: tuple[Any, ...], given: dict[str, Any], says: str
) -> None:
    scheduler = small(small_cache())
    scheduler.arrive(1, 8, 5)
    before = scheduler.metrics()
    with pytest.raises(InvalidArgument) as caught:
        getattr(scheduler, call)(*arguments, **given)
    assert str(caught.value).startswith(says)
    assert scheduler.metrics() == before
    assert scheduler.plan(5).admitted.tolist() == [[1, 8, 0]]


@pytest.mark.parametrize("bad", [None, "two", 1.5, object()])
def test_what_is_no_number_is_refused_by_name(bad: Any) -> None:
    scheduler = small(small_cache())
    with pytest.raises(InvalidArgument, match="^request: expected a whole number, got"):
        scheduler.arrive(bad, 8, 0)
    with pytest.raises(InvalidArgument, match="^now: expected a whole number, got"):
        scheduler.plan(bad)
    with pytest.raises(TypeError):
        Scheduler(bad)


def test_importing_it_imports_no_framework() -> None:
    code = "import sys, kvweave.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_room_that_is_reserved_is_taken_at_once() -> None:
    cache = small_cache(16)
    scheduler = small(cache)
    with pytest.raises(PoolFull, match="prompt and answer: expected 36 blocks"):
        scheduler.arrive(0, 4, 0, reserve=P * 17)
    assert scheduler.state(0) is None
    # A block has two pages.
    blocks = scheduler.pages_of(4 + 40) // 2
    scheduler.arrive(1, 4, 0, reserve=40)
    scheduler.arrive(2, P * (16 - blocks) + 1, 0)
    plan = scheduler.plan(0)
    assert plan.admitted[:, 0].tolist() == [1]
    assert plan.blocked is not None
    assert scheduler.cancel(1)
    assert scheduler.plan(1).admitted[:, 0].tolist() == [2]

"""Rankings that take effect late on a GPU: pages are brought by a stream beside captured steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from decode_batches import said_in_turns
from families import random_tokens, tiny
from head_maps import near
from host_faults import ASK
from host_memory import both, host_runner, nothing_is_held, spills
from kvweave.runner import Runner
from kvweave.runner.kv.aside import Arrival
from kvweave.runner.kv.host_pool import HostPool
from late_pages import LateArrivals, steps_of
from ranked_pages import FULL, WINDOW, top_k
from versions import needs_cuda

pytestmark = needs_cuda

STEPS = 50
IS_THERE = Arrival.is_there
CYCLES = 20_000_000
KINDS = [
    [top_k(4, 5)],
    [top_k(5, 16), FULL],
    [top_k(4, 5), FULL, top_k(6, 3), WINDOW, top_k(4)],
    [top_k(5, 4, estimate=True)],
]


@pytest.fixture(autouse=True)
def at_home_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """First copies have come over at the second ranking, as on the CPU: answers depend on when."""

    def is_there(arrival: Arrival) -> bool:
        arrival.wait()
        return True

    monkeypatch.setattr(Arrival, "is_there", is_there)


@contextmanager
def slowly() -> Iterator[list[int]]:
    """Has the stream that brings pages begin late, by a kernel that does nothing for a while."""
    fetch, begun = HostPool.fetch_late, list[int]()

    def late(pool: HostPool, *given: Any) -> Any:
        assert pool.late is not None
        begun.append(1)
        pool.late.do(lambda: torch.cuda._sleep(CYCLES))
        return fetch(pool, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPool, "fetch_late", late)
        yield begun


def launched(runner: Runner) -> Runner:
    """A runner whose steps are launched one kernel at a time."""
    assert runner._decoder.graphs is not None
    runner._decoder.graphs.capturable = False
    return runner


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def was_captured(runner: Runner) -> bool:
    graphs = runner._decoder.graphs
    assert graphs is not None
    return graphs.capturable and any(size.graph is not None for size in graphs._sizes.values())


@pytest.mark.parametrize("kinds", KINDS)
def test_it_is_the_definition(kinds: Any) -> None:
    resident, host = both(tiny("llama").cuda(), kinds, host_arrivals="late")
    resident._decoder.graphs = None
    tokens = random_tokens(300, 3)
    wanted, missed = steps_of(resident, tokens, STEPS, defined=True)
    said, _ = steps_of(host, tokens, STEPS)
    for one, other in zip(said, wanted, strict=True):
        near(one, other)
    assert missed > 0
    assert was_captured(host)
    assert spills(host) == len(host.host)
    assert nothing_is_held(host)


@pytest.mark.parametrize("kinds", KINDS)
def test_choices_that_are_read_as_a_whole_are_the_definitions(kinds: Any) -> None:
    """However late pages come: who is given a step all the same waits for its own."""
    resident, host = both(tiny("llama").cuda(), kinds, host_arrivals="whole")
    resident._decoder.graphs = None
    tokens, late = random_tokens(300, 3), LateArrivals()
    wanted, missed = steps_of(resident, tokens, STEPS, defined=True, whole=True)
    said, _ = steps_of(host, tokens, STEPS)
    for one, other in zip(said, wanted, strict=True):
        near(one, other)
    with late.at_work():
        assert same(steps_of(host, tokens, STEPS)[0], said)
    assert late.made > 0
    assert missed > 0
    assert was_captured(host)
    assert nothing_is_held(host)


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_steps_say_what_launched_ones_say_however_late_pages_come(
    kinds: Any, dtype: torch.dtype, copies: str
) -> None:
    model, sizes = tiny("llama").cuda(), {}
    if dtype != torch.float32:
        model, sizes = tiny("llama", head_dim=64).to("cuda", dtype), {"page_tokens": 16}
    how: dict[str, Any] = {"host_arrivals": "late", "host_copies": copies, **sizes}
    tokens, late = random_tokens(300, 3), LateArrivals()
    wanted = steps_of(launched(host_runner(model, kinds, **how)), tokens, STEPS)[0]
    host = host_runner(model, kinds, **how)
    assert same(steps_of(host, tokens, STEPS)[0], wanted)
    assert was_captured(host)
    with slowly() as begun:
        assert same(steps_of(host, tokens, STEPS)[0], wanted)
    assert len(begun) > 1
    with late.at_work():
        wanted = steps_of(launched(host_runner(model, kinds, **how)), tokens, STEPS)[0]
        assert same(steps_of(host, tokens, STEPS)[0], wanted)
    assert late.made
    assert nothing_is_held(host)


@pytest.mark.parametrize("kinds", KINDS)
def test_no_step_waits_and_what_comes_joins(kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the GPU's own events: steps in which pages are on their way are captured too."""
    monkeypatch.setattr(Arrival, "is_there", IS_THERE)
    host = host_runner(tiny("llama").cuda(), kinds, host_arrivals="late")
    tokens = random_tokens(300, 3)
    with slowly() as begun:
        for _ in range(2):
            for logits in steps_of(host, tokens, STEPS)[0]:
                assert logits.isfinite().all()
    assert begun
    assert was_captured(host)
    graphs = host._decoder.graphs
    assert graphs is not None
    joins = [size for size in graphs._sizes.values() if size.form and any(size.form[1])]
    assert bool(joins) != bool(kinds[0].get("estimate"))
    assert nothing_is_held(host)


@pytest.mark.parametrize("layer", [0, 1])
def test_what_comes_within_a_step_joins_the_layers_that_are_left(layer: int) -> None:
    model = tiny("llama").cuda()
    resident, host = both(model, KINDS[0], host_arrivals="late")
    resident._decoder.graphs = None
    launched(host)
    tokens, late = random_tokens(300, 3), LateArrivals()
    within = {11: layer, 12: layer, 18: layer, 22: layer}
    wanted, _ = steps_of(resident, tokens, STEPS, defined=True, waits=True, within=within)
    with late.at_work():
        said, _ = steps_of(host, tokens, STEPS, arrivals=late, within=within)
    for one, other in zip(said, wanted, strict=True):
        near(one, other)
    assert nothing_is_held(host)


@pytest.mark.parametrize("what", ["leaves", "back"])
def test_who_leaves_or_is_brought_back_while_pages_are_on_their_way(what: str) -> None:
    model, happens = tiny("llama").cuda(), dict.fromkeys((11, 12, 23, 37), what)
    runners = both(model, KINDS[0], host_arrivals="late")
    runners[0]._decoder.graphs = None
    tokens = random_tokens(300, 3)
    wanted, _ = steps_of(runners[0], tokens, STEPS, happens, defined=True)
    with slowly():
        said, _ = steps_of(runners[1], tokens, STEPS, happens)
    for one, other in zip(said, wanted, strict=True):
        near(one, other)
    assert nothing_is_held(runners[1])


def test_requests_that_join_in_turns() -> None:
    answers = []
    for slow in (False, True):
        runner = host_runner(tiny("llama").cuda(), KINDS[2], host_arrivals="late", max_tokens=16384)
        with slowly() if slow else nullcontext():
            answers.append(said_in_turns(runner))
        assert nothing_is_held(runner)
    assert answers[0] == answers[1]


def test_who_is_cancelled_while_pages_are_on_their_way_spoils_nobodys() -> None:
    model, kinds, prompt = tiny("llama").cuda(), [top_k(6, 4)], random_tokens(110, 2)
    ample = host_runner(model, kinds, host_arrivals="late")
    alone = ample.generate(prompt, "full", **ASK).tokens
    runner = host_runner(model, kinds, host_arrivals="late", max_tokens=160)
    engine = runner.engine()
    with slowly() as begun:
        first = engine.submit(random_tokens(120, 1), "full", **ASK)
        while not begun:
            engine.must_step()
        engine.cancel(first)
        second = engine.submit(prompt, "full", **ASK)
        engine.run()
    assert first.outcome == "cancelled"
    assert second.result().tokens == alone
    assert nothing_is_held(runner)

"""What an engine carries for its requests: prompts prefilled before, healing, canaries, room."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import pytest

from families import random_tokens, tiny
from healed_answers import reader
from kvweave import InvalidArgument, PoolFull
from kvweave.errors import Cancelled, OutOfMemory
from kvweave.runner import Canary, Engine, EngineRequest, Healing, Runner, Sampling
from small_engines import P, held, runner_of, small

ALWAYS = Healing(every=4, bound=0.0, share=0.1, most=1.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def alone(model: Any) -> Runner:
    return runner_of(model, 256)


# ---- prompts that were prefilled before ---------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=4)])
def test_what_was_prefilled_is_decoded_among_others(
    model: Any, alone: Runner, sampling: Sampling
) -> None:
    runner = runner_of(model)
    prompts = [random_tokens(30 + n, n) for n in range(3)]
    how = {"max_new_tokens": 8, "sampling": sampling}
    with (
        runner.prefill(prompts[0], remember=False) as first,
        runner.prefill(prompts[1], remember=False, reserve_tokens=7) as second,
    ):
        engine = small(runner)
        requests = [engine.submit_prefilled(done, **how) for done in (first, second)]
        requests.append(engine.submit(prompts[2], **how))
        with pytest.raises(InvalidArgument, match="nobody decodes from"):
            engine.submit_prefilled(first)
        engine.run()
        for prompt, request in zip(prompts, requests, strict=True):
            expected = alone.generate(prompt, remember=False, **how)
            assert request.result().tokens == expected.tokens
        assert not first.request.released
        assert first.pending == requests[0].tokens[-1:]
        # They are their caller's again, and go on.
        wanted = alone.generate(prompts[0], max_new_tokens=12, remember=False).tokens
        if sampling.temperature == 0.0:
            assert runner.decode(first, max_new_tokens=2).tokens == wanted[8:10]
            again = engine.submit_prefilled(first, max_new_tokens=2)
            engine.run()
            assert again.result().tokens == wanted[10:]
    assert held(runner) == 0


def test_several_answers_share_the_prompt_that_was_prefilled_once(
    model: Any, alone: Runner
) -> None:
    """In an arena that would not hold the prompt twice; a branch of an answer shares that too."""
    runner, prompt = runner_of(model, 12), random_tokens(100, 7)
    some = [Sampling(0.9, seed=seed) for seed in range(3)]
    how: dict[str, Any] = {"max_new_tokens": 9, "stop": ()}
    with runner.prefill(prompt, "full", remember=False) as done, ExitStack() as stack:
        forks = [stack.enter_context(done.fork()) for _ in some]
        engine = small(runner)
        requests = [
            engine.submit_prefilled(fork, sampling=sampling, **how)
            for fork, sampling in zip(forks, some, strict=True)
        ]
        engine.run()
        for request, sampling in zip(requests, some, strict=True):
            wanted = alone.generate(prompt, "full", sampling=sampling, remember=False, **how)
            assert request.result().tokens == wanted.tokens
        branch = stack.enter_context(forks[0].fork())
        gone_on = [engine.submit_prefilled(one, **how) for one in (forks[0], branch)]
        engine.run()
        assert gone_on[0].result().tokens == gone_on[1].result().tokens
    assert len({tuple(request.tokens) for request in requests}) == len(some)
    assert held(runner) == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelled_it_stays_as_far_as_it_is(model: Any, alone: Runner, steps: int) -> None:
    runner, prompt = runner_of(model), random_tokens(30, 1)
    wanted = alone.generate(prompt, max_new_tokens=9, remember=False).tokens
    with runner.prefill(prompt, remember=False) as done:
        engine = small(runner)
        request = engine.submit_prefilled(done, max_new_tokens=20)
        for _ in range(steps):
            engine.step()
        assert engine.cancel(request)
        assert request.tokens == wanted[:steps]
        assert runner.decode(done, max_new_tokens=9 - steps).tokens == wanted[steps:]
    assert held(runner) == 0


def test_who_is_released_meanwhile_ends_alone(model: Any, alone: Runner) -> None:
    runner, prompts = runner_of(model), [random_tokens(30, n) for n in (1, 2, 3)]
    engine = small(runner)
    gone, never = (runner.prefill(prompt, remember=False) for prompt in prompts[:2])
    requests = [engine.submit_prefilled(gone, max_new_tokens=9)]
    beside = engine.submit(prompts[2], max_new_tokens=9)
    engine.step()
    engine.step()
    requests.append(engine.submit_prefilled(never, max_new_tokens=9))
    gone.release()
    never.release()
    engine.run()
    for request, said in zip(requests, (2, 0), strict=True):
        assert (request.outcome, len(request.tokens)) == ("failed", said)
        with pytest.raises(InvalidArgument, match="released"):
            request.result()
    with pytest.raises(InvalidArgument, match="released"):
        engine.submit_prefilled(gone)
    with pytest.raises(InvalidArgument, match="prefilled prompt"):
        engine.submit_prefilled([1, 2])  # type: ignore[arg-type]
    wanted = alone.generate(prompts[2], max_new_tokens=9, remember=False)
    assert beside.result().tokens == wanted.tokens
    assert held(runner) == 0


def test_without_room_it_pauses_and_keeps_what_it_holds(model: Any, alone: Runner) -> None:
    runner, prompts = runner_of(model, 7), [random_tokens(46, 1), random_tokens(40, 2)]
    engine = small(runner)
    older = engine.submit(prompts[1], "full", max_new_tokens=24, remember=False)
    engine.step()
    engine.step()
    with runner.prefill(prompts[0], remember=False) as done:
        request = engine.submit_prefilled(done, max_new_tokens=30)
        engine.run()
        assert engine.metrics()["preempted"] > 0
        for one, prompt, most in ((older, prompts[1], 24), (request, prompts[0], 30)):
            wanted = alone.generate(prompt, max_new_tokens=most, remember=False)
            assert one.result().tokens == wanted.tokens
        assert request.result().report.resumed == engine.metrics()["preempted"]
        assert older.result().report.resumed == 0
    assert held(runner) == 0


# ---- healing -------------------------------------------------------------------------------------


def test_healed_in_an_engine_as_alone(model: Any) -> None:
    runner, parts = reader(model)
    before, how = held(runner), {"max_new_tokens": 20, "remember": False}
    alone = runner.generate(parts, "naive", healing=ALWAYS, **how)
    plain = runner.generate(random_tokens(40, 77), max_new_tokens=20, remember=False)
    engine = small(runner, token_budget=512, chunk_tokens=256)
    beside = engine.submit(random_tokens(40, 77), **how)
    requests = []
    for _ in range(3):
        requests.append(engine.submit(parts, "naive", healing=ALWAYS, **how))
        engine.step()
    engine.run()
    for request in requests:
        assert request.result().tokens == alone.tokens
        assert request.result().report.healing.healed == alone.report.healing.healed > 0
    assert beside.result().tokens == plain.tokens
    assert held(runner) == before


def test_healed_and_preempted_it_says_every_token_once(model: Any) -> None:
    runner, parts = reader(model, max_tokens=720)
    before, prompt = held(runner), random_tokens(60, 5)
    wanted = runner.generate(prompt, "full", max_new_tokens=60, remember=False).tokens
    engine = small(runner, token_budget=600, chunk_tokens=512)
    older = engine.submit(prompt, "full", max_new_tokens=60, remember=False)
    engine.step()
    healed = engine.submit(parts, "naive", healing=ALWAYS, max_new_tokens=60, remember=False)
    for _ in range(20):
        engine.step()
    assert engine.state(healed) == "decoding"
    report = healed_report(engine, healed)
    # All that is left is taken by somebody else for a while.
    taken = []
    with suppress(PoolFull):
        while True:
            taken.append(runner.cache.admit(random_tokens(P, len(taken)), reuse="none"))
    for _ in range(30):
        engine.step()
    assert engine.metrics()["preempted"] > 0
    for request in taken:
        request.release()
    engine.run()
    assert older.result().tokens == wanted
    assert len(healed.result().tokens) == len(healed.tokens) == 60
    assert healed.result().report.healing.healed >= report
    # Some of the documents had to go.
    assert held(runner) <= before


def healed_report(engine: Engine, request: EngineRequest) -> int:
    """How often a live request was healed so far."""
    answer = engine._live[request.number].answer
    assert answer is not None
    assert answer.watch is not None
    assert answer.watch.report.healed > 0
    return answer.watch.report.healed


def test_what_others_may_find_is_not_healed(model: Any) -> None:
    runner, parts = reader(model)
    with runner.prefill(parts, "naive") as done:
        engine = small(runner)
        request = engine.submit_prefilled(done, healing=ALWAYS)
        engine.run()
        with pytest.raises(InvalidArgument, match="healing"):
            request.result()


# ---- canaries ------------------------------------------------------------------------------------


def test_a_canary_looks_on_in_an_engine(model: Any) -> None:
    runner, parts = reader(model, canary=Canary(share=1.0, bound=1e-9, window=2, level=0.5))
    before = held(runner)
    engine = small(runner, token_budget=512, chunk_tokens=256)
    reports = []
    for _ in range(4):
        request = engine.submit(parts, "naive", max_new_tokens=2, remember=False)
        engine.run()
        reports.append(request.result().report)
    state = runner.canary.state
    assert state.checked == sum(report.canary is not None for report in reports) > 0
    assert state.policies["naive"].drifted
    assert reports[-1].policy == "full"
    assert "drifted" in reports[-1].mode_reason
    assert held(runner) == before


# ---- room ----------------------------------------------------------------------------------------


def test_with_reserve_nobody_gives_way(model: Any, alone: Runner) -> None:
    runner = runner_of(model, 9)
    prompts = [random_tokens(40, seed) for seed in (11, 12, 13)]
    engine = small(runner, token_budget=128, chunk_tokens=64)
    with pytest.raises(PoolFull, match="prompt and answer"):
        engine.submit(prompts[0], max_new_tokens=150, reserve=True)
    requests = [
        engine.submit(p, "full", max_new_tokens=40, remember=False, reserve=True) for p in prompts
    ]
    engine.run()
    assert engine.metrics()["preempted"] == 0
    for prompt, request in zip(prompts, requests, strict=True):
        expected = alone.generate(prompt, "full", max_new_tokens=40, remember=False)
        assert request.result().tokens == expected.tokens
    # So does a batch of the runner's own, whose prompts do not fit at once.
    batch = runner.generate_batch(prompts, "full", max_new_tokens=40, remember=False)
    assert [one.tokens for one in batch] == [request.tokens for request in requests]
    assert held(runner) == 0


def test_cancelled_while_it_has_given_way(model: Any, alone: Runner) -> None:
    runner = runner_of(model, 9)
    engine = small(runner, token_budget=128, chunk_tokens=64)
    prompts = [random_tokens(40, seed) for seed in (11, 12)]
    requests = [engine.submit(p, "full", max_new_tokens=60, remember=False) for p in prompts]
    while not engine.metrics()["preempted"]:
        engine.step()
    given_way = [one for one in requests if engine.state(one) == "waiting"]
    assert given_way == requests[1:]
    said = requests[1].tokens
    assert said
    assert engine.cancel(requests[1])
    engine.run()
    with pytest.raises(Cancelled):
        requests[1].result()
    assert requests[1].tokens == said
    expected = alone.generate(prompts[0], "full", max_new_tokens=60, remember=False)
    assert requests[0].result().tokens == expected.tokens
    assert held(runner) == 0


@pytest.mark.parametrize("at", [1, 2, 9])
def test_no_room_at_any_point_harms_nobody(
    model: Any, alone: Runner, monkeypatch: Any, at: int
) -> None:
    """The cache refuses a step or an admission that the plan had promised room for."""
    runner = runner_of(model, 64)
    engine, calls = small(runner), []
    admit, step = runner.cache.admit, runner._decoder.step

    def refused(call: Any) -> Any:
        def sometimes(*given: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) % 10 == at:
                error = PoolFull("expected 1 block, got 0")
                error.request = 0
                raise error
            return call(*given, **options)

        return sometimes

    class Cache:
        def __init__(self) -> None:
            self.admit = refused(admit)

        def __getattr__(self, name: str) -> Any:
            return getattr(runner.cache, name)

    monkeypatch.setattr(runner._prefiller, "cache", Cache())
    monkeypatch.setattr(runner._decoder, "step", refused(step))
    prompts = [random_tokens(30 + 9 * seed, seed) for seed in range(4)]
    requests = [engine.submit(p, "full", max_new_tokens=9, remember=False) for p in prompts]
    engine.run()
    monkeypatch.undo()
    assert len(calls) > 10
    for prompt, request in zip(prompts, requests, strict=True):
        if request.outcome == "failed":
            # It was the last that went on, so there was nobody to wait for.
            with pytest.raises(PoolFull):
                request.result()
            continue
        expected = alone.generate(prompt, "full", max_new_tokens=9, remember=False)
        assert request.result().tokens == expected.tokens
    assert sum(request.outcome == "finished" for request in requests) >= 2
    assert held(runner) == 0


def test_memory_that_runs_out_ends_who_needed_it(model: Any, alone: Runner) -> None:
    runner, failing = runner_of(model), [False]

    def fail(*_: object) -> None:
        if failing[0]:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")

    hook = model.model.layers[-1].mlp.register_forward_pre_hook(fail)
    try:
        engine = small(runner)
        bad = engine.submit(random_tokens(20, 1), max_new_tokens=9)
        engine.step()
        failing[0] = True
        engine.step()
        failing[0] = False
        after = engine.submit(random_tokens(20, 2), max_new_tokens=5)
        engine.run()
    finally:
        hook.remove()
    with pytest.raises(OutOfMemory):
        bad.result()
    expected = alone.generate(random_tokens(20, 2), max_new_tokens=5, remember=False)
    assert after.result().tokens == expected.tokens
    assert held(runner) == 0

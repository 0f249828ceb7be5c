"""The engine: each request says what it says alone, whoever else comes, goes and fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import VOCABULARY, random_tokens, tiny
from kvweave import InvalidArgument, PoolFull
from kvweave.errors import AlreadyStepping, Cancelled, KvweaveError
from kvweave.plan import LayerPlan, PromptView
from kvweave.runner import EngineRequest, Runner, Sampling
from plan_policies import Planned
from small_engines import P, held, runner_of, small


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def alone(model: Any) -> Runner:
    """A runner with all the room that it wants, which answers one request at a time."""
    return runner_of(model, 256)


def test_one_request_says_what_it_says_alone(model: Any, alone: Runner) -> None:
    runner = runner_of(model)
    engine = small(runner)
    prompt = random_tokens(70, 1)
    request = engine.submit(prompt, max_new_tokens=9)
    assert engine.state(request) == "waiting"
    with pytest.raises(KvweaveError, match="goes on"):
        request.result()
    engine.run()
    expected = alone.generate(prompt, max_new_tokens=9, remember=False)
    assert request.result().tokens == request.tokens == expected.tokens
    assert [one.token for one in request.take()] == expected.tokens
    assert request.take() == []
    assert (engine.state(request), request.wait(0)) == ("finished", True)
    assert request.result().report.tokens == 70
    assert held(runner) == 0
    assert not engine.step()


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 90),
        st.integers(1, 12),
        st.sampled_from([0.0, 0.9]),
        st.integers(-1, 1),
        st.integers(0, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(REQUESTS, st.integers(8, 24), st.data())
def test_whoever_comes_goes_and_gives_way(
    model: Any, alone: Runner, requests: list[Any], blocks: int, data: st.DataObject
) -> None:
    runner = runner_of(model, blocks)
    engine = small(runner)
    wanted: list[tuple[EngineRequest, list[int]]] = []
    for seed, (length, limit, temperature, priority, steps, remember) in enumerate(requests):
        prompt, sampling = random_tokens(length, seed % 3), Sampling(temperature, seed=seed)
        options = {"max_new_tokens": limit, "sampling": sampling}
        expected = alone.generate(prompt, "full", remember=False, **options).tokens
        handle = engine.submit(prompt, "prefix", priority=priority, remember=remember, **options)
        wanted.append((handle, expected))
        for _ in range(steps):
            engine.step()
        if data.draw(st.booleans(), "cancels"):
            engine.cancel(wanted[data.draw(st.integers(0, seed), "whom")][0])
    engine.run()
    assert engine.live == 0
    for handle, expected in wanted:
        if handle.outcome == "cancelled":
            assert handle.tokens == expected[: len(handle.tokens)]
            with pytest.raises(Cancelled):
                handle.result()
        else:
            assert handle.result().tokens == [one.token for one in handle.take()] == expected
    assert held(runner) == 0


def test_who_gives_way_says_no_token_twice(model: Any, alone: Runner) -> None:
    runner = runner_of(model, 9)
    engine = small(runner, token_budget=128, chunk_tokens=64)
    prompts = [random_tokens(40, seed) for seed in (11, 12)]
    requests = [
        engine.submit(p, "full", max_new_tokens=60, remember=False, sampling=Sampling(0.8, seed=5))
        for p in prompts
    ]
    engine.run()
    assert engine.metrics()["preempted"] > 0
    for prompt, request in zip(prompts, requests, strict=True):
        expected = alone.generate(
            prompt, "full", max_new_tokens=60, remember=False, sampling=Sampling(0.8, seed=5)
        )
        assert request.result().tokens == expected.tokens
    assert held(runner) == 0


def test_a_long_prompt_stops_no_decode(model: Any) -> None:
    runner = runner_of(model)
    engine = small(runner)
    talker = engine.submit(random_tokens(8, 1), max_new_tokens=40)
    engine.step()
    long = engine.submit(random_tokens(320, 2), "full", max_new_tokens=1)
    steps = 0
    while not long.ended:
        said = len(talker.tokens)
        engine.step()
        steps += 1
        assert len(talker.tokens) == said + 1
    assert steps == 10
    engine.close()
    assert held(runner) == 0


def test_the_urgent_go_first(model: Any) -> None:
    engine = small(runner_of(model), max_running=1)
    late = engine.submit(random_tokens(20, 1), max_new_tokens=2)
    urgent = engine.submit(random_tokens(20, 2), max_new_tokens=2, priority=5)
    while not urgent.ended:
        engine.step()
    assert late.tokens == []
    engine.run()
    assert late.outcome == "finished"


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "finished"])
def test_cancelled_in_every_state(model: Any, alone: Runner, state: str) -> None:
    runner = runner_of(model)
    engine = small(runner)
    beside = engine.submit(random_tokens(20, 3), max_new_tokens=8)
    request = engine.submit(random_tokens(100, 4), max_new_tokens=4)
    while engine.state(request) != state:
        engine.step()
    assert engine.cancel(request) is (state != "finished")
    assert not engine.cancel(request)
    said = request.tokens
    engine.run()
    assert request.tokens == said
    expected = alone.generate(random_tokens(20, 3), max_new_tokens=8, remember=False)
    assert beside.result().tokens == expected.tokens
    assert held(runner) == 0


@dataclass
class Broken(Planned):
    """A policy that goes wrong in one layer: it raises, or leaves the layer out."""

    skips: bool = False
    reuse: str = "prefix"

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, Any, None]:
        for plan in super().plan(prompt):
            if plan.layer == 2:
                if not self.skips:
                    raise ArithmeticError("a policy's own")
                continue
            yield plan


@dataclass(frozen=True)
class BrokenSampling(Sampling):
    """Chooses nothing, or what is no token, from its third token on."""

    raises: bool = True

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        generator.manual_seed(generator.initial_seed() + 1)
        if generator.initial_seed() < 3:
            return logits.argmax()
        if self.raises:
            raise ArithmeticError("a sampling's own")
        return torch.tensor(VOCABULARY)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"policy": Broken()}, ArithmeticError, 0),
        ({"policy": Broken(measures=True)}, ArithmeticError, 0),
        ({"policy": Broken(skips=True)}, InvalidArgument, 0),
        ({"policy": Broken(skips=True, measures=True)}, InvalidArgument, 0),
        ({"sampling": BrokenSampling()}, ArithmeticError, 2),
        ({"sampling": BrokenSampling(raises=False)}, InvalidArgument, 2),
    ],
)
def test_who_raises_ends_alone(
    model: Any, alone: Runner, given: Any, error: type[Exception], said: int
) -> None:
    runner = runner_of(model)
    engine = small(runner)
    beside = [engine.submit(random_tokens(20, n), max_new_tokens=8) for n in (5, 6)]
    engine.step()
    bad = engine.submit(random_tokens(60, 7), max_new_tokens=8, **given)
    engine.run()
    assert bad.outcome == "failed"
    assert len(bad.tokens) == said
    with pytest.raises(error):
        bad.result()
    for seed, request in zip((5, 6), beside, strict=True):
        expected = alone.generate(random_tokens(20, seed), max_new_tokens=8, remember=False)
        assert request.result().tokens == expected.tokens
    assert held(runner) == 0


def test_what_cannot_be_is_refused_at_once(model: Any) -> None:
    runner = runner_of(model, 8)
    engine = small(runner)
    with pytest.raises(PoolFull):
        engine.submit(random_tokens(9 * P + 1, 1))
    for options in (
        {"max_new_tokens": 0},
        {"sampling": 3},
        {"stop": [VOCABULARY]},
        {"priority": 1.5},
    ):
        with pytest.raises(InvalidArgument):
            engine.submit([1, 2], **options)
    with pytest.raises(InvalidArgument):
        engine.submit([])
    with pytest.raises(InvalidArgument, match="request of this engine"):
        engine.cancel("no request")  # type: ignore[arg-type]
    assert (engine.live, engine.step()) == (0, False)
    other = small(runner_of(model))
    mine, theirs = engine.submit([1, 2]), other.submit([1, 2])
    with pytest.raises(InvalidArgument, match="request of this engine"):
        engine.cancel(theirs)
    assert engine.state(mine) == "waiting"


def test_an_answer_that_outgrows_the_arena_ends_alone(model: Any) -> None:
    runner = runner_of(model, 8)
    engine = small(runner)
    request = engine.submit(random_tokens(100, 1), max_new_tokens=100)
    small_one = engine.submit(random_tokens(10, 2), max_new_tokens=3)
    engine.run()
    assert request.outcome == "failed"
    with pytest.raises(PoolFull):
        request.result()
    assert len(small_one.result().tokens) == 3
    assert held(runner) == 0


def test_others_take_the_room_in_mid_step(model: Any, alone: Runner) -> None:
    runner = runner_of(model, 12)
    engine = small(runner)
    requests = [
        engine.submit(random_tokens(30, n), max_new_tokens=30, remember=False) for n in (1, 2)
    ]
    while not all(request.tokens for request in requests):
        engine.step()
    with runner.prefill(random_tokens(96, 9), "full", remember=False):
        for _ in range(20):
            engine.step()
    engine.run()
    for seed, request in zip((1, 2), requests, strict=True):
        expected = alone.generate(random_tokens(30, seed), max_new_tokens=30, remember=False)
        assert request.result().tokens == expected.tokens
    assert held(runner) == 0


def test_who_comes_while_others_are_looked_at_is_not_among_them(model: Any) -> None:
    """As happens where a step finds no room, and another thread submits."""
    engine, seen = small(runner_of(model)), []
    for number in range(2):
        engine.submit(random_tokens(9, number), max_new_tokens=2)
    for live in engine._all_live():
        seen.append(live.handle.number)
        engine.submit(random_tokens(9, 5), max_new_tokens=2)
    assert (seen, engine.live) == ([0, 1], 4)
    engine.run()


@dataclass
class Meddling(Planned):
    """Every row in every layer, and something else in the midst of its prefill."""

    does: Callable[[], Any] = lambda: None
    reuse: str = "prefix"
    measures: bool = True

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, Any, None]:
        self.does()
        return super().plan(prompt)


def test_one_step_at_a_time(model: Any) -> None:
    engine = small(runner_of(model))
    caught: list[BaseException] = []

    def steps() -> None:
        try:
            engine.step()
        except AlreadyStepping as error:
            caught.append(error)

    def in_two_threads() -> None:
        steps()
        other = threading.Thread(target=steps)
        other.start()
        other.join()

    request = engine.submit(random_tokens(9, 1), Meddling(does=in_two_threads), max_new_tokens=2)
    engine.run()
    assert len(caught) == 2
    assert len(request.result().tokens) == 2


def test_cancelled_in_the_midst_of_a_step(model: Any) -> None:
    runner = runner_of(model)
    engine = small(runner)
    requests: list[EngineRequest] = []

    def cancels_both() -> None:
        other = threading.Thread(target=lambda: [engine.cancel(one) for one in requests])
        other.start()
        other.join()

    requests.append(engine.submit(random_tokens(9, 1), max_new_tokens=5))
    engine.step()
    requests.append(
        engine.submit(random_tokens(9, 2), Meddling(does=cancels_both), max_new_tokens=5)
    )
    engine.step()
    assert [one.outcome for one in requests] == ["cancelled", "cancelled"]
    assert [len(one.tokens) for one in requests] == [1, 0]
    assert (engine.live, held(runner)) == (0, 0)


def test_cancelled_while_a_step_looks_up_who_decodes(
    model: Any, alone: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was planned for the others is carried out: nobody else would ever go on with them."""
    runner, prompts = runner_of(model), [random_tokens(20 + n, n) for n in range(3)]
    engine = small(runner)
    requests = [engine.submit(prompt, "full", max_new_tokens=12, stop=()) for prompt in prompts]
    while len(requests[2].tokens) < 3:
        engine.step()
    equal = np.array_equal

    def interrupted(one: Any, other: Any) -> bool:
        found = equal(one, other)
        engine.cancel(requests[1])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(np, "array_equal", interrupted)
        engine.step()
    engine.run()
    assert requests[1].outcome == "cancelled"
    for at in (0, 2):
        wanted = alone.generate(prompts[at], "full", max_new_tokens=12, stop=()).tokens
        assert requests[at].result().tokens == wanted
    assert held(runner) == 0


def test_many_threads_submit_and_cancel(model: Any, alone: Runner) -> None:
    runner = runner_of(model, 24)
    engine = small(runner)
    prompts = [random_tokens(30, seed) for seed in range(4)]
    kept: list[tuple[int, EngineRequest]] = []

    def comes_and_goes(seed: int) -> None:
        for turn in range(4):
            handle = engine.submit(prompts[seed], max_new_tokens=5)
            if turn % 2:
                engine.cancel(handle)
            else:
                kept.append((seed, handle))

    threads = [threading.Thread(target=comes_and_goes, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.live:
        engine.step()
    for thread in threads:
        thread.join()
    expected = [alone.generate(p, max_new_tokens=5, remember=False).tokens for p in prompts]
    assert len(kept) == 8
    for seed, handle in kept:
        assert handle.result().tokens == expected[seed]
    assert held(runner) == 0


def test_streams_are_the_texts_of_answers(smollm2: Any) -> None:
    model, tokenizer = smollm2
    runner = Runner(model, tokenizer, max_tokens=1024, check=False, progress=False)
    texts = ["The capital of France is", "Once upon a time, there was a little"]
    expected = [runner.generate(text, max_new_tokens=10, remember=False) for text in texts]
    engine = runner.engine(chunk_tokens=16, token_budget=72, max_running=8)
    requests = [engine.submit(text, max_new_tokens=10, streamed=True) for text in texts]
    engine.run()
    for request, alone in zip(requests, expected, strict=True):
        assert request.result().text == alone.text
        assert "".join(one.text for one in request.take()) == alone.text
        assert request.result().tokens == alone.tokens
    assert held(runner) == 0


def test_reused_segments_by_policies_that_measure(model: Any) -> None:
    runner, other = runner_of(model), runner_of(model)
    document = random_tokens(64, 20)
    for one in (runner, other):
        one.insert(document.tolist(), "document")
    before = held(runner)
    prompt = np.concatenate((random_tokens(5, 21), document, random_tokens(9, 22)))
    for policy in ("naive", "epic", "cacheblend", "foresight"):
        engine = small(runner)
        options = {"max_new_tokens": 6, "discover": True, "remember": False}
        requests = [engine.submit(prompt, policy, **options) for _ in range(2)]
        engine.run()
        expected = other.generate(prompt, policy, **options)
        assert [one.result().tokens for one in requests] == [expected.tokens] * 2
        assert requests[0].result().report.reused_segment == expected.report.reused_segment > 0
    assert held(runner) == before


@pytest.mark.parametrize("family", ["llama-dynamic", "qwen2-sliding"])
def test_other_frequencies_and_windows(family: str) -> None:
    other = tiny(family)
    runner, by_itself = runner_of(other, 64), runner_of(other, 64)
    engine = small(runner)
    lengths = (20, 80, 100, 20)
    requests = [
        engine.submit(random_tokens(n, n), "full", max_new_tokens=6, remember=False)
        for n in lengths
    ]
    engine.run()
    for length, request in zip(lengths, requests, strict=True):
        expected = by_itself.generate(
            random_tokens(length, length), "full", max_new_tokens=6, remember=False
        )
        assert request.result().tokens == expected.tokens
    assert held(runner) == 0


@pytest.mark.parametrize("policy", ["naive", "cacheblend"])
def test_who_approximates_and_gives_way_goes_on_as_before(model: Any, policy: str) -> None:
    document = random_tokens(48, 30).tolist()
    runner, by_itself = runner_of(model, 12), runner_of(model, 64)
    for one in (runner, by_itself):
        one.insert(document, "document")
    before = held(runner)
    engine = small(runner, token_budget=128, chunk_tokens=64)
    options: dict[str, Any] = {"max_new_tokens": 50, "discover": True, "remember": False}
    prompts = [[*random_tokens(4, seed), *document, 7] for seed in (31, 32)]
    # Whoever holds the document keeps it from giving way to the answers.
    with runner.prefill([*document, 1], "prefix", remember=False):
        requests = [engine.submit(prompt, policy, **options) for prompt in prompts]
        engine.run()
    assert engine.metrics()["preempted"] > 0
    assert runner.cache.stats()["frozen_absent"] == 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.result().tokens == by_itself.generate(prompt, policy, **options).tokens
    assert held(runner) == before

"""Servers: callers of any thread or event loop are answered as alone, and one thread computes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import random_tokens, tiny
from kvweave import InvalidArgument, PoolFull
from kvweave.errors import AlreadyStepping, Cancelled
from kvweave.runner import AsyncRunner, Engine, Runner, Sampling
from kvweave.runner.one_thread import OneThread
from small_engines import SMALL, held, runner_of


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def alone(model: Any) -> Callable[..., list[int]]:
    """What a runner with all the room that it wants says, one request at a time."""
    runner = runner_of(model, 256)
    return lambda prompt, **how: runner.generate(prompt, remember=False, **how).tokens


def soon(says: Callable[[], bool]) -> bool:
    """Whether something comes true within a time that is long for these models."""
    end = time.monotonic() + 20
    while not says() and time.monotonic() < end:
        time.sleep(0.002)
    return says()


# ---- threads ------------------------------------------------------------------------------


def test_threads_are_answered_as_alone(model: Any, alone: Any) -> None:
    runner, said = runner_of(model, 24), {}
    prompts = [random_tokens(20 + 11 * n, n) for n in range(4)]

    with runner.serve(**SMALL) as server:

        def ask(seed: int) -> None:
            with server.submit(prompts[seed], max_new_tokens=6) as streamed:
                said[seed, "streamed"] = [token.token for token in streamed]
            kept = server.submit(prompts[seed], max_new_tokens=6, sampling=Sampling(0.9, seed=seed))
            said[seed, "kept"] = kept.result(60).tokens

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.live == 0
        assert server.metrics()["arrived"] == 8
    for seed, prompt in enumerate(prompts):
        assert said[seed, "streamed"] == alone(prompt, max_new_tokens=6)
        sampled = alone(prompt, max_new_tokens=6, sampling=Sampling(0.9, seed=seed))
        assert said[seed, "kept"] == sampled
    assert held(runner) == 0


def test_texts_are_streamed(smollm2: Any) -> None:
    runner = Runner(*smollm2, max_tokens=512, check=False, progress=False)
    prompt = "The capital of France is"
    wanted = runner.generate(prompt, max_new_tokens=8, remember=False)
    with runner.serve() as server, server.submit(prompt, max_new_tokens=8) as answer:
        assert "".join(token.text for token in answer) == wanted.text
        assert answer.result().text == wanted.text
        assert (answer.outcome, answer.tokens) == ("finished", wanted.tokens)


def test_who_stops_reading_stops_nobody(model: Any, alone: Any) -> None:
    runner = runner_of(model)
    prompts = [random_tokens(30, seed) for seed in range(3)]
    with runner.serve(**SMALL) as server:
        forgotten = server.submit(prompts[0], max_new_tokens=30)
        bounded = server.submit(prompts[1], max_new_tokens=30, unread=4)
        others = [server.submit(prompts[2], max_new_tokens=20, unread=4) for _ in range(2)]
        read: list[list[int]] = [[], []]
        while any(other.outcome is None for other in others):
            for tokens, other in zip(read, others, strict=True):
                tokens += [token.token for token in other.take()]
        for tokens, other in zip(read, others, strict=True):
            tokens += [token.token for token in other.take()]
            assert other.outcome in ("finished", "cancelled")
            assert tokens == alone(prompts[2], max_new_tokens=20)[: len(tokens)]
        with pytest.raises(Cancelled, match="at most 4 tokens behind, got 5"):
            bounded.result(60)
        assert bounded.outcome == "cancelled"
        assert bounded.tokens == alone(prompts[1], max_new_tokens=30)[:5]
        # Nobody has read a token of it, and all of them wait.
        whole = forgotten.result(60).tokens
        assert whole == alone(prompts[0], max_new_tokens=30)
        assert [token.token for token in forgotten] == whole
    assert held(runner) == 0


def test_one_thread_computes(model: Any, alone: Any) -> None:
    runner, prompt = runner_of(model), random_tokens(20, 1)
    done = runner.prefill(prompt, remember=False)
    with runner.serve(**SMALL) as server:
        for call in (
            lambda: runner.prefill(prompt),
            lambda: runner.generate(prompt),
            lambda: next(iter(runner.stream(prompt))),
            lambda: runner.insert(prompt.tolist(), "a"),
            lambda: runner.extend(done, [1]),
            lambda: runner.decode(done),
            lambda: runner.export(done),
            lambda: runner.engine().step(),
            lambda: runner.serve(),
            lambda: runner.conversation().ask(prompt),
        ):
            with pytest.raises(AlreadyStepping, match="another does"):
                call()
        # What does not compute is for any thread.
        assert runner.segments() == []
        assert len(runner.tokenize(prompt).tokens) == 20
        # What does is made in the server's.
        document = random_tokens(40, 9).tolist()
        server.call(lambda: runner.insert(document, "a"))
        assert [segment.name for segment in runner.segments()] == ["a"]
        found = server.submit([*document, 1], max_new_tokens=3, discover=True).result(60)
        assert found.report.reused_segment + found.report.reused_prefix >= 32
        nested = server.call(lambda: server.call(lambda: runner.generate(prompt, max_new_tokens=4)))
        assert nested.tokens == alone(prompt, max_new_tokens=4)
        with pytest.raises(ZeroDivisionError):
            server.call(lambda: 1 // 0)
        served = server.submit_prefilled(done, max_new_tokens=4).result(60)
    assert served.tokens == alone(prompt, max_new_tokens=4)
    assert runner.decode(done, max_new_tokens=3).tokens == alone(prompt, max_new_tokens=7)[4:]
    done.release()
    runner.delete("a")
    assert held(runner) == 0


def test_what_is_closed_is_cancelled(model: Any, alone: Any) -> None:
    runner = runner_of(model, 512)
    server = runner.serve(**SMALL)
    requests = [server.submit(random_tokens(300, seed), max_new_tokens=4000) for seed in range(3)]
    assert soon(lambda: bool(requests[0].tokens))
    with pytest.raises(TimeoutError):
        requests[0].result(0.01)
    server.close()
    server.close()
    for request in requests:
        with pytest.raises(Cancelled):
            request.result(0)
        with pytest.raises(Cancelled):
            list(request)
        assert not request.cancel()
    for call in (
        lambda: server.submit([1]),
        lambda: server.call(int),
        lambda: server.submit_prefilled(runner.prefill([1])),
    ):
        with pytest.raises(InvalidArgument, match="closed"):
            call()
    prompt = random_tokens(9, 4)
    assert runner.generate(prompt, max_new_tokens=3).tokens == alone(prompt, max_new_tokens=3)


def test_what_ends_the_thread_ends_every_request(model: Any, monkeypatch: Any) -> None:
    runner = runner_of(model)
    server = runner.serve(**SMALL)

    def fails(_: Engine) -> bool:
        raise ArithmeticError("the engine's own")

    monkeypatch.setattr(Engine, "step", fails)
    request = server.submit([1, 2], max_new_tokens=3)
    with pytest.raises(ArithmeticError):
        request.result(60)
    assert soon(lambda: not server._thread.is_alive())
    with pytest.raises(InvalidArgument, match="closed"):
        server.submit([1, 2])
    with pytest.raises(ArithmeticError):
        server.close()
    server.close()
    assert held(runner) == 0


def test_room_that_others_hold_is_waited_for(model: Any, alone: Any) -> None:
    runner, prompt = runner_of(model, 8), random_tokens(40, 3)
    holds = runner.prefill(random_tokens(110, 1), remember=False)
    with runner.serve(**SMALL) as server:
        request = server.submit(prompt, max_new_tokens=4)
        with pytest.raises(TimeoutError):
            request.result(0.1)
        assert request.state == "waiting"
        holds.release()
        assert request.result(60).tokens == alone(prompt, max_new_tokens=4)
        with pytest.raises(PoolFull):
            server.submit(random_tokens(200, 1))
    assert held(runner) == 0


def test_callers_of_two_threads_are_answered_or_refused(model: Any, alone: Any) -> None:
    runner, prompts = runner_of(model), [random_tokens(60, seed) for seed in range(3)]
    wanted = [alone(prompt, max_new_tokens=5) for prompt in prompts]
    outcomes: list[bool] = []
    together = threading.Barrier(3)

    def asks(seed: int) -> None:
        together.wait()
        for _ in range(6):
            try:
                said = runner.generate(prompts[seed], max_new_tokens=5, remember=False).tokens
            except AlreadyStepping:
                outcomes.append(False)
            else:
                assert said == wanted[seed]
                outcomes.append(True)

    threads = [threading.Thread(target=asks, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 18
    assert any(outcomes)
    assert held(runner) == 0


@given(st.lists(st.sampled_from(["enter", "exit", "soon"]), max_size=30))
@settings(max_examples=60)
def test_what_is_left_is_done_once_and_outside(events: list[str]) -> None:
    one, depth, left, done = OneThread(), 0, 0, []
    for event in events:
        if event == "enter":
            one.__enter__()
            depth += 1
        elif event == "exit" and depth:
            depth -= 1
            one.__exit__(None, None, None)
        elif event == "soon":
            left += 1
            one.soon(lambda: done.append(1))
        if not depth:
            assert len(done) == left
        elif event == "soon":
            assert len(done) < left
    while depth:
        depth -= 1
        one.__exit__(None, None, None)
    assert len(done) == left


def test_who_computes_waits_for_what_another_thread_clears() -> None:
    one, begun, go_on, done = OneThread(), threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        go_on.wait(10)
        done.append("cleared")

    clears = threading.Thread(target=one.soon, args=(work,))
    clears.start()
    begun.wait(10)
    # While one thread clears, others leave their work to it and go.
    one.soon(lambda: done.append("left"))
    assert done == []
    threading.Timer(0.05, go_on.set).start()
    with one:
        assert done == ["cleared", "left"]
    clears.join()


# ---- event loops ----------------------------------------------------------------------------


def test_tasks_are_answered_as_alone(model: Any, alone: Any) -> None:
    runner = runner_of(model, 24)
    prompts = [random_tokens(20 + 9 * n, n) for n in range(6)]

    async def streamed(served: AsyncRunner, prompt: Any) -> list[int]:
        return [one.token async for one in served.stream(prompt, max_new_tokens=6)]

    async def asks() -> list[list[int]]:
        async with AsyncRunner(runner, **SMALL) as served:
            answers = [served.generate(prompt, max_new_tokens=6) for prompt in prompts]
            streams = [streamed(served, prompt) for prompt in prompts]
            made, said = await asyncio.gather(asyncio.gather(*answers), asyncio.gather(*streams))
            assert served.metrics()["arrived"] == 12
            assert await served.call(lambda: 7) == 7
            return [*(one.tokens for one in made), *said]

    wanted = [alone(prompt, max_new_tokens=6) for prompt in prompts]
    assert asyncio.run(asks()) == wanted * 2
    assert held(runner) == 0


@dataclass(frozen=True)
class Raising(Sampling):
    """Chooses nothing."""

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        raise ArithmeticError("a sampling's own")


def test_a_task_that_is_cancelled_cancels_its_request(model: Any, alone: Any) -> None:
    runner, prompt = runner_of(model, 512), random_tokens(30, 1)
    endless = {"max_new_tokens": 5000}

    async def reads(served: AsyncRunner) -> None:
        async for _ in served.stream(prompt, **endless):
            pass

    async def asks() -> None:
        async with AsyncRunner(runner, **SMALL) as served:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(served.generate(prompt, **endless), 0.2)
            task = asyncio.create_task(reads(served))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # One that is cancelled before it has been submitted.
            task = asyncio.create_task(reads(served))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = served.stream(prompt, **endless)
            first = await stream.__anext__()
            await stream.aclose()
            with pytest.raises(ArithmeticError):
                await served.generate(prompt, sampling=Raising(0.5))
            with pytest.raises(InvalidArgument):
                await served.generate(prompt, max_new_tokens=0)
            while served._server.live:
                await asyncio.sleep(0.01)
            assert first.token == alone(prompt, max_new_tokens=1)[0]
            said = await served.generate(prompt, max_new_tokens=5)
            assert said.tokens == alone(prompt, max_new_tokens=5)
        with pytest.raises(InvalidArgument, match="closed"):
            await served.generate(prompt)

    asyncio.run(asks())
    assert held(runner) == 0


def test_a_server_says_which_of_its_numbers_is_none(model: Any) -> None:
    runner = runner_of(model)
    for name in ("token_budget", "chunk_tokens", "max_running"):
        for wrong in ("8192", 4096.0, True):
            with pytest.raises(InvalidArgument, match=f"{name}: expected a whole number, got"):
                runner.serve(**{name: wrong})
    with pytest.raises(InvalidArgument, match="runner: expected a Runner, got 'smollm2'"):
        AsyncRunner("smollm2")  # type: ignore[arg-type]


def test_one_loop_alone(model: Any) -> None:
    served = AsyncRunner(runner_of(model), **SMALL)

    async def asks() -> int:
        return len((await served.generate([1, 2], max_new_tokens=2)).tokens)

    assert asyncio.run(asks()) == 2
    with pytest.raises(InvalidArgument, match="one event loop"):
        asyncio.run(asks())
    asyncio.run(served.close())

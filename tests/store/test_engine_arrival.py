"""Documents in pinned memory that are copied while an engine computes a prompt's first chunk.

On the CPU copies are made at once: here they are made when somebody waits for them, as late as a
GPU may make them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from families import random_tokens, tiny
from kvweave import Runner, Segment
from kvweave.runner import Engine, EngineRequest
from small_engines import held
from tiered_runners import LAST, evict, prompt_of, tiered
from versions import needs_cuda

LETTER, MANUAL = random_tokens(90, 5).tolist(), random_tokens(70, 8).tolist()
OTHER = random_tokens(50, 3).tolist()
LAYERS = 4
POLICIES = ("naive", "cacheblend", "sparsex")
HOW: dict[str, Any] = {"max_new_tokens": 8, "stop": (), "remember": False}


class MadeLate:
    """A copy that is made when somebody waits for it; takes the place of an `Aside`."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened
        self.left = 0

    def do(self, work: Callable[[], None]) -> Any:
        self.left += 1
        return _Copy(self, work, self._happened)


class _Copy:
    event = None

    def __init__(self, of: MadeLate, work: Callable[[], None], happened: list[str]) -> None:
        self._of, self._work, self._happened = of, work, happened

    def wait(self) -> None:
        self._of.left -= 1
        self._happened.append("copied")
        self._work()


def with_documents(model: Any, **more: Any) -> tuple[Runner, MadeLate, list[str]]:
    """A runner whose documents lie in pinned memory alone, and what happens there, in order."""
    runner = tiered(model, document_bytes=1 << 22, **more)
    assert runner.tiers is not None
    assert runner.tiers.host is not None
    for text in (LETTER, MANUAL):
        runner.insert(text, f"{len(text)}")
        runner.cache.delete(f"{len(text)}")
    evict(runner)
    happened: list[str] = []
    late: Any = MadeLate(happened)
    runner.tiers.host.pinned, runner.tiers.host._aside = True, late
    for number, layer in enumerate(runner._prefiller.executor.spec.layers):
        layer.out.register_forward_hook(lambda *_, at=number: happened.append(f"layer {at}"))
    return runner, late, happened


def asked(engine: Engine, policy: str, *documents: list[int]) -> EngineRequest:
    return engine.submit(prompt_of(*documents), policy, **HOW)


def sources(request: EngineRequest) -> list[str]:
    found = request.result().report.documents
    return [one.source for one in found if one.end - one.start in (len(LETTER), len(MANUAL))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize(("mode", "local"), [("materialise", 0), ("share", 0), ("materialise", 1)])
def test_layers_are_computed_while_later_ones_come(
    policy: str, chunk: int | None, mode: str, local: int
) -> None:
    model, said = tiny("llama"), []
    for overlaps in (False, True):
        runner, late, happened = with_documents(model, local=local, mode=mode)
        runner.tiers.overlaps = overlaps
        engine = runner.engine(token_budget=1024, chunk_tokens=chunk)
        request = asked(engine, policy, LETTER, MANUAL)
        engine.step()
        assert late.left == 0
        assert happened.count("copied") == (2 * LAYERS if overlaps else 0)
        last = len(happened) - happened[::-1].index("copied") if overlaps else 0
        assert ("layer 0" in happened[:last]) is overlaps
        engine.run()
        assert sources(request) == ["host", "host"]
        said.append((request.result().tokens, request.result().report.plan.to_dict()))
        assert held(runner) == 0
    assert said[0] == said[1]


def test_all_has_come_when_others_compute() -> None:
    """Also where the first chunk ends inside of what is found: nothing is computed in it."""
    model = tiny("llama")
    runner, late, _ = with_documents(model)
    engine = runner.engine(token_budget=512, chunk_tokens=32)
    prompt = [Segment(tokens=LETTER), Segment(tokens=LAST)]
    begun = engine.submit(prompt, "naive", **HOW)
    another = engine.submit(prompt, "naive", **HOW)
    engine.step()
    assert late.left == 0
    engine.run()
    plain = tiered(model)
    plain.insert(LETTER, "letter")
    wanted = plain.generate(prompt, "naive", **HOW).tokens
    assert begun.result().tokens == another.result().tokens == wanted
    assert (sources(begun), sources(another)) == (["host"], ["device"])
    assert held(runner) == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_who_is_cancelled_gives_all_back(steps: int) -> None:
    runner, late, _ = with_documents(tiny("llama"))
    engine = runner.engine(token_budget=512, chunk_tokens=64)
    request = asked(engine, "naive", LETTER, MANUAL)
    for _ in range(steps):
        engine.step()
    assert engine.cancel(request)
    assert (held(runner), late.left, engine.live) == (0, 0, 0)
    # What has come stays cached.
    again = asked(engine, "naive", LETTER, MANUAL)
    engine.run()
    assert sources(again) == ["device", "device"]


@pytest.mark.parametrize("layer", [0, 2])
def test_who_fails_in_the_middle_fails_alone(layer: int) -> None:
    model = tiny("llama")
    runner, late, _ = with_documents(model)
    engine = runner.engine(token_budget=512, chunk_tokens=64)
    decoding = engine.submit(OTHER, "full", **{**HOW, "max_new_tokens": 30})
    engine.step()
    before = len(decoding.tokens)
    request = asked(engine, "cacheblend", LETTER, MANUAL)
    fails = [ValueError("in the middle")]

    def stop(*_: Any) -> None:
        # What decodes in this step is computed behind it.
        if fails:
            raise fails.pop()

    hook = runner._prefiller.executor.spec.layers[layer].out.register_forward_pre_hook(stop)
    engine.step()
    hook.remove()
    assert request.outcome == "failed"
    assert late.left == 0
    assert len(decoding.tokens) == before + 1
    engine.run()
    plain = tiered(model)
    long = {**HOW, "max_new_tokens": 30}
    assert decoding.result().tokens == plain.generate(OTHER, "full", **long).tokens
    # All of the documents has come: they say what they said.
    for text in (LETTER, MANUAL):
        plain.insert(text, f"{len(text)}")
    again = asked(engine, "naive", LETTER, MANUAL)
    engine.run()
    assert again.result().tokens == plain.generate(prompt_of(LETTER, MANUAL), "naive", **HOW).tokens
    assert sources(again) == ["device", "device"]
    assert held(runner) == 0


@needs_cuda
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu(policy: str) -> None:
    model, said = tiny("llama").to("cuda"), []
    for overlaps in (False, True):
        runner = tiered(model, document_bytes=1 << 22)
        runner.tiers.overlaps = overlaps
        assert runner.tiers.host.pinned
        for text in (LETTER, MANUAL):
            runner.insert(text, f"{len(text)}")
            runner.cache.delete(f"{len(text)}")
        evict(runner)
        engine = runner.engine(token_budget=1024, chunk_tokens=64)
        for source in ("host", "device"):
            request = asked(engine, policy, LETTER, MANUAL)
            engine.run()
            assert sources(request) == [source, source]
            said.append(request.result().tokens)
        assert held(runner) == 0
    assert said.count(said[0]) == len(said)

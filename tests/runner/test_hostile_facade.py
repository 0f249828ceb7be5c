"""What callers may hand to `Runner` by mistake: refused by name before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from kvweave import models
from kvweave.errors import InvalidArgument, KvweaveError, Unsupported
from kvweave.policies import Epic, Foresight, InfoFlow, RandomRows, policy_of
from kvweave.runner import Canary, Healing, Runner, Sampling, Segment

HALF = "\ud800"
HUGE = 2**63
LONG = "x" * 10_000_000
NO_PROMPTS = (None, b"abc", bytearray(b"abc"), 5, 1.5, {}, {"a": 1}, {1, 2}, object(), [[1, 2]])
NO_TOKENS = (
    b"abc", 5, [1.7], [None], [HUGE], [2**70], [-1], [300], ["a"], [[1], [1, 2]], [True, False],
)  # fmt: skip
NO_WORDS = (None, 5, b"kb", HALF, ["kb"])
NO_COUNTS = (0, -1, -HUGE, 1.5, "3", None, True, float("nan"))


class NotAPolicy:
    def __repr__(self) -> str:
        return LONG


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def runner(model: Any) -> Runner:
    """Without text: ids alone are needed here."""
    return Runner(model, max_tokens=512, progress=False, check=False)


@pytest.fixture(scope="module")
def reader() -> Runner:
    """With text, of a tokenizer that has more words than the model; no text is ever run."""
    tokenizer = models.load_tokenizer("smollm2")
    return Runner(tiny("llama"), tokenizer, max_tokens=512, progress=False, check=False)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return random_tokens(20, 1).tolist()


Calls = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


def answering(call: Callable[..., Any]) -> Calls:
    """What is wrong of how an answer is made, by its name: `call` takes it as a keyword."""
    return {
        "max_new_tokens": (lambda w: call(max_new_tokens=w), NO_COUNTS),
        "sampling": (lambda w: call(sampling=w), ("hot", 0.5, {}, Sampling, object())),
        "stop": (
            lambda w: call(stop=w),
            (5, b"ab", [None], [1.5], [300], [-1], [HUGE], ["x"], "x", [[1]], [True], object()),
        ),
    }


def looking_up(call: Callable[..., Any]) -> Calls:
    """The same of what a prompt may find."""
    return {
        "namespace": (lambda w: call(namespace=w), NO_WORDS),
        "discover": (lambda w: call(discover=w), ("yes", None, 1)),
        "remember": (lambda w: call(remember=w), ("no", None, 0)),
        "policy": (
            lambda w: call(policy=w),
            ("best", "", LONG, 5, Epic, object(), NotAPolicy(), ["epic"], {"epic": 1}, b"epic"),
        ),
    }


def conversing(runner: Runner, *turn: Any, **how: Any) -> None:
    with runner.conversation("full") as talk:
        talk.ask(*turn, **how)


def streaming(runner: Runner, *prompt: Any, **how: Any) -> None:
    list(runner.stream(*prompt, **how))


def decoding(runner: Runner, tokens: list[int], **how: Any) -> None:
    with runner.prefill(tokens, "full", remember=False) as done:
        runner.decode(done, **how)


def resuming(runner: Runner, tokens: list[int], **how: Any) -> None:
    with runner.prefill(tokens, "full", remember=False) as done:
        runner.resume(runner.export(done), **how)


def extending(runner: Runner, tokens: list[int], more: Any) -> None:
    with runner.prefill(tokens, "full", remember=False) as done:
        runner.extend(done, more)


def prefilling(runner: Runner, tokens: list[int], **how: Any) -> None:
    runner.prefill(tokens, **how).release()


def given(runner: Runner, tokens: list[int]) -> dict[str, Calls]:
    """What methods do not take as prompts, contents and live prompts, by name."""
    prompts: Calls = {
        "prompt": (runner.prefill, (*NO_PROMPTS, *NO_TOKENS)),
        "generate": (runner.generate, (*NO_PROMPTS, *NO_TOKENS)),
        "stream": (partial(streaming, runner), (*NO_PROMPTS, *NO_TOKENS)),
        "ask": (partial(conversing, runner), (*NO_PROMPTS, *NO_TOKENS)),
        "array": (runner.prefill, (np.zeros((2, 2), np.int32), np.zeros(2), torch.zeros(2))),
        "part": (lambda w: runner.prefill([w]), (None, b"a", 1.5, ["a"], {})),
        "tokens": (lambda w: runner.prefill([Segment(tokens=w)]), (*NO_TOKENS, "abc", {1})),
        "prompts": (runner.generate_batch, ("abc", b"abc", None, 5, {1}, [5], [None])),
    }
    knowledge: Calls = {
        "content": (lambda w: runner.insert(w, "kb"), (*NO_TOKENS, None, {}, [], object())),
        "name": (lambda w: runner.insert(tokens, w), (*NO_WORDS, "")),
        "namespace": (lambda w: runner.insert(tokens, "kb", w), NO_WORDS),
        "contents": (
            runner.insert_many,
            ({"kb": tokens}, "ab", b"ab", None, 5, [None], [5], ["ab"], [("a",)], [("a", 1, 2)]),
        ),
        "delete": (runner.delete, (*NO_WORDS, LONG, "unknown")),
        "segments": (runner.segments, NO_WORDS[1:]),
    }
    live: Calls = {
        "extend": (lambda w: runner.extend(w, tokens), (None, tokens, "x", object())),
        "more": (partial(extending, runner, tokens), (*NO_TOKENS, None, "abc", [], {})),
        "decode": (runner.decode, (None, tokens, object())),
        "export": (runner.export, (None, b"", object())),
        "payload": (runner.resume, (None, b"", "x", object())),
    }
    return {"prompts": prompts, "knowledge": knowledge, "live prompts": live}


def asked(runner: Runner, tokens: list[int]) -> dict[str, Calls]:
    """What methods do not take as settings, by method and name."""
    numbers = (1.5, "3", True, -1, -HUGE, HUGE, 2**70)
    generate, stream = partial(runner.generate, tokens), partial(streaming, runner, tokens)
    prefill = partial(prefilling, runner, tokens)
    resume = partial(resuming, runner, tokens)
    return {
        "generate": {**answering(generate), **looking_up(generate)},
        "generate_batch": answering(partial(runner.generate_batch, [tokens])),
        "stream": {**answering(stream), **looking_up(stream)},
        "decode": answering(partial(decoding, runner, tokens)),
        "resume": {
            **answering(resume),
            "namespace": (lambda w: resume(namespace=w), NO_WORDS[1:]),
        },
        "ask": answering(partial(conversing, runner, tokens)),
        "conversation": looking_up(runner.conversation),
        "prefill": {
            **looking_up(prefill),
            "watched": (lambda w: prefill(watched=w), ("yes", None)),
            "logits_from": (lambda w: prefill(logits_from=w), (*numbers, 20)),
            "reserve_tokens": (lambda w: prefill(reserve_tokens=w), (*numbers, None)),
        },
        "healing": {
            "healing": (lambda w: generate(healing=w), ("on", True, 1, Healing)),
            "conversation": (lambda w: runner.conversation(healing=w), ("on", True, Healing)),
        },
    }


TOLD = re.compile(r"^[a-zα-ω][^\n]*: (expected|\S+ in every) [^\n]+, got .*", re.DOTALL)


def refuses(call: Callable[[Any], Any], wrong: Any) -> str:
    """The typed error's text: what was expected and what came, in few words."""
    with pytest.raises(KvweaveError) as told:
        call(wrong)
    text = str(told.value)
    assert TOLD.match(text), text
    assert len(text) < 700
    return text


METHODS = (
    "prompts", "knowledge", "live prompts", "generate", "generate_batch", "stream", "decode",
    "resume", "ask", "conversation", "prefill", "healing",
)  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_nothing_that_is_wrong_is_taken(method: str, runner: Runner, tokens: list[int]) -> None:
    before, rows = runner.cache.stats(), given(runner, tokens) | asked(runner, tokens)
    assert tuple(rows) == METHODS
    for name, (call, wrongs) in rows[method].items():
        for wrong in wrongs:
            try:
                refuses(call, wrong)
            except BaseException as error:
                raise AssertionError(f"{method}, {name}: {type(wrong)} {wrong!r:.99}") from error
    runner.cache.check()
    after = runner.cache.stats()
    assert (after["held"], after["frozen"]) == (before["held"], before["frozen"]) == (0, 0)
    assert runner.segments() == []


@pytest.mark.parametrize("text", [HALF, "a" + HALF, ["a", HALF], [Segment(tokens=[1]), HALF]])
def test_halves_of_characters_are_no_text(text: Any, reader: Runner) -> None:
    for call in (reader.tokenize, reader.prefill, reader.generate):
        assert "text: expected text that UTF-8 can hold, got '\\ud800'" in refuses(call, text)
    refuses(lambda text: reader.insert(text, "kb"), HALF)
    refuses(lambda text: Segment(text=text), HALF)
    refuses(lambda stop: reader.generate([1], stop=stop), [HALF])
    refuses(lambda stop: reader.generate([1], stop=stop), "")


@pytest.mark.parametrize(
    ("name", "wrongs"),
    [
        ("max_tokens", (0, -1, 1.5, "3", True, HUGE, 2**70)),
        ("arena_bytes", (0, -1, 1.5, "3", True, HUGE, 2**70)),
        ("page_tokens", (0, -1, 1.5, "3", None, HUGE)),
        ("chunk_tokens", (0, -1, 1.5, "3", True)),
        ("frozen_share", (-0.5, 1.5, "x", None, float("nan"))),
        ("mode", ("best", LONG, None, 5, ["share"])),
        ("hash", ("md5", None, 5, HALF)),
        ("eviction", ("LRU", "fifo", "", None, 5, HALF)),
        ("heads", ("map", 5, {}, object())),
        ("profile", ("profile.json", 5, {}, object())),
        ("canary", (0.1, True, "often", Canary)),
        ("tokenizer", (5, "smollm2", object(), ["a"])),
    ],
)
def test_runners_are_made_of_what_they_take(name: str, wrongs: tuple[Any, ...], model: Any) -> None:
    for wrong in wrongs:
        how = {"max_tokens": 64} if name != "arena_bytes" else {}
        settings = {**how, "progress": False, "check": False, name: wrong}
        refuses(lambda _, how=settings: Runner(model, **how), wrong)
    for wrong in (None, "smollm2", object()):
        with pytest.raises(Unsupported, match="model: expected a transformers causal LM, got"):
            Runner(wrong)


SETTINGS: list[tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]] = [
    (
        Sampling,
        {
            "temperature": (-1.0, float("nan"), float("inf"), "hot", None, True, 10**400),
            "top_p": (0.0, 1.5, float("nan"), "all", None),
            "top_k": (-1, 1.5, "3", None, True),
            "seed": (2**64, -(2**63) - 1, 1.5, "3", None),
        },
    ),
    (
        Healing,
        {
            "every": (0, 1.5, "3", None, True),
            "bound": (-0.1, 1.5, float("nan"), "x", None),
            "near": (0, 2, 1.5, "3", None),
        },
    ),
    (
        Canary,
        {
            "share": (-0.1, 1.5, float("nan"), "x", None),
            "bound": (0.0, -1.0, float("nan"), float("inf"), "x"),
            "window": (0, 1.5, "x", None),
            "tokens": (0, 1.5, "x", None),
            "level": (0.0, 1.0, "x", None),
            "seed": (-1, 1.5, "x", None),
        },
    ),
    (
        Foresight,
        {
            "share": (-0.1, 1.5, float("nan"), "x"),
            "count": (-1, 1.5, "x", True),
            "mass": (-0.1, 1.5, "x"),
            "draft": (-1, 1.5, "x", None),
            "ask": (0, 1.5, "x", None),
            "near": (0, 2, 1.5, "x", None),
            "depth": (-0.1, 1.5, "x", None),
        },
    ),
    (Epic, {"first": (-1, 1.5, "x", None, True)}),
    (RandomRows, {"share": (2.0, "x", None), "count": (-1, 1.5, "x"), "seed": (-1, 1.5, "x")}),
    (InfoFlow, {"share": (2.0, "x"), "layers": (5, (), (-1,), (1.5,), "ab"), "score": ("x", 5)}),
    (lambda **how: policy_of("cacheblend").__class__(**how), {"ratio": (2.0, "x", None)}),
    (lambda **how: policy_of("prophet").__class__(**how), {"share": (2.0, "x", None)}),
    (
        lambda **how: policy_of("sparsex").__class__(**how),
        {"top_k": (2.0, -0.1, "x", None)},
    ),
    (
        lambda **how: policy_of("redknot").__class__(**how),
        {"dense_until": (2.0, "x", None), "recent_n": (0, 1.5, "x"), "repair": (-1, 1.5, "x")},
    ),
]


@pytest.mark.parametrize("row", range(len(SETTINGS)))
def test_settings_are_numbers_of_their_range(row: int) -> None:
    make, settings = SETTINGS[row]
    for name, wrongs in settings.items():
        for wrong in wrongs:
            try:
                refuses(lambda wrong, name=name: make(**{name: wrong}), wrong)
            except BaseException as error:
                raise AssertionError(f"{name}={wrong!r:.99}") from error


@pytest.mark.parametrize("temperature", [1e-45, 5e-324, 1e-38, np.float32(1e-45)])
def test_hardly_any_temperature_is_none(temperature: float, runner: Runner) -> None:
    prompt = random_tokens(30, 2).tolist()
    cold = Sampling(temperature=temperature)
    wanted = runner.generate(prompt, "full", max_new_tokens=5, remember=False)
    found = runner.generate(prompt, "full", max_new_tokens=5, sampling=cold, remember=False)
    assert found.tokens == wanted.tokens
    # Of several that are highest any may come, and nothing else.
    logits = torch.tensor([1.0, 5.0, 5.0, -torch.inf])
    numbers = cold.generator(torch.device("cpu"))
    assert {int(cold.pick(logits, numbers)) for _ in range(60)} == {1, 2}


def test_large_numbers_that_mean_something_are_taken(runner: Runner, tokens: list[int]) -> None:
    answer = runner.generate(
        tokens,
        Foresight(count=HUGE),
        max_new_tokens=np.int64(3),
        sampling=Sampling(temperature=1.0, top_k=2**70, seed=2**64 - 1),
        stop={299},
        remember=False,
    )
    assert 1 <= len(answer.tokens) <= 3


def test_empty_batches_are_no_work(runner: Runner) -> None:
    assert runner.generate_batch([]) == []
    assert runner.insert_many([]) == []


def test_an_entry_is_told_of_without_a_list_of_all(model: Any, tokens: list[int]) -> None:
    runner = Runner(model, max_tokens=1024, progress=False, check=False)
    listed: list[Any] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(cache, name)

        def frozen(self, *named: Any) -> Any:
            listed.append(named)
            return cache.frozen(*named)

    cache, runner.cache = runner.cache, Counting()
    made = runner.insert_many([(f"d{i}", random_tokens(20, i).tolist()) for i in range(8)], "ns")
    assert listed == []
    assert [(one.name, one.namespace, one.tokens) for one in made] == [
        (f"d{i}", "ns", 20) for i in range(8)
    ]
    by_name = {one.name: repr(one) for one in cache.frozen("ns")}
    assert {name: repr(cache.frozen_segment(name, "ns")) for name in by_name} == by_name
    for name, namespace in (("d0", ""), ("d9", "ns"), (LONG, "ns")):
        refuses(lambda name, at=namespace: cache.frozen_segment(name, at), name)
    with pytest.raises(InvalidArgument):
        cache.frozen_segment(HALF)

"""What a tenant may ask and is told, on a runner that others use: his own, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from families import random_tokens, tiny
from kvweave import (
    InvalidArgument,
    NamespaceConflict,
    PoolFull,
    Runner,
    Segment,
    Server,
    Tenant,
    UnknownSegment,
)
from kvweave.runner import EngineRequest, ServedRequest
from kvweave.runner.serve.held_back import HeldBack

LETTER = random_tokens(90, 5).tolist()
HOW: dict[str, Any] = {"max_new_tokens": 4, "stop": ()}


@pytest.fixture
def served() -> Iterator[tuple[Runner, Server]]:
    runner = Runner(tiny("llama"), max_tokens=512, check=False, progress=False)
    with runner.serve() as server:
        yield runner, server


def test_answers_are_those_of_the_runner(served: tuple[Runner, Server]) -> None:
    runner, server = served
    tenant = Tenant(runner, server, "a")
    plain = Runner(tiny("llama"), max_tokens=512, check=False, progress=False)
    expected = plain.generate(LETTER, **HOW).tokens
    request = tenant.submit(LETTER, **HOW)
    assert [token.token for token in request] == expected
    assert request.result().tokens == expected
    assert tenant.generate(LETTER, **HOW).tokens == expected
    assert set(vars(request.result())) == {"text", "tokens", "stopped"}


def test_a_request_says_nothing_of_whose_it_is(served: tuple[Runner, Server]) -> None:
    runner, server = served
    one, other = Tenant(runner, server, "a"), Tenant(runner, server, "b")
    document = one.insert(LETTER, "letter")
    assert (document.name, document.tokens) == ("letter", 90)
    marked = Segment(tokens=LETTER)
    prompt = [Segment(tokens=[5, 6, 7]), marked, Segment(tokens=[1, 2])]
    one.generate(prompt, "naive", **HOW)
    assert one.stats()["reused_tokens"] > 0
    # The same text is not the other's, who cannot name whose it is either.
    other.generate(prompt, "naive", **HOW)
    assert other.stats() == {
        "requests": 1,
        "prompt_tokens": 95,
        "reused_tokens": 0,
        "answer_tokens": 4,
    }
    for theirs in ("a", "c"):
        with pytest.raises(NamespaceConflict):
            other.submit([Segment(tokens=LETTER, namespace=theirs)], **HOW)
    assert other.documents() == []
    with pytest.raises(UnknownSegment):
        other.delete("letter")
    assert [each.name for each in one.documents()] == ["letter"]
    one.delete("letter")
    assert one.documents() == []


def test_what_is_shared_is_read_where_it_lies_until_it_is_taken_back(
    served: tuple[Runner, Server],
) -> None:
    runner, server = served
    one, other, third = (Tenant(runner, server, name) for name in ("a", "b", "c"))
    server.call(lambda: runner.insert(LETTER, "letter", "library"))
    prompt = [
        Segment(tokens=[5, 6, 7]),
        Segment(tokens=LETTER, namespace="library"),
        Segment(tokens=[1, 2]),
    ]
    one.share("library")
    answer = one.generate(prompt, "naive", **HOW)
    assert answer.tokens == runner_answer(prompt)
    assert one.stats()["reused_tokens"] == 90
    # Whom nobody has given it to does not have it, by its name or by its text alone.
    for stranger in (other, third):
        with pytest.raises(NamespaceConflict, match="expected '[bc]' or none, got 'library'"):
            stranger.submit(prompt, **HOW)
        stranger.generate([Segment(tokens=LETTER), Segment(tokens=[1])], "naive", **HOW)
        assert stranger.stats()["reused_tokens"] == 0
    # It is read and no more.
    assert one.documents() == []
    with pytest.raises(UnknownSegment):
        one.delete("letter")
    one.forget()
    assert [each.name for each in runner.segments("library")] == ["letter"]
    one.unshare("library")
    with pytest.raises(NamespaceConflict):
        one.submit(prompt, **HOW)


def runner_answer(prompt: list[Segment]) -> list[int]:
    runner = Runner(tiny("llama"), max_tokens=512, check=False, progress=False)
    runner.insert(LETTER, "letter", "library")
    return runner.generate(prompt, "naive", namespace="a", **HOW).tokens


@pytest.mark.parametrize("namespace", ["", "a", 3, None])
def test_what_cannot_be_shared_is_refused(served: tuple[Runner, Server], namespace: Any) -> None:
    tenant = Tenant(*served, "a")
    with pytest.raises(InvalidArgument, match="namespace"):
        tenant.share(namespace)
    with pytest.raises(InvalidArgument, match="namespace"):
        tenant.unshare(namespace)
    tenant.share("library")
    with pytest.raises(InvalidArgument, match="expected one that is shared: 'library', got 'lib"):
        tenant.unshare("lib")


def test_what_one_tenant_asks_of_a_library_tells_another_nothing(
    served: tuple[Runner, Server],
) -> None:
    """A text that the library's owner has not inserted is computed for each of them."""
    runner, server = served
    one, other = Tenant(runner, server, "a"), Tenant(runner, server, "b")
    prompt = [Segment(tokens=LETTER, namespace="library"), Segment(tokens=[1, 2])]
    for tenant in (one, other):
        tenant.share("library")
        tenant.generate(prompt, "naive", **HOW)
        assert tenant.stats()["reused_tokens"] == 0
        assert tenant.missed()["not-cached"] == 90
    assert one.missed() == other.missed()
    assert sum(one.missed().values()) == one.stats()["prompt_tokens"] == 92


def test_that_there_is_no_room_tells_nobody_how_much_there_is(
    served: tuple[Runner, Server],
) -> None:
    runner, server = served
    one, other = Tenant(runner, server, "a"), Tenant(runner, server, "b")
    one.insert(random_tokens(200, 1).tolist(), "much")
    said = set()
    for length in (300, 400, 500):
        with pytest.raises(PoolFull) as raised:
            other.insert(random_tokens(length, 2).tolist(), "more")
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__
        assert (raised.value.expected, raised.value.got) == (None, None)
        said.add(str(raised.value))
    assert len(said) == 1
    assert not any(letter.isdigit() for letter in said.pop())


def test_tokens_come_at_multiples_of_the_quantum(served: tuple[Runner, Server]) -> None:
    runner, server = served
    quantum = 0.4
    tenant = Tenant(runner, server, "a", quantum_s=quantum)
    for _ in range(2):
        # A miss, then a hit.
        begun = time.monotonic()
        request = tenant.submit(LETTER, **HOW)
        times = [time.monotonic() - begun for _ in request]
        assert len(times) == 4
        over = times[0] % quantum
        assert times[0] >= quantum
        # Never before; a busy machine may be late to say so.
        assert over < quantum / 2
        assert request.result().tokens == request.result().tokens
    request = tenant.submit(LETTER, max_new_tokens=1, stop=())
    begun = time.monotonic()
    request.result()
    assert time.monotonic() - begun > quantum / 2


def test_who_sees_a_token_before_anybody_tells_of_it_is_held_back_too(
    served: tuple[Runner, Server],
) -> None:
    begun, quantum = time.monotonic(), 0.2
    asked = EngineRequest(0)
    held = HeldBack(ServedRequest(served[0].engine(), asked), quantum, lambda _: None)
    asked.add(7)
    assert next(iter(held)).token == 7
    assert time.monotonic() - begun >= quantum


def test_who_is_refused_or_cancelled_is_told_so(served: tuple[Runner, Server]) -> None:
    runner, server = served
    tenant = Tenant(runner, server, "a", quantum_s=0.05)
    request = tenant.submit(LETTER, max_new_tokens=300, stop=())
    assert request.cancel()
    with pytest.raises(Exception, match="cancelled"):
        request.result()
    assert tenant.stats()["requests"] == 0


@pytest.mark.parametrize("quantum", [0, -1.0, float("nan"), float("inf"), "x"])
def test_a_quantum_that_is_no_time_is_refused(served: tuple[Runner, Server], quantum: Any) -> None:
    with pytest.raises(InvalidArgument):
        Tenant(*served, "a", quantum_s=quantum)

"""A soak's checks fail where they should: answers, memory, logs; no vLLM."""

from __future__ import annotations

import copy
import logging
from typing import Any

from benchmarks.soak.asked import EXACT, Author, document
from benchmarks.soak.log_watch import LogWatch
from benchmarks.soak.memory import MIB, Memory
from benchmarks.vllm.soak_compare import TOLERANCE, Comparison
from benchmarks.vllm.soak_rows import rows_of
from benchmarks.vllm.soak_server import EVENTS, RESETS, ServerLoad, never

OUTCOME: dict[str, Any] = {"tokens": 90, "cached": 0, "found": {"frozen": 60}, "reused": 60}
OUTCOME |= {"missed": {"fresh": 29, "last-token": 1}, "recomputed": 7}


def answered(kind: str) -> dict[str, Any]:
    """A request with an answer of two tokens; of the second, two are nearly as likely."""
    one = {"tokens": [5, 6], "logprobs": [-0.1, -0.7], "text": "w5 w6", "reason": "length"}
    one["near"] = [[[5, -0.1], [8, -3.0]], [[6, -0.7], [9, -0.7 - TOLERANCE / 2]]]
    said = {"name": "r1", "kind": kind, "chunks": [64, 26], "preempted": 0, "answers": [one]}
    said["documents"] = [1]
    return {**said, "outcome": None if kind in EXACT else copy.deepcopy(OUTCOME)}


def counted(record: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    found = Comparison([record])
    found.add(record, alone)
    return found.found()


def test_answers_that_rounding_explains_are_the_same() -> None:
    alone = answered("plain")
    near, tie, other, apart, cut = (copy.deepcopy(alone) for _ in range(5))
    near["answers"][0]["logprobs"][1] += TOLERANCE / 2
    tie["answers"][0]["tokens"][1] = 9
    other["answers"][0]["tokens"][0] = 8
    apart["answers"][0]["logprobs"][0] += 2 * TOLERANCE
    cut["answers"][0]["reason"] = "stop"
    verdicts = [
        next(v for v in ("same", "tie", "different") if counted(record, alone).get(v))
        for record in (alone, near, tie, other, apart, cut)
    ]
    assert verdicts == ["same", "same", "tie", "different", "different", "different"]


def test_by_a_policy_answers_are_compared_where_the_same_was_computed() -> None:
    alone = answered("foresight")
    request, missed, chunked, preempted = (copy.deepcopy(alone) for _ in range(4))
    request["outcome"]["found"] = {"request": 60}
    missed["outcome"]["missed"]["not-cached"] = 1
    chunked["chunks"] = [90]
    preempted["preempted"] = 1
    records = (alone, request, missed, chunked, preempted)
    compared = [counted(record, alone).get("foresight compared", 0) for record in records]
    assert compared == [1, 1, 0, 0, 0]
    others = Comparison([missed])
    others.add(alone, alone)
    assert others.found().get("foresight compared", 0) == 0


def test_every_wrong_exact_answer_is_complained_of() -> None:
    found, alone = Comparison([]), answered("prefix")
    assert found.complaints() == ["nothing was compared"]
    for _ in range(200):
        found.add(alone, alone)
    assert found.complaints() == []
    wrong = copy.deepcopy(alone)
    wrong["answers"][0]["tokens"] = [8, 6]
    found.add(wrong, alone)
    assert found.complaints() == ["prefix: 1 of 201 answers are not the quiet ones"]


def test_memory_that_grows_is_complained_of() -> None:
    def growing(rate: int) -> list[str]:
        sizes = [100 * MIB + max(second - 20, 0) * rate for second in range(60)]
        return Memory(list(map(float, range(60))), sizes, [0] * 60).complaints()

    # What is taken at first is no leak; what is taken to the end is.
    assert growing(0) == []
    assert growing(MIB // 8) == []
    assert growing(MIB) == ["resident memory grew by 29.0 MiB over the second half"]


def test_errors_in_logs_are_heard() -> None:
    watch = LogWatch()
    try:
        logging.getLogger("vllm.some").warning("slow")
        logging.getLogger("vllm.some").error("lost a block")
        logging.getLogger("kvweave").warning("Traceback (most recent call last)")
    finally:
        watch.close()
    assert set(watch.errors) == {
        "vllm.some: lost a block",
        "kvweave: Traceback (most recent call last)",
    }


def test_requests_are_marked_where_documents_are() -> None:
    """And are the same for the same seed: second turns go on behind the answer of the first."""

    def drawn() -> list[Any]:
        author = Author(3)
        author.there = list(range(1, 9))
        requests = []
        for _ in range(200):
            requests.append(author.request())
            author.answered(requests[-1], [7, 8])
        return requests

    requests = drawn()
    assert requests == drawn()
    known = {request.name: request for request in requests}
    for request in requests:
        if request.marks is not None:
            spans = zip(request.documents, request.marks["segments"], strict=True)
            assert all(request.tokens[a:b] == document(n)[2] for n, (a, b) in spans)
        if request.before is not None:
            first = [*known[request.before].tokens, 7, 8]
            assert request.tokens[: len(first)] == first
    assert {"plain", "many", "stop", "foresight"} <= {request.kind for request in requests}
    assert any(request.before for request in requests)


class Refusing:
    """A server in the place of a `Caller`: it resets caches where nobody is asked for anything."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.paths: list[str] = []

    def call(self, method: str, path: str, value: Any = None) -> tuple[int, Any]:
        self.paths.append(f"{method} {path}")
        return self.answers.pop(0)


def test_resets_that_a_server_refuses_are_attempts_alone() -> None:
    caller: Any = Refusing()
    load = ServerLoad(caller, 0)
    caller.answers = [(200, {"success": done}) for done in (False, True, False)] + [(500, "none")]
    for _ in range(4):
        load._change([0.07, 0.0])
    assert caller.paths == ["POST /reset_prefix_cache?reset_external=true"] * 4
    assert load.happened == {"reset": 1, "reset refused": 2}
    assert load.complaints == ["caches are reset: status 500, none"]


def test_rows_of_a_server_tell_attempts_from_resets_and_have_its_aborts() -> None:
    happened = {"reset": 1, "reset refused": 44, "aborted by a sleep": 7, "left": 9, "spied": 3}
    load = {"seconds": 1800.0, "answers": 20, "happened": happened, "MiB": [1.0, 2.0, 3.0]}
    rows = {row.name: row for row in rows_of("server", load, {"same": 5}, 0)}
    attempts = rows["server: attempts to reset caches"]
    assert (attempts.value, attempts.of) == (45, {"of these reset": 1})
    assert rows["server: times that caches were reset, the connector's too"].value == 1
    assert rows["server: requests aborted by a sleep"].value == 7
    assert rows["server: streams that their clients left"].value == 9
    assert rows["server: times that a stranger asked"].value == 3
    refused = {**happened, "reset": 0}
    rows = {row.name: row for row in rows_of("server", {**load, "happened": refused}, {}, 0)}
    assert rows["server: attempts to reset caches"].of == {"of these reset": 0}


def test_what_never_happened_is_complained_of() -> None:
    happened = dict.fromkeys(EVENTS, 1)
    assert never(happened) == ["never happened: attempts to reset caches"]
    for one in RESETS:
        assert never({**happened, one: 1}) == []
    assert never({"reset": 1})[0] == "never happened: put"

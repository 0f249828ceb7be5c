"""Workflows: the text of whoever comes next stays, whatever was used least recently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from families import random_tokens, tiny
from kvweave import InvalidArgument, Runner, Segment, Workflow
from packed_decoding import packed_runner

TEXT, TASK = 96, 24
AGENTS = [f"agent {number}" for number in range(6)]
TEXTS = {name: random_tokens(TEXT, seed).tolist() for seed, name in enumerate(AGENTS)}
RING = {name: [AGENTS[(at + 1) % len(AGENTS)]] for at, name in enumerate(AGENTS)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def runner_of(model: Any, texts: int, eviction: str = "cost-aware", **more: Any) -> Runner:
    """A runner with room for so many agents' texts and one request."""
    options = {"check": False, "progress": False, **more}
    return Runner(model, max_tokens=texts * TEXT + TEXT + 2 * TASK, eviction=eviction, **options)


def reused(runner: Runner, name: str, turn: int) -> int:
    """Tokens of an agent's text that its step finds."""
    prompt = [*TEXTS[name], *random_tokens(TASK, 1000 + turn).tolist()]
    done = runner.generate(prompt, max_new_tokens=1, stop=(), remember=True)
    return min(done.report.reused_prefix, TEXT)


def cached(runner: Runner, text: list[int]) -> int:
    """Tokens of a text that are on the device."""
    return runner.cache.match_prefix(np.asarray(text, np.int32), regime=runner.regime(len(text)))


def rounds(runner: Runner, flow: Workflow | None, count: int = 5) -> list[int]:
    """What all steps of some rounds of the ring find, but for those of the first."""
    found = []
    for turn in range(count * len(AGENTS)):
        name = AGENTS[turn % len(AGENTS)]
        if flow is None:
            found.append(reused(runner, name, turn))
        else:
            with flow.step(name):
                found.append(reused(runner, name, turn))
    return found[len(AGENTS) :]


def test_a_ring_of_agents_finds_what_has_room_where_others_find_nothing(model: Any) -> None:
    """In a ring the least recently used text is always the next one's (KVFlow, section 2)."""
    plain = rounds(runner_of(model, 3, "lru"), None)
    assert sum(plain) == 0
    runner = runner_of(model, 3)
    with Workflow(runner, TEXTS, RING) as flow:
        found = rounds(runner, flow)
    # Belady's order finds some C − 1 of N − 1 texts where C have room.
    assert sum(found) >= 0.4 * len(found) * TEXT
    runner.cache.check()


def test_all_that_has_room_is_found_either_way(model: Any) -> None:
    runner = runner_of(model, 12)
    with Workflow(runner, TEXTS, RING) as flow:
        assert set(rounds(runner, flow)) == {TEXT}


def test_packed_texts_are_kept_too() -> None:
    runner = packed_runner(tiny("llama", head_dim=64), eviction="cost-aware")
    text = random_tokens(448, 1).tolist()
    with Workflow(runner, {"one": text}, {}) as flow, flow.step("one"):
        runner.generate(text, max_new_tokens=1, stop=())
    assert runner.generate([*text, 5], max_new_tokens=1, stop=()).report.reused_prefix >= 384


def test_documents_of_a_text_are_kept_with_it(model: Any) -> None:
    runner = runner_of(model, 2)
    letter = random_tokens(TEXT, 50).tolist()
    runner.insert(letter, "letter")
    runner.cache.delete("letter")
    texts = {"reader": [Segment(tokens=letter)], "other": TEXTS[AGENTS[0]]}
    with Workflow(runner, texts, {"other": ["reader"]}) as flow, flow.step("other"):
        for turn in range(6):
            reused(runner, AGENTS[1 + turn % 5], turn)
        assert cached(runner, letter) == TEXT
    for turn in range(6):
        reused(runner, AGENTS[1 + turn % 5], turn)
    assert cached(runner, letter) == 0


def test_steps_are_counted_from_whoever_runs_or_is_done(model: Any) -> None:
    texts = {name: TEXTS[AGENTS[at]] for at, name in enumerate("abcde")}
    then = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": ["a"]}
    flow = Workflow(runner_of(model, 6), texts, then)
    assert flow.steps() == dict.fromkeys("abcde")
    flow.begin("a")
    assert flow.steps() == {"a": 0, "b": 1, "c": 1, "d": 2, "e": None}
    flow.end("a")
    assert flow.steps() == {"a": 3, "b": 1, "c": 1, "d": 2, "e": None}
    flow.begin("b")
    flow.begin("c")
    flow.end("b")
    assert flow.steps() == {"a": 2, "b": 3, "c": 0, "d": 1, "e": None}
    flow.end("c")
    flow.begin("d")
    assert flow.steps() == {"a": 1, "b": 2, "c": 2, "d": 0, "e": None}
    flow.close()
    flow.close()
    assert flow.steps() == dict.fromkeys("abcde")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=15),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_steps_are_shortest_paths(model: Any, edges: list[tuple[int, int]], run: list[int]) -> None:
    """Against distances by powers of the matrix of who comes behind whom."""
    then: dict[str, list[str]] = {name: [] for name in AGENTS}
    matrix = np.zeros((6, 6), bool)
    for one, other in edges:
        then[AGENTS[one]].append(AGENTS[other])
        matrix[one, other] = True
    flow = Workflow(runner_of(model, 6), TEXTS, then)
    for one in run:
        flow.begin(AGENTS[one])
    wanted = {name: 0 if at in run else None for at, name in enumerate(AGENTS)}
    reach = np.eye(6, dtype=bool)[run].any(0)
    for steps in range(1, 7):
        reach = matrix[reach].any(0)
        for at in np.flatnonzero(reach):
            known = wanted[AGENTS[at]]
            wanted[AGENTS[at]] = steps if known is None else min(known, steps)
    assert flow.steps() == wanted


def test_what_is_needed_late_is_kept_as_any_other(model: Any) -> None:
    flow = Workflow(runner_of(model, 3), TEXTS, RING, horizon=2)
    flow.begin(AGENTS[0])
    ranks = [flow._priority(steps) for steps in flow.steps().values()]
    assert ranks == [255, 254, 253, 0, 0, 0]


@pytest.mark.parametrize(
    ("texts", "then", "message"),
    [
        ({}, {}, "texts: expected those of some agents, got none"),
        (TEXTS, {"nobody": []}, "then: expected agents of agent 0, .*, got 'nobody'"),
        (TEXTS, {AGENTS[0]: ["nobody"]}, "then: expected agents of agent 0, .*, got 'nobody'"),
        (TEXTS, {AGENTS[0]: AGENTS[1]}, "then: expected lists of agents, got 'agent 1'"),
        ({"a": ""}, {}, "expected"),
    ],
)
def test_what_is_no_workflow_is_refused(model: Any, texts: Any, then: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Workflow(runner_of(model, 3), texts, then)


def test_calls_that_make_no_sense_are_refused(model: Any) -> None:
    with pytest.raises(InvalidArgument, match="runner: expected eviction='cost-aware', got 'lru'"):
        Workflow(runner_of(model, 3, "lru"), TEXTS, RING)
    with pytest.raises(InvalidArgument, match="expected 1 <= horizon <= 254, got 255"):
        Workflow(runner_of(model, 3), TEXTS, RING, horizon=255)
    flow = Workflow(runner_of(model, 3), TEXTS, RING)
    with pytest.raises(InvalidArgument, match="agent: expected one of agent 0, .*, got 'nobody'"):
        flow.begin("nobody")
    with pytest.raises(InvalidArgument, match="agent: expected one that runs, got 'agent 0'"):
        flow.end(AGENTS[0])

"""Traces through the cache: what is read of them, Belady's by its definition, and the rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import run
from benchmarks.replay.belady import found_by_belady
from benchmarks.replay.flops import flops_of_prefix
from benchmarks.replay.through_cache import found_in_cache
from benchmarks.replay.told import Told
from benchmarks.replay.traces import Blocks, agents, mooncake, sessions_of
from made_traces import FORKS, mooncake_lines, prompts_of, trace_of

ORDERS = ("lru", "cost-aware", "s3-fifo", "lfu")


def found_by_definition(prompts: Sequence[Blocks], room: int) -> list[int]:
    """Belady's order, of all blocks anew at each prompt; of one prompt's the last goes first."""
    kept: set[int] = set()
    found = []
    for at, blocks in enumerate(prompts):
        gone = [block for block in blocks.tolist() if block not in kept]
        found.append(blocks.tolist().index(gone[0]) if gone else len(blocks))
        needed = {}
        for later in range(len(prompts) - 1, at, -1):
            for place, block in enumerate(prompts[later].tolist()):
                needed[block] = (later, place)
        kept = {block for block in kept | set(blocks.tolist()) if block in needed}
        kept = set(sorted(kept, key=lambda block: needed[block])[:room])
    return found


@given(FORKS, st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_belady_is_its_definition(forks: list[tuple[int, int, int]], room: int) -> None:
    prompts = prompts_of(forks)
    assert found_by_belady(prompts, room) == found_by_definition(prompts, room)


@given(FORKS, st.integers(12, 40), st.sampled_from(ORDERS))
@settings(max_examples=60, deadline=None)
def test_no_order_finds_more_than_belady(
    forks: list[tuple[int, int, int]], room: int, order: str
) -> None:
    prompts = prompts_of(forks)
    best = sum(found_by_belady(prompts, room))
    assert sum(found_in_cache(trace_of(prompts), room, order)) <= best
    for told in (Told(sessions=True), Told(plan=True), Told(sessions=True, plan=True)):
        assert sum(found_in_cache(trace_of(prompts), room, "cost-aware", told)) <= best


@given(FORKS, st.sampled_from(ORDERS))
@settings(max_examples=40, deadline=None)
def test_with_room_for_all_all_that_came_before_is_found(
    forks: list[tuple[int, int, int]], order: str
) -> None:
    """Whatever is told: what a session is done with is nobody else's."""
    prompts = prompts_of(forks)
    seen: set[int] = set()
    wanted = []
    for blocks in prompts:
        wanted.append(sum(1 for block in blocks.tolist() if block in seen))
        seen |= set(blocks.tolist())
    assert found_in_cache(trace_of(prompts), 300, order) == wanted
    told = Told(sessions=True, plan=True)
    assert found_in_cache(trace_of(prompts), 300, "cost-aware", told) == wanted
    assert found_by_belady(prompts, 300) == wanted


def test_sessions_are_told_by_what_prompts_share() -> None:
    """The second goes on with the first; the others share less than half with what was before."""
    prompts = [np.asarray(p, np.int32) for p in ([0, 1, 2], [0, 1, 3, 4], [0, 5, 6], [0, 5, 7])]
    assert sessions_of(prompts) == [0, 0, 1, 1]
    assert sessions_of([np.asarray(p, np.int32) for p in ([0, 1, 2, 3, 4], [0], [9])]) == [0, 1, 2]


def test_what_is_told_helps_where_chats_end() -> None:
    """Chats of two turns, one after the other, and one that is open all the time."""
    forks, own = [], np.arange(4, dtype=np.int32)
    fresh = 4
    for _ in range(30):
        chat = np.arange(fresh, fresh + 6, dtype=np.int32)
        fresh += 6
        forks += [chat[:4], chat]
    prompts = [own]
    for at, blocks in enumerate(forks):
        prompts += [blocks, own] if at % 4 == 3 else [blocks]
    trace, room = trace_of(prompts), 14
    plain = sum(found_in_cache(trace, room, "lru"))
    told = sum(found_in_cache(trace, room, "cost-aware", Told(sessions=True)))
    assert plain < told <= sum(found_by_belady(prompts, room))


def test_flops_are_those_of_each_row() -> None:
    """2 · weights a row, and 4 · D for each pair of row and key, head and layer."""
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    rows = [2 * 32 * weights + 4 * 32 * 32 * 128 * (at + 1) for at in range(5)]
    assert [flops_of_prefix(n) for n in (0, 1, 5)] == [0, rows[0], sum(rows)]


def session_line(requests: list[dict[str, Any]]) -> str:
    return json.dumps({"id": "one", "block_size": 64, "requests": requests}) + "\n"


def request(t: float, keep: int, *add: list[int], stop: str = "tool_use") -> dict[str, Any]:
    return {"t": t, "in": 1000, "stop": stop, "keep": keep, "add": list(add)}


def test_agents_blocks_are_joined_by_what_they_stand_for(tmp_path: Path) -> None:
    """Eight fine blocks are one, and so is what is left at a prompt's end."""
    path = tmp_path / "agentic_sessions.jsonl.gz"
    inner = {"type": "subagent", "t": 5.0, "requests": [request(1.0, 0, [100, 9])]}
    first = session_line([request(0.0, 0, [0, 12]), inner, request(9.0, 12, [12, 4], [50, 2])])
    with gzip.open(path, "wt") as file:
        file.write(first + session_line([request(0.0, 0, [0, 8], stop="end_turn")]))
    trace = agents(path, "two", hours=0.0)
    blocks = [(turn.session, turn.seconds, turn.blocks.tolist()) for turn in trace.turns]
    assert blocks == [
        (0, 0.0, [7, 11]),
        (1, 0.0, [109 + 7]),
        (0, 6.0, [107, 108]),
        (0, 9.0, [7, 15, 51]),
    ]
    assert [turn.calls for turn in trace.turns] == [True, False, True, True]
    assert len(agents(path, "one", hours=1.0, most=1).turns) == 3


def test_a_folder_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [[0, at, at + 1000, *range(at % 3)] for at in range(10, 60)]
    file = tmp_path / "mooncake_conversation_trace.jsonl"
    file.write_text(mooncake_lines([[*p, 5000 + at] for at, p in enumerate(prompts)]))
    trace = mooncake(file, "Mooncake, conversation")
    assert (len(trace.turns), trace.turns[3].seconds, trace.turns[0].tokens) == (50, 3.0, 2553)
    row = run.row_of(trace, 50)
    assert 0 <= row.value <= row.of["Belady"] <= 1
    assert row.of["of the gap: told of sessions"] <= 1
    assert 0 <= row.of["FLOPs spared: lru"] < 1
    assert run.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("Mooncake, conversation") == 3


def test_a_folder_without_traces_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main([str(tmp_path)])
    assert "expected traces in" in capsys.readouterr().err

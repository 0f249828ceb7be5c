"""Documents over a trace, and what a cache finds of them, by their definitions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import segments
from benchmarks.replay.overlay import Laid, Library, lay
from benchmarks.replay.segments import Found, found_by_prefix, found_with_segments
from benchmarks.replay.traces import Trace, owners
from made_traces import FORKS, mooncake_lines, prompts_of, trace_of

SMALL = Library(documents=5, least=1, most=3, share=0.8)


def laid(forks: Sequence[tuple[int, int, int]], library: Library = SMALL) -> list[Laid]:
    return lay(trace_of(prompts_of(forks)), library, seed=len(forks))


@given(FORKS)
@settings(max_examples=80, deadline=None)
def test_documents_take_the_place_of_what_is_a_sessions_own(
    forks: list[tuple[int, int, int]],
) -> None:
    trace = trace_of(prompts_of(forks))
    own, fresh = owners(trace), 1 + max(int(turn.blocks.max(initial=-1)) for turn in trace.turns)
    content: dict[int, int] = {}
    for turn, prompt in zip(trace.turns, laid(forks), strict=True):
        assert len(prompt.contents) == len(turn.blocks)
        inside = {at for start, end in prompt.documents for at in range(start, end)}
        for at, (block, now) in enumerate(
            zip(turn.blocks.tolist(), prompt.contents.tolist(), strict=True)
        ):
            assert (now >= fresh) == (at in inside)
            assert now == block or own[block] == turn.session
            assert content.setdefault(block, now) == now
        for start, end in prompt.documents:
            assert (np.diff(prompt.contents[start:end]) == 1).all()
            assert 1 <= end - start <= SMALL.most
    assert lay(trace, Library(share=0.0))[0].documents == []


def found_by_definition(prompts: Sequence[Laid]) -> Found:
    """With room for all: exact beginnings, documents that came before, and own text behind them."""
    begun: set[tuple[int, ...]] = set()
    known: set[tuple[int, ...]] = set()
    found = Found()
    for prompt in prompts:
        contents = tuple(prompt.contents.tolist())
        for start, end in prompt.documents:
            alone = contents[start:end]
            for at in range(1, len(alone) + 1):
                found.documents += alone[:at] in begun
            begun |= {alone[:at] for at in range(1, len(alone) + 1)}
        exact = prompt.documents[0][0] if prompt.documents else len(contents)
        found.prefix += sum(contents[:at] in begun for at in range(1, exact + 1))
        begun |= {contents[:at] for at in range(1, exact + 1)}
        if prompt.documents:
            tail = contents[prompt.documents[-1][1] :]
            heads = [tail[:at] for at in range(1, len(tail) + 1)]
            found.own += sum(head in known for head in heads)
            known |= set(heads)
    return found


@given(FORKS)
@settings(max_examples=60, deadline=None)
def test_with_room_for_all_documents_and_what_is_behind_them_are_found(
    forks: list[tuple[int, int, int]],
) -> None:
    prompts = laid(forks)
    found, wanted = found_with_segments(prompts, 600), found_by_definition(prompts)
    assert (found.prefix, found.documents, found.own) == (
        wanted.prefix,
        wanted.documents,
        wanted.own,
    )


@given(FORKS, st.integers(12, 60))
@settings(max_examples=40, deadline=None)
def test_without_documents_both_find_the_same(forks: list[tuple[int, int, int]], room: int) -> None:
    prompts = laid(forks, Library(share=0.0))
    assert found_with_segments(prompts, room) == found_by_prefix(prompts, room)


def test_rows_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sessions over a library of one document: its second reader finds it."""
    prompts = [list(range(10)), list(range(10, 20)), list(range(10, 22))]
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text(mooncake_lines(prompts))
    assert segments.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("Mooncake, conversation, ") == 3
    trace: Trace = next(iter(segments.traces_in(tmp_path)))
    row = segments.row_of(trace, 100, Library(documents=1, least=4, most=4))
    assert row.value == pytest.approx(10 / 32)
    assert row.of["documents, of all blocks"] == pytest.approx(12 / 32)
    assert row.of["documents found by segments"] == pytest.approx(8 / 32)
    assert row.of["with segments"] == pytest.approx((8 + 1 + 5) / 32)
    assert json.dumps(row.of)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        segments.main([str(tmp_path)])

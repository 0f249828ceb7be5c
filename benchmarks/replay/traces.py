"""Traces of real requests: which blocks each names, when, and in whose session.

Numbers of blocks are chained: each stands for its tokens and all before them. So a request finds
what it shares with earlier ones from its first block on.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]

BLOCK_TOKENS = 512
"""Tokens of a block here, as in Mooncake's files."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A request: the blocks of its prompt i32 [n], when it comes, and in whose session.

    `tokens`: of its prompt; the last block may be short. `calls`: whether its answer calls a tool,
    so that a program has the next turn.
    """

    seconds: float
    session: int
    blocks: Blocks
    tokens: int
    calls: bool = False


@dataclass(frozen=True)
class Trace:
    """Turns in the order in which they come."""

    name: str
    turns: Sequence[Turn]

    @property
    def unique(self) -> int:
        """Blocks that differ."""
        return len(np.unique(np.concatenate([turn.blocks for turn in self.turns])))

    @property
    def named(self) -> int:
        """Blocks of all prompts."""
        return sum(len(turn.blocks) for turn in self.turns)


def owners(trace: Trace) -> dict[int, int]:
    """The session that alone names each block; -1 of what several do."""
    owners: dict[int, int] = {}
    for turn in trace.turns:
        for block in turn.blocks.tolist():
            if owners.setdefault(block, turn.session) != turn.session:
                owners[block] = -1
    return owners


def opened(path: Path) -> TextIO:
    """A file of text, also one that gzip packed."""
    if path.suffix == ".gz":
        return cast("TextIO", gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def mooncake(path: Path, name: str) -> Trace:
    """A file of Mooncake (Qin et al., FAST 2025): a line a request, no word of sessions.

    A request goes on with the session of the one that shares most blocks with it, if these are at
    least half of that one's; else it begins a session.
    """
    lines = [json.loads(line) for line in opened(path)]
    prompts = [np.asarray(line["hash_ids"], np.int32) for line in lines]
    parts = zip(lines, prompts, sessions_of(prompts), strict=True)
    turns = [
        Turn(line["timestamp"] / 1e3, session, blocks, line["input_length"])
        for line, blocks, session in parts
    ]
    return Trace(name, turns)


def sessions_of(prompts: Sequence[Blocks]) -> list[int]:
    """The number of each prompt's session, told by the blocks that prompts share."""
    latest: dict[int, int] = {}
    sessions: list[int] = []
    for at, blocks in enumerate(prompts):
        numbers = blocks.tolist()
        shared = next((n for n in range(len(numbers), 0, -1) if numbers[n - 1] in latest), 0)
        before = latest[numbers[shared - 1]] if shared else None
        if before is not None and 2 * shared >= len(prompts[before]):
            sessions.append(sessions[before])
        else:
            sessions.append(max(sessions, default=-1) + 1)
        latest.update(dict.fromkeys(numbers, at))
    return sessions


def agents(path: Path, name: str, hours: float, most: int | None = None, seed: int = 0) -> Trace:
    """Sessions of agents, a line each, that begin at random within so many hours.

    Of each request `t` is the seconds since its session, or its sub-agent, began; `keep` the blocks
    of 64 tokens that it shares with the one before in its list, and `add` runs [first, count] of
    those behind them, whose numbers are the session's own; `in` its tokens, `stop` how its answer
    ended. A request of type `subagent` has a list of its own.
    """
    draws = np.random.default_rng(seed)
    turns: list[Turn] = []
    numbers = 0
    for session, line in enumerate(opened(path)):
        if session == most:
            break
        begin = draws.uniform(0, hours * 3600)
        told = json.loads(line)
        each = BLOCK_TOKENS // told["block_size"]
        ends = 0
        for seconds, fine, request in _requests(told["requests"]):
            # A block is known by the last of its parts, which stands for all before it.
            whole = np.arange(each - 1, len(fine), each)
            at = np.union1d(whole, [len(fine) - 1]) if len(fine) else whole
            calls = request["stop"] == "tool_use"
            blocks = (fine[at] + numbers).astype(np.int32)
            turns.append(Turn(begin + seconds, session, blocks, request["in"], calls))
            ends = max(ends, int(fine.max(initial=-1)) + 1)
        numbers += ends
    turns = [turn for turn in turns if len(turn.blocks)]
    return Trace(name, sorted(turns, key=lambda turn: turn.seconds))


def _requests(
    listed: Sequence[dict[str, Any]], begin: float = 0.0
) -> Iterator[tuple[float, npt.NDArray[np.int64], dict[str, Any]]]:
    """When each request comes, the numbers of its fine blocks, and what else is known of it."""
    before = np.zeros(0, np.int64)
    for request in listed:
        seconds = begin + request["t"]
        if "requests" in request:
            yield from _requests(request["requests"], seconds)
            continue
        added = [np.arange(first, first + count) for first, count in request["add"]]
        before = np.concatenate((before[: request["keep"]], *added))
        yield seconds, before, request

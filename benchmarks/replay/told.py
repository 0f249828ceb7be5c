"""What callers say of their prompts, as they would say it of a cache that evicts by cost.

All of it is known to whoever calls: that a session is closed, that its text was cut or a call of it
is not gone on with, that an answer calls a tool, whose program goes on with it sooner than a person
does as a rule, and who comes next where that is planned. Nobody says when a turn comes that is not
planned. Of what several sessions share nothing is said to be done.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.replay.belady import next_uses
from benchmarks.replay.traces import Trace, owners
from kvweave.cache import KvCache, KvRequest

AHEAD = 128
"""Turns ahead that a plan knows."""

CALL_S = 20.0
"""Seconds for which a text whose answer calls a tool is kept before those that wait for people."""

_STEPS = tuple(1 << power for power in range(AHEAD.bit_length()))


@dataclass(frozen=True)
class Told:
    """What is said.

    `sessions`: at a session's last turn that it is closed, at each turn what it has no more of the
    turn before, and at one that calls a tool that the next is near. `plan`: which turns come next,
    up to `AHEAD` of them.
    """

    sessions: bool = False
    plan: bool = False


class Teller:
    """Says it of the turns of one trace to one cache."""

    def __init__(self, told: Told, trace: Trace) -> None:
        self._told = told
        self._turns = trace.turns
        owned = owners(trace)
        # Where the blocks of each turn begin that its session alone names, and behind them those
        # that nobody names again.
        self._own, self._end, self._steps = [], [], []
        after = next_uses([turn.blocks for turn in trace.turns])
        for at, turn in enumerate(trace.turns):
            blocks = turn.blocks.tolist()
            mine = (place for place, block in enumerate(blocks) if owned[block] == turn.session)
            own = next(mine, len(blocks))
            self._own.append(own)
            live = after[at] < len(trace.turns)
            self._end.append(max(own, int(live.sum())))
            self._steps.append(int(after[at][own]) - at if live[own:].any() else 0)
        self._before: dict[int, int] = {}

    def before(self, at: int, cache: KvCache) -> None:
        """Says what is known when a turn has come."""
        cache.set_time(_milliseconds(self._turns[at].seconds))
        if self._told.plan:
            # As the turns come nearer they are ranked higher; the nearest is told of last.
            for steps in reversed(_STEPS):
                if at + steps < len(self._turns):
                    cache.advise(self._turns[at + steps].blocks, priority=_level(steps))

    def after(self, at: int, request: KvRequest, cache: KvCache) -> None:
        """Says what is known when a turn's answer has ended."""
        turn, own, end = self._turns[at], self._own[at], self._end[at]
        if self._told.sessions:
            self._cut(at, request, cache)
        level = _level(self._steps[at]) if self._told.plan else 0
        if self._told.plan:
            request.advise(own, end, priority=level)
            request.advise(end, len(turn.blocks))
        if self._told.sessions and turn.calls and level == 0:
            until = _milliseconds(turn.seconds + CALL_S)
            request.advise(own, len(turn.blocks), priority=1, until=until, past="plain")
        if self._told.sessions and end == own:
            request.advise(own, len(turn.blocks), hint="done")

    def _cut(self, at: int, request: KvRequest, cache: KvCache) -> None:
        """Says that what the session's turn before had, and no later one, is done."""
        session = self._turns[at].session
        before = self._before.get(session)
        self._before[session] = at
        if before is None:
            return
        blocks, end = self._turns[before].blocks, self._end[before]
        if end < len(blocks):
            cache.advise(blocks, hint="done")
            cache.advise(blocks[:end])


def _level(steps: int) -> int:
    """The priority of what is needed in so many steps: the power of two that they reach.

    It is above that of what waits for a tool; 0 where no plan knows of it.
    """
    return 2 + len(_STEPS) - steps.bit_length() if 1 <= steps <= AHEAD else 0


def _milliseconds(seconds: float) -> int:
    return int(1e3 * seconds)

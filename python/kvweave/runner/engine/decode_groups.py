"""`DecodeGroups`: which requests share a decode step; found anew when somebody comes or goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress

import numpy as np

from kvweave.runner.decode.decoding import Decoding, by_regime
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.engine.live_request import LiveRequest


class DecodeGroup:
    """Requests of one step, `lives`, and what decodes for each, `sequences`.

    `heard`: those whose tokens are looked at one by one, with their rows. All others are delivered
    and told of together: a step of many requests does next to nothing for each of them. Others of
    the last step may be `sitting_out`.
    """

    def __init__(
        self,
        sequences: Sequence[Decoding],
        lives: Sequence[LiveRequest],
        sitting_out: Sequence[Decoding] = (),
    ) -> None:
        self.sequences = sequences
        self.lives = lives
        self.sitting_out = sitting_out
        self.heard = [(row, live) for row, live in enumerate(lives) if not live.is_plain]
        self._plain = [(row, live) for row, live in enumerate(lives) if live.is_plain]
        self._rows = np.asarray([row for row, _ in self._plain], np.int64)
        self._handles = [live.handle for _, live in self._plain]
        self._adds = [handle.add for handle in self._handles]
        self._numbers = [handle.number for handle in self._handles]
        members = [live.answering.sequence for _, live in self._plain]
        self._left = np.asarray([sequence.remaining for sequence in members], np.int64)
        self._stops = np.asarray(sorted(set().union(*(s.stop for s in members))), np.int64)

    def without(self, those: Sequence[bool]) -> DecodeGroup:
        """The same of a step that those [B] sit out."""
        out, stay = list(compress(self.sequences, those)), [not one for one in those]
        sequences, lives = compress(self.sequences, stay), compress(self.lives, stay)
        return DecodeGroup(list(sequences), list(lives), out)

    def note(self, said: Int64) -> None:
        """Takes note of so many tokens of each, i64 [B], that were delivered one by one."""
        self._left -= said[self._rows]

    def deliver(self, chosen: Int64) -> tuple[list[int], list[LiveRequest]]:
        """Delivers the tokens i64 [B] of all that are not heard: their numbers, and who is done."""
        if not self._plain:
            return [], []
        said = chosen[self._rows]
        for add, token in zip(self._adds, said.tolist(), strict=True):
            add(token)
        for handle in self._handles:
            if handle.awaited:
                handle.tell()
        self._left -= 1
        last = self._left <= 0
        if len(self._stops):
            last |= np.isin(said, self._stops)
        ends = [self._plain[at][1] for at in np.flatnonzero(last).tolist()]
        return self._numbers, [
            live for live in ends if live.answering.sequence.done and not live.handle.ended
        ]


class Grouped:
    """The requests of a plan in groups that share a step, once these are found.

    `given` are those of them whose prompts are their callers'.
    """

    def __init__(self, numbers: Int64) -> None:
        self.numbers = numbers
        self.groups: Sequence[DecodeGroup] = ()
        self.given: Sequence[LiveRequest] = ()


class DecodeGroups:
    """The groups of a plan: those of the plan before as long as it names the same requests."""

    def __init__(self) -> None:
        self._last: Grouped | None = None

    def of(self, numbers: Int64, known: Mapping[int, LiveRequest]) -> Grouped:
        """The requests of these numbers that go on, by what can share a step.

        Whoever leaves meanwhile is in it still: what was planned for all others is carried out.
        """
        last = self._last
        if last is not None and np.array_equal(numbers, last.numbers):
            return last
        # First, so that whoever forgets meanwhile is heard.
        found = self._last = Grouped(numbers)
        named = map(known.get, numbers.tolist())
        lives = [live for live in named if live is not None and not live.handle.ended]
        answering = {live.answering.sequence: live for live in lives}
        found.given = [live for live in lives if live.given]
        found.groups = [
            DecodeGroup(some, [answering[sequence] for sequence in some])
            for some in by_regime(list(answering))
        ]
        return found

    def going_on(
        self, group: DecodeGroup, sits: Sequence[bool], not_done: Callable[[int], object]
    ) -> DecodeGroup:
        """A group without those that sit the step out, unless all should: then it waits for them.

        `sits` [B], or empty where nobody does. They are `not_done` in this step, by their numbers.
        """
        if not sits or all(sits):
            return group
        for live in compress(group.lives, sits):
            not_done(live.handle.number)
        # What the group counts of each is of steps that all take.
        self.forget()
        return group.without(sits)

    def forget(self) -> None:
        """Lets go of all, as somebody has left. From any thread."""
        self._last = None

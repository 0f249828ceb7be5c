"""`Workflow`: agents that call each other, and whose text is kept because it is soon their turn.

What an agent's prompts begin with is the same at each of its steps, and by the time it is its turn
again others have computed theirs: the least recently used text is then the very one that is needed
next. A workflow knows who comes next. It ranks each agent's text by the fewest steps until its
agent may run (KVFlow, section 4), and has the cache give up what is needed latest.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from kvweave.arguments import shown, whole
from kvweave.closing import Closing
from kvweave.errors import InvalidArgument
from kvweave.runner.prompt import Prompt
from kvweave.runner.tiers.ahead import Ahead

if TYPE_CHECKING:
    from kvweave.runner.runner import Runner

HORIZON = 32
"""Steps ahead that count: what is needed later is kept as any other text is."""

_HIGHEST = 255


class Workflow(Closing):
    """Agents of one runner, and who may come behind whom; a context manager.

    `texts`: what the prompts of each agent begin with, as `Runner.generate` takes it; the documents
    that are marked in it are kept with it. `then`: of each agent those that may run when it is
    done, itself among them where it may run again; agents that are not in it come last. `horizon`:
    so many steps ahead are looked at.

    The runner's cache follows it where it has `eviction="cost-aware"`. What was said of a text
    holds for whoever else begins with it in that namespace, and ends with the workflow. Documents
    that are marked in the text of whoever may come next are fetched meanwhile, where the runner has
    tiers: read while others run, and brought to the device between steps. From any thread.

    # Errors
    `InvalidArgument` for a runner of another eviction, no agents, or agents without a text; as
    `Runner.generate` for texts.
    """

    def __init__(
        self,
        runner: Runner,
        texts: Mapping[str, Prompt],
        then: Mapping[str, Sequence[str]],
        *,
        namespace: str = "",
        horizon: int = HORIZON,
    ) -> None:
        if runner.eviction != "cost-aware":
            got = shown(runner.eviction)
            raise InvalidArgument(f"runner: expected eviction='cost-aware', got {got}")
        if not texts:
            raise InvalidArgument("texts: expected those of some agents, got none")
        named = [*then, *(name for names in then.values() for name in _names(names))]
        unknown = next((name for name in named if name not in texts), None)
        if unknown is not None:
            known = ", ".join(map(str, texts))
            raise InvalidArgument(f"then: expected agents of {known}, got {shown(unknown)}")
        self._runner = runner
        self._namespace = namespace
        self._horizon = whole("horizon", horizon, 1, _HIGHEST - 1)
        self._then = {name: tuple(then.get(name, ())) for name in texts}
        self._texts = {name: runner.prompts.tokenize(text) for name, text in texts.items()}
        self._lock = threading.Lock()
        # What follows is read and written by whoever has the lock.
        self._running: Counter[str] = Counter()
        # Agents that are done, and behind which nobody has begun.
        self._done: set[str] = set()
        # Documents of agents that may come next.
        self._ahead: dict[str, Ahead] = {}

    def __repr__(self) -> str:
        steps = (f"{name}={steps}" for name, steps in self.steps().items())
        return f"Workflow({', '.join(steps)})"

    # ---- what happens ---------------------------------------------------------------------

    @contextmanager
    def step(self, agent: str) -> Iterator[None]:
        """An agent's step: `begin` before it and `end` behind it."""
        self.begin(agent)
        try:
            yield
        finally:
            self.end(agent)

    def begin(self, agent: str) -> None:
        """Says that an agent runs from now on; several may at once.

        # Errors
        `InvalidArgument` for an agent that is not of the workflow.
        """
        self._expect(agent)
        with self._lock:
            self._done -= {name for name in self._done if agent in self._then[name]} | {agent}
            self._running[agent] += 1
            self._tell()
            self._fetch()

    def end(self, agent: str) -> None:
        """Says that an agent is done.

        # Errors
        `InvalidArgument` for one that does not run.
        """
        self._expect(agent)
        with self._lock:
            if agent not in self._running:
                raise InvalidArgument(f"agent: expected one that runs, got {shown(agent)}")
            self._running -= Counter([agent])
            self._done.add(agent)
            self._tell()
            self._fetch()

    def steps(self) -> dict[str, int | None]:
        """The fewest steps until each agent may run: 0 while it does, None where it never does."""
        with self._lock:
            return self._steps()

    def _steps(self) -> dict[str, int | None]:
        found: dict[str, int | None] = dict.fromkeys(self._texts)
        found.update(dict.fromkeys(self._running, 0))
        front = {*self._running, *self._done}
        for steps in range(1, len(self._texts) + 1):
            front = {name for before in front for name in self._then[before]}
            for name in front:
                known = found[name]
                found[name] = steps if known is None else min(known, steps)
        return found

    def close(self) -> None:
        """Has the texts kept as any other; safe to call twice."""
        with self._lock:
            self._running.clear()
            self._done.clear()
            self._tell()
            self._fetch()

    # ---- what the cache is told -----------------------------------------------------------

    def _tell(self) -> None:
        """Ranks all texts. Of those that agents share, the soonest counts: it is told last."""
        steps = self._steps()
        for name in sorted(steps, key=lambda name: (self._priority(steps[name]), name)):
            self._rank(name, steps[name])

    def _priority(self, steps: int | None) -> int:
        return 0 if steps is None or steps > self._horizon else _HIGHEST - steps

    def _fetch(self) -> None:
        """Has the documents of who may come next read, and those that were read brought.

        Nobody waits for it: whose are not there when its prompt comes reads them as any prompt.
        """
        steps = self._steps()
        for name, ahead in self._ahead.items():
            if steps[name] in (0, 1) and ahead.is_read:
                ahead.bring_soon(partial(self._rank, name, steps[name]))
            elif steps[name] != 1:
                ahead.release()
        coming = sorted(name for name, count in steps.items() if count == 1)
        fetched = () if self._runner.tiers is None else coming
        known = self._ahead
        self._ahead = {
            name: known.get(name) or self._runner.ahead(self._texts[name], self._namespace)
            for name in fetched
        }

    def _rank(self, name: str, steps: int | None) -> None:
        priority = self._priority(steps)
        self._runner.advise(self._texts[name], self._namespace, priority=priority)

    def _expect(self, agent: str) -> None:
        if agent not in self._texts:
            known = ", ".join(map(str, self._texts))
            raise InvalidArgument(f"agent: expected one of {known}, got {shown(agent)}")


def _names(names: Sequence[str]) -> Sequence[str]:
    """Who comes next, as a list of names: a name by itself is none."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidArgument(f"then: expected lists of agents, got {shown(names)}")
    return names

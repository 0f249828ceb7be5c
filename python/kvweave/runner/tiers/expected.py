"""`Expected`: the documents of a prompt that waits, and what is being read for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvweave.runner.tiers.loads import Load, Wanted


@contextmanager
def releasing_on_error(expected: Expected | None) -> Iterator[None]:
    """Gives back what was read for a prompt that is refused."""
    try:
        yield
    except BaseException:
        if expected is not None:
            expected.release()
        raise


class Expected:
    """What a prompt's documents are to come from, decided when it came; any thread.

    `patience_s`: how long its reads are waited for, from the first time that anybody asks whether
    they are done; behind it what was not read is computed. Whoever has one releases it in the end.
    """

    def __init__(self, wanted: Sequence[Wanted], loads: Sequence[Load], patience_s: float) -> None:
        self.wanted = list(wanted)
        self._loads = list(loads)
        self._patience_s = patience_s
        self._asked: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether nothing more is waited for; what was read stays then until it is released."""
        return self._is_done()

    @property
    def is_begun(self) -> bool:
        """The same of what arrives layer by layer, which need only have been opened."""
        return self._is_done(begun=True)

    @property
    def is_read(self) -> bool:
        """Whether nothing more is being read, for who does not wait."""
        return all(load.ended for load in self._loads)

    @property
    def is_late(self) -> bool:
        """Whether reads did not end in time."""
        return not self.is_read and self._left_s() <= 0

    def wait(self, most_s: float | None = None, *, begun: bool = False) -> float:
        """Waits until it is ready, or `begun`, or so long; returns the seconds that it took.

        `begun`: what arrives layer by layer has been opened, and all else been read.
        """
        start = time.perf_counter()
        while not self._is_done(begun):
            left = self._left_s() if most_s is None else min(most_s, self._left_s())
            for load in self._loads:
                if not load.wait(left, begun=begun):
                    break
            if most_s is not None:
                break
        return time.perf_counter() - start if self._loads else 0.0

    def wait_for(self, want: Wanted, layers: int) -> bool:
        """Waits until so many layers of a document are there; False if they will not be in time."""
        loads = [load for load in self._loads if load.is_of(want)]
        return all(load.wait_for(want, layers, self._left_s()) for load in loads)

    def release(self) -> None:
        """Gives back what was read; safe to call twice."""
        for load in self._loads:
            load.release()

    def _is_done(self, begun: bool = False) -> bool:
        left = self._left_s()
        # Each is asked: what was read of one is kept while another is waited for.
        taken = [load.take_begun() if begun else load.take() for load in self._loads]
        return all(taken) or left <= 0

    def _left_s(self) -> float:
        """Seconds that are left of its patience."""
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            for load in self._loads:
                load.hurry()
        return self._patience_s - (now - self._asked)

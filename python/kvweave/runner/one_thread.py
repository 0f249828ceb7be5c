"""`OneThread`: a runner computes in one thread at a time, and says so to a second one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from kvweave.errors import AlreadyStepping


class OneThread:
    """A context in which its thread computes, and may enter again; no other thread gets in.

    Nobody waits in front of it: a thread that enters while another is inside, or while another has
    claimed it, gets `AlreadyStepping`. Whoever has many threads lets them submit to one that steps,
    see `Runner.serve`. What has to be done by whoever computes is left to it with `soon`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Both are read and written by whoever has the lock.
        self._depth = 0
        self._claimed: threading.Thread | None = None
        self._left: deque[Callable[[], None]] = deque()

    def claim(self) -> None:
        """Keeps all other threads out until `disclaim`, also while this one is outside."""
        with self:
            self._claimed = threading.current_thread()

    def disclaim(self) -> None:
        """Lets others in again."""
        with self:
            self._claimed = None

    def soon(self, work: Callable[[], None]) -> None:
        """Does something while nobody computes: now, or when the one who does is out. Any thread.

        Each piece of work is done once, by whichever thread comes to it.
        """
        self._left.append(work)
        self._do_what_is_left()

    def _do_what_is_left(self) -> None:
        while self._left and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return
                while self._left:
                    self._left.popleft()()
            finally:
                self._lock.release()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise _taken()
        if self._claimed not in (None, threading.current_thread()):
            self._lock.release()
            raise _taken()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        self._lock.release()
        self._do_what_is_left()


def _taken() -> AlreadyStepping:
    return AlreadyStepping(
        "runner: expected one that no other thread computes with, got one that another does; "
        "submit to what Runner.serve returns"
    )

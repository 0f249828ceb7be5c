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
    see `Runner.serve`. What has to be done by whoever computes is left to it with `soon`; such work
    is short, and a thread that enters while another does it waits for its end. `at_end` is called
    whenever a thread has computed, or has done what was left, while it still keeps others out.
    """

    def __init__(self) -> None:
        self.at_end: Callable[[], None] = _nothing
        # Re-entrant: work may be left by a finalizer, which runs in the middle of anything.
        self._changed = threading.Condition()
        # What follows is read and written by whoever has `_changed`.
        self._inside: threading.Thread | None = None
        self._depth = 0
        self._claimed: threading.Thread | None = None
        self._clearing: threading.Thread | None = None
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
        # Whoever leaves work while another thread is at it may go: that thread looks once more.
        while self._left:
            with self._changed:
                if self._inside is not None or self._clearing is not None:
                    return
                self._clearing = threading.current_thread()
            try:
                while self._left:
                    self._left.popleft()()
                self.at_end()
            finally:
                with self._changed:
                    self._clearing = None
                    self._changed.notify_all()

    def __enter__(self) -> None:
        this = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._clearing in (None, this))
            if self._inside not in (None, this) or self._claimed not in (None, this):
                raise AlreadyStepping(
                    "runner: expected one that no other thread computes with, got one that another "
                    "does; submit to what Runner.serve returns"
                )
            self._inside = this
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._depth == 1:
                self.at_end()
        finally:
            with self._changed:
                self._depth -= 1
                if self._depth == 0:
                    self._inside = None
        self._do_what_is_left()


def _nothing() -> None:
    pass

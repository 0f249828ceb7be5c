"""`EngineRequest`: what a caller holds of a request that an engine answers."""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal

from kvweave.errors import Cancelled, KvweaveError
from kvweave.runner.report import Generation, StreamedToken

Outcome = Literal["finished", "cancelled", "failed"]


class EngineRequest:
    """A request of an engine: its tokens as they come, and its answer once it has ended.

    All of it may be called from any thread. Tokens that nobody takes wait here, at most
    `max_new_tokens` of them: a consumer that stops reading stops nobody else, and memory is bounded
    by what it has asked for. `outcome` is None until the request has ended. `number` is the
    engine's name for it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcome: Outcome | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._unread: deque[StreamedToken] = deque()
        self._said: list[int] = []
        self._answer: Generation | None = None
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether it has finished, failed or been cancelled."""
        return self._ended.is_set()

    @property
    def tokens(self) -> list[int]:
        """All tokens said so far, taken or not."""
        with self._lock:
            return list(self._said)

    def take(self) -> list[StreamedToken]:
        """The tokens that came since the last call, each once.

        Their texts are empty unless the request was submitted with `streamed`.
        """
        with self._lock:
            new = list(self._unread)
            self._unread.clear()
            return new

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, at most `timeout` seconds: whether it has come.

        Somebody else has to step the engine meanwhile.
        """
        return self._ended.wait(timeout)

    def result(self) -> Generation:
        """The whole answer.

        # Errors
        What ended the request, if that was an error: `PoolFull` where no room can be had for it,
        or what its policy or sampling raised. `Cancelled` for one that was; `KvweaveError` for one
        that has not ended.
        """
        if self._error is not None:
            raise self._error
        if self._answer is None:
            raise KvweaveError(
                f"request {self.number}: expected one that has ended, got one that goes on"
            )
        return self._answer

    # ---- the engine's side ----------------------------------------------------------------

    def deliver(self, token: StreamedToken) -> bool:
        """Adds a token, unless the request has ended: whether it was added."""
        with self._lock:
            if self.outcome is not None:
                return False
            self._said.append(token.token)
            self._unread.append(token)
            return True

    def end(self, outcome: Outcome, got: Generation | BaseException | None = None) -> bool:
        """Ends it once: whether this was the call that did."""
        with self._lock:
            if self.outcome is not None:
                return False
            if isinstance(got, Generation):
                self._answer = got
            else:
                self._error = got or Cancelled(f"request {self.number}: was cancelled")
            self.outcome = outcome
            self._ended.set()
            return True

"""`HeldBack`: an answer whose tokens come later than they could, so that their time says less."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvweave.runner.report import Generation, StreamedToken
from kvweave.runner.serve.served_request import ServedRequest


@dataclass(frozen=True)
class TenantAnswer:
    """What a tenant is told of an answer: nothing of where its KV lay, nor of who else is there."""

    text: str
    tokens: list[int]
    stopped: bool


class HeldBack:
    """A request of a tenant. All tokens, and the end, come by the same time later.

    That time is chosen when the first token is there: so much that it comes at a multiple of
    `quantum_s` behind the request. Without a quantum nothing is held back.
    """

    def __init__(
        self,
        request: ServedRequest,
        quantum_s: float | None,
        count: Callable[[Generation], None],
    ) -> None:
        self._request = request
        self._quantum = quantum_s
        self._count: Callable[[Generation], None] | None = count
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._times: list[float] = []
        self._end: float | None = None
        self._taken = 0
        if quantum_s is not None:
            request.listen(self._note, tokens=True)

    def __iter__(self) -> Iterator[StreamedToken]:
        """The tokens as they are handed out, with what each adds to the text.

        # Errors
        Behind the last token, what `result` raises.
        """
        for token in self._request:
            with self._lock:
                place, self._taken = self._taken, self._taken + 1
            self._wait_for(place)
            yield token
        self.result()

    def result(self, timeout: float | None = None) -> TenantAnswer:
        """The whole answer, waited for at most `timeout` seconds, and what it is held back.

        # Errors
        As `ServedRequest.result`.
        """
        done = self._request.result(timeout)
        self._wait_for(None)
        with self._lock:
            count, self._count = self._count, None
        if count is not None:
            count(done)
        return TenantAnswer(done.text, done.tokens, done.stopped)

    def cancel(self) -> bool:
        """Ends it, in whatever state it is; whether it had not ended yet."""
        return self._request.cancel()

    def _note(self) -> None:
        """Notes when tokens came, and the end; by whoever sees them first."""
        now = time.monotonic()
        with self._lock:
            self._times += [now] * (len(self._request.tokens) - len(self._times))
            if self._end is None and self._request.outcome is not None:
                self._end = now

    def _wait_for(self, place: int | None) -> None:
        """Waits until the token of that place may be seen; without one, until the end may be."""
        if self._quantum is None:
            return
        # Who waits for a token may see it before the listener is told of it.
        self._note()
        with self._lock:
            first = self._times[0] if self._times else self._end or self._begun
            came = self._end if place is None else self._times[place]
        waited = first - self._begun
        later = math.ceil(waited / self._quantum) * self._quantum - waited
        time.sleep(max(0.0, (came or first) + later - time.monotonic()))

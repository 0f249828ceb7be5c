"""`EngineRequest`: what a caller holds of a request that an engine answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from kvweave.errors import Cancelled, KvweaveError
from kvweave.runner.report import Generation, StreamedToken

Outcome = Literal["finished", "cancelled", "failed"]


class EngineRequest:
    """A request of an engine: its tokens as they come, and its answer once it has ended.

    All of it may be called from any thread. Tokens that nobody takes wait here, at most
    `max_new_tokens` of them, or `unread` where that was said: a consumer that stops reading stops
    nobody else, and memory is bounded by what it has asked for. `outcome` is None until the request
    has ended. `number` is the engine's name for it, `most_unread` what `unread` said.
    """

    def __init__(self, number: int, unread: int | None = None) -> None:
        self.number = number
        self.outcome: Outcome | None = None
        self.most_unread = unread
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        # Whether anybody is told of tokens as they come: who waits, and who listens.
        self.awaited = 0
        self._said: list[int] = []
        # What each token added to the text, where there are any; taken are the first so many.
        self._texts: list[str] = []
        self._taken = 0
        self._answer: Generation | None = None
        self._error: BaseException | None = None
        self._listener: Callable[[], None] | None = None
        self._tells_tokens = False

    def __repr__(self) -> str:
        state = self.outcome or "live"
        return f"EngineRequest({self.number}, {state}, tokens={len(self.tokens)})"

    @property
    def ended(self) -> bool:
        """Whether it has finished, failed or been cancelled."""
        return self.outcome is not None

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
            return self._take(len(self._said) - self._taken)

    def take_next(self, timeout: float | None = None) -> StreamedToken | None:
        """The next token, waited for at most `timeout` seconds; None if none came, or the end did.

        Somebody else has to step the engine meanwhile.
        """
        with self._lock:
            self._wait_for(lambda: len(self._said) > self._taken or self.ended, timeout)
            new = self._take(1)
            return new[0] if new else None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, at most `timeout` seconds: whether it has come.

        Somebody else has to step the engine meanwhile.
        """
        with self._lock:
            return self._wait_for(lambda: self.ended, timeout)

    def _take(self, most: int) -> list[StreamedToken]:
        begin, end = self._taken, min(self._taken + most, len(self._said))
        self._taken = end
        texts = self._texts[begin:end] or [""] * (end - begin)
        return list(map(StreamedToken, self._said[begin:end], texts))

    def _wait_for(self, says: Callable[[], bool], timeout: float | None) -> bool:
        self._waiting += 1
        self.awaited += 1
        try:
            return self._changed.wait_for(says, timeout)
        finally:
            self._waiting -= 1
            self.awaited -= 1

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

    def listen(self, listener: Callable[[], None], *, tokens: bool) -> None:
        """Has something called when it ends, with `tokens` at each token as well, and once now.

        It is called by the thread that steps, or cancels, and must neither wait nor raise.
        """
        with self._lock:
            self.awaited += tokens - self._tells_tokens
            self._listener, self._tells_tokens = listener, tokens
        listener()

    # ---- the engine's side ----------------------------------------------------------------

    def deliver(self, token: int, text: str | None) -> bool:
        """Adds a token, and what it adds to the text, unless the request has ended: whether so.

        The text is None for each token of a request whose text nobody wants.
        """
        with self._lock:
            if self.outcome is not None:
                return False
            self._said.append(token)
            if text is not None:
                self._texts.append(text)
        if self.awaited:
            self.tell()
        return True

    @property
    def add(self) -> Callable[[int], None]:
        """Adds a token where nobody wants text, and tells nobody: for who calls `tell` then.

        It holds until the request ends. What is added later is not seen.
        """
        return self._said.append

    def tell(self) -> None:
        """Tells those who wait, and the listener if it wants tokens, that there are new ones.

        Whoever begins to wait later looks first.
        """
        with self._lock:
            self._changed.notify_all()
        if self._tells_tokens:
            self._tell_listener()

    @property
    def behind(self) -> Cancelled | None:
        """What is said of a reader that lets more tokens wait than may; None of others."""
        most = self.most_unread
        if most is None or (waiting := len(self._said) - self._taken) <= most:
            return None
        return Cancelled(
            f"request {self.number}: expected a reader at most {most} tokens behind, got {waiting}"
        )

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
            # A token that is just being added comes too late.
            self._said = self._said.copy()
            self._changed.notify_all()
        self._tell_listener()
        return True

    def _tell_listener(self) -> None:
        if (listener := self._listener) is not None:
            listener()

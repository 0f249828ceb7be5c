"""`ServedRequest`: what a caller holds of a request of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvweave.closing import Ending
from kvweave.runner.engine.engine import Engine
from kvweave.runner.engine.engine_request import EngineRequest, Outcome
from kvweave.runner.report import Generation, StreamedToken


class ServedRequest(Ending):
    """A request that a server answers: iterate over its tokens, or wait for its answer.

    All of it may be called from any thread; a token goes to one of those that iterate. Leaving its
    `with` block cancels what has not ended.
    """

    def __init__(self, engine: Engine, request: EngineRequest) -> None:
        self._engine = engine
        self._request = request

    def __repr__(self) -> str:
        number, said = self._request.number, len(self.tokens)
        return f"ServedRequest({number}, {self.state}, tokens={said})"

    @property
    def outcome(self) -> Outcome | None:
        """How it ended: "finished", "cancelled" or "failed"; None while it goes on."""
        return self._request.outcome

    @property
    def state(self) -> str:
        """Where it stands: "waiting", "prefilling", "decoding", or how it has ended."""
        return self._engine.state(self._request)

    @property
    def tokens(self) -> list[int]:
        """All tokens said so far, read or not."""
        return self._request.tokens

    def __iter__(self) -> Iterator[StreamedToken]:
        """The tokens as they come, with what each adds to the text, until the answer has ended.

        # Errors
        Behind the last token, what `result` raises.
        """
        while (token := self._request.take_next()) is not None:
            yield token
        self._request.result()

    def result(self, timeout: float | None = None) -> Generation:
        """The whole answer, waited for at most `timeout` seconds.

        # Errors
        As `EngineRequest.result`; `TimeoutError` where it has not ended by then: it goes on.
        """
        if not self._request.wait(timeout):
            raise TimeoutError(f"request {self._request.number}: expected its end, got none yet")
        return self._request.result()

    def take(self) -> list[StreamedToken]:
        """The tokens that nobody has read yet; it waits for none."""
        return self._request.take()

    def listen(self, listener: Callable[[], None], *, tokens: bool) -> None:
        """Has something called when it ends, and with `tokens` at each token: see there."""
        self._request.listen(listener, tokens=tokens)

    def cancel(self) -> bool:
        """Ends it, in whatever state it is; whether it had not ended yet."""
        return self._engine.cancel(self._request)

    def _end_of_block(self) -> None:
        self.cancel()

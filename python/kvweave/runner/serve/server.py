"""`Server`: an engine that a thread of its own steps, for callers in any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from kvweave.closing import Closing
from kvweave.errors import AlreadyStepping, Cancelled, InvalidArgument
from kvweave.policies import Policy
from kvweave.runner.engine.engine import Engine
from kvweave.runner.engine.engine_request import EngineRequest
from kvweave.runner.one_thread import OneThread
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import Prompt
from kvweave.runner.serve.exposition import Exposition
from kvweave.runner.serve.served_request import ServedRequest
from kvweave.runner.serve.submission import HowToAnswer, Submission

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Result = TypeVar("_Result")
_RETRY_S = 0.01
"""How soon an engine is asked again that found nothing to do: others hold the arena."""


class Server(Closing):
    """Answers requests until it is closed, made by `Runner.serve`; a context manager.

    Everything here may be called from any thread. The server's own thread alone computes: until the
    server is closed the runner's own calls that compute raise `AlreadyStepping` in every other
    thread, and are for `call`, which has them made between two steps.

    Tokens wait with their request, so that a reader that stops reading keeps nobody else waiting;
    with `unread` its request is cancelled once so many wait.
    """

    def __init__(self, engine: Engine, computing: OneThread) -> None:
        self._engine = engine
        self._computing = computing
        self._news = threading.Condition()
        # What follows is read and written by whoever has `_news`.
        self._is_news = False
        self._closing = False
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._error: BaseException | None = None
        begun = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(begun,), name="kvweave server", daemon=True
        )
        self._thread.start()
        begun.wait()
        if isinstance(self._error, AlreadyStepping):
            raise self._error

    def __repr__(self) -> str:
        return f"Server({'closed' if self._closing else f'live={self.live}'})"

    def submit(
        self, prompt: Prompt, policy: str | Policy | None = None, **how: Unpack[Submission]
    ) -> ServedRequest:
        """A request that waits from now on, with the arguments of `Engine.submit`.

        Its text is streamed unless it says `streamed=False`.

        # Errors
        As `Engine.submit`; `InvalidArgument` for a server that was closed.
        """
        how.setdefault("streamed", True)
        return self._entered(lambda: self._engine.submit(prompt, policy, **how))

    def submit_prefilled(self, done: Prefill, **how: Unpack[HowToAnswer]) -> ServedRequest:
        """Decodes on from a prompt that the same runner has prefilled: `Engine.submit_prefilled`.

        # Errors
        As that; `InvalidArgument` for a server that was closed.
        """
        how.setdefault("streamed", True)
        return self._entered(lambda: self._engine.submit_prefilled(done, **how))

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Does something in the server's thread, between two steps, and returns what that returns.

        It is for what computes with the runner, such as `runner.insert` or `runner.prefill`, and
        holds all requests up meanwhile.

        # Errors
        What the work raises; `InvalidArgument` for a server that was closed, `Cancelled` where it
        is closed before the work has begun.
        """
        if threading.current_thread() is self._thread:
            return work()
        return self.call_soon(work).result()

    def call_soon(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Like `call`, for who does not wait."""
        future: Future[_Result] = Future()
        with self._news:
            self._check_open()
            self._calls.append((work, future))
            self._news.notify_all()
        return future

    def cancel(self, request: ServedRequest) -> bool:
        """Ends a request, in whatever state it is; whether it had not ended yet."""
        return request.cancel()

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return self._engine.live

    def metrics(self) -> dict[str, int]:
        """The scheduler's counts: queue depths, waits, preemptions."""
        return self._engine.metrics()

    def metrics_text(self) -> str:
        """All that the runner counts, of all namespaces, in the text format of Prometheus."""
        return self._engine.metrics_text()

    def expose(self, port: int = 0, host: str = "127.0.0.1") -> Exposition:
        """Answers `GET /metrics` with `metrics_text` until it is closed: see `Exposition`.

        # Errors
        `InvalidArgument` for an address that cannot be listened on.
        """
        return Exposition(self.metrics_text, port, host)

    def close(self) -> None:
        """Cancels whatever has not ended, and ends the thread. Safe to call twice.

        # Errors
        What ended the thread before, if that was an error and nobody has been told.
        """
        with self._news:
            self._closing = True
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def _check_open(self) -> None:
        if self._closing:
            raise InvalidArgument("server: expected an open one, got one that was closed")

    def _entered(self, enter: Callable[[], EngineRequest]) -> ServedRequest:
        with self._news:
            self._check_open()
        request = enter()
        with self._news:
            # The thread may have cancelled all others meanwhile.
            if self._closing:
                self._engine.cancel(request)
            self._check_open()
            self._is_news = True
            self._news.notify_all()
        return ServedRequest(self._engine, request)

    # ---- the server's thread --------------------------------------------------------------

    def _serve(self, begun: threading.Event) -> None:
        try:
            self._computing.claim()
        except AlreadyStepping as taken:
            self._error, self._closing = taken, True
            return
        finally:
            begun.set()
        error: BaseException | None = None
        try:
            goes_on = False
            while self._wait(goes_on):
                self._make_calls()
                goes_on = self._engine.live > 0 and self._engine.step()
        except BaseException as raised:
            error = raised
        finally:
            with self._news:
                self._closing, self._error = True, error
            self._engine.close(error)
            self._computing.disclaim()
            self._drop_calls()

    def _wait(self, goes_on: bool) -> bool:
        """Waits for something to do; False once the server is to end."""
        with self._news:
            if not goes_on:
                timeout = _RETRY_S if self._engine.live else None
                self._news.wait_for(self._has_work, timeout)
            self._is_news = False
            return not self._closing

    def _has_work(self) -> bool:
        return self._closing or self._is_news or bool(self._calls)

    def _make_calls(self) -> None:
        while self._calls:
            with self._news:
                work, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _drop_calls(self) -> None:
        with self._news:
            left, self._calls = self._calls, deque()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(Cancelled("call: the server was closed before it was made"))

"""`AsyncRunner`: a runner for asyncio: answers to await, and tokens to iterate over."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument
from kvweave.policies import Policy
from kvweave.runner.prompt import Prompt
from kvweave.runner.report import Generation, StreamedToken
from kvweave.runner.runner import Runner
from kvweave.runner.serve.served_request import ServedRequest
from kvweave.runner.serve.submission import Submission

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Result = TypeVar("_Result")


class AsyncRunner:
    """Serves a runner to the tasks of one event loop; use it in an `async with` block, or close it.

    Options as for `Runner.serve`. A thread of its own computes, and the loop never waits for it:
    see `Server` for what the runner's own calls may do meanwhile. A task that is cancelled, or that
    leaves off iterating and closes the iterator, has its request cancelled; its blocks are given
    back at the end of the step that goes on.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        token_budget: int | None = 8192,
        chunk_tokens: int | None = 2048,
        max_running: int | None = 256,
        order: str = "arrival",
    ) -> None:
        if not isinstance(runner, Runner):
            raise InvalidArgument(f"runner: expected a Runner, got {shown(runner)}")
        self._server = runner.serve(
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            order=order,
        )
        self._wakes: _Wakes | None = None

    def __repr__(self) -> str:
        return f"AsyncRunner({self._server!r})"

    async def generate(
        self, prompt: Prompt, policy: str | Policy | None = None, **how: Unpack[Submission]
    ) -> Generation:
        """The answer to a prompt, with the arguments of `Engine.submit`.

        # Errors
        As `Server.submit` and `EngineRequest.result`.
        """
        how.setdefault("streamed", False)
        news = asyncio.Event()
        request = await self._submitted(prompt, policy, how)
        try:
            request.listen(self._wakes_of_loop().waker(news), tokens=False)
            while request.outcome is None:
                await news.wait()
                news.clear()
            return request.result()
        finally:
            request.cancel()

    async def stream(
        self, prompt: Prompt, policy: str | Policy | None = None, **how: Unpack[Submission]
    ) -> AsyncIterator[StreamedToken]:
        """The tokens of an answer as they come, with what each adds to the text.

        # Errors
        As for `generate`, behind the last token.
        """
        news = asyncio.Event()
        request = await self._submitted(prompt, policy, how)
        try:
            request.listen(self._wakes_of_loop().waker(news), tokens=True)
            while True:
                ended = request.outcome is not None
                for token in request.take():
                    yield token
                if ended:
                    break
                await news.wait()
                news.clear()
            request.result()
        finally:
            request.cancel()

    async def call(self, work: Callable[[], _Result]) -> _Result:
        """Does something in the thread that computes, between two steps: see `Server.call`."""
        return await asyncio.wrap_future(self._server.call_soon(work))

    def metrics(self) -> dict[str, int]:
        """The scheduler's counts: queue depths, waits, preemptions."""
        return self._server.metrics()

    async def close(self) -> None:
        """Cancels whatever has not ended, and ends the thread. Safe to call twice."""
        await asyncio.to_thread(self._server.close)

    async def __aenter__(self) -> AsyncRunner:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _submitted(
        self, prompt: Prompt, policy: str | Policy | None, how: Submission
    ) -> ServedRequest:
        """Submits in another thread, for a long prompt takes long to tokenize."""
        self._wakes_of_loop()
        coming = asyncio.ensure_future(
            asyncio.to_thread(lambda: self._server.submit(prompt, policy, **how))
        )
        try:
            return await asyncio.shield(coming)
        except asyncio.CancelledError:
            coming.add_done_callback(_cancel_result)
            raise

    def _wakes_of_loop(self) -> _Wakes:
        loop = asyncio.get_running_loop()
        if self._wakes is None:
            self._wakes = _Wakes(loop)
        if self._wakes.loop is not loop:
            raise InvalidArgument("async runner: expected one event loop, got a second")
        return self._wakes


class _Wakes:
    """Wakes tasks of a loop from another thread: one call into the loop for all that is new."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._due: deque[asyncio.Event] = deque()
        self._called = False

    def waker(self, event: asyncio.Event) -> Callable[[], None]:
        """What sets an event of the loop's soon, from any thread."""
        return lambda: self._wake(event)

    def _wake(self, event: asyncio.Event) -> None:
        with self._lock:
            self._due.append(event)
            if self._called:
                return
            self._called = True
        try:
            self.loop.call_soon_threadsafe(self._set_due)
        except RuntimeError:
            # The loop was closed: nobody waits any more.
            return

    def _set_due(self) -> None:
        with self._lock:
            due, self._due = self._due, deque()
            self._called = False
        for event in due:
            event.set()


def _cancel_result(coming: asyncio.Task[ServedRequest]) -> None:
    """Cancels a request that came when nobody waited for it any more."""
    if not coming.cancelled() and coming.exception() is None:
        coming.result().cancel()

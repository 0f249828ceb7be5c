"""Callers as tasks of an event loop: who await, stream, leave a stream, or are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.soak.asked import Asked
from benchmarks.soak.clients import LATEST_S, MOST_S, Drawn
from benchmarks.soak.prompts import how_of, policy_of, prompt_of
from benchmarks.soak.tally import Tally
from kvweave.errors import Cancelled, InvalidArgument, PoolFull
from kvweave.runner import AsyncRunner

WAYS = {"await": 5, "stream": 4, "leave": 2, "cancel": 3, "time out": 1}


class Tasks:
    """Tasks that ask, each one request after the other, until `stop`."""

    def __init__(self, served: AsyncRunner, drawn: Drawn, tally: Tally, count: int) -> None:
        self.served, self.drawn, self.tally = served, drawn, tally
        self._stopped = False
        self._tasks = [asyncio.ensure_future(self._ask_on()) for _ in range(count)]

    def stop(self) -> None:
        """Has no further request asked."""
        self._stopped = True

    async def join(self, most_s: float = MOST_S) -> None:
        """Returns when all have ended, behind `stop`; who waits for ever is complained of."""
        _, left = await asyncio.wait(self._tasks, timeout=most_s)
        if left:
            self.tally.complain(f"requests without an end: {self.served.metrics()}")
            await self.served.close()
        await asyncio.gather(*self._tasks)

    async def _ask_on(self) -> None:
        while not self._stopped:
            asked, way, number = self.drawn.next(WAYS)
            with self.tally.watched(f"a task that was to {way}"):
                try:
                    await self._ask(asked, way, number)
                except PoolFull:
                    self.tally.note("failed as PoolFull")
                except Cancelled:
                    if not self._stopped:
                        raise
                    self.tally.note("cancelled by the end")
                except InvalidArgument as error:
                    # The server was closed in the middle of a load.
                    if not self._stopped or "closed" not in str(error):
                        raise
                    self.tally.note("came too late")

    async def _ask(self, asked: Asked, way: str, number: float) -> None:
        if asked.n > 1:
            many = [self._generate(asked, n) for n in range(asked.n)]
            for done in await asyncio.gather(*many):
                self._answered(asked, done)
            self.tally.note("several answers")
        elif way in ("stream", "leave"):
            most = int(number * asked.answer) if way == "leave" else None
            await self._stream(asked, most)
        elif way == "cancel":
            await self._cancelled(asked, number)
        elif way == "time out":
            coming = self._generate(asked, 0, **self.drawn.options(asked))
            try:
                self._answered(asked, await asyncio.wait_for(coming, number * LATEST_S))
            except asyncio.TimeoutError:
                self.tally.note("timed out")
        else:
            coming = self._generate(asked, 0, **self.drawn.options(asked))
            self._answered(asked, await asyncio.wait_for(coming, MOST_S))

    async def _generate(self, asked: Asked, number: int, **more: Any) -> Any:
        how = {**how_of(asked, number), **more}
        return await self.served.generate(prompt_of(asked), policy_of(asked), **how)

    async def _stream(self, asked: Asked, most: int | None) -> None:
        """Reads a stream to its end, or so many tokens of it."""
        how = {**how_of(asked), **self.drawn.options(asked)}
        stream = self.served.stream(prompt_of(asked), policy_of(asked), **how)
        heard = []
        async for token in stream:
            if len(heard) == most:
                break
            heard.append(token.token)
        await stream.aclose()
        if most is not None:
            self.tally.note("left")
        elif len(heard) > asked.answer or (len(heard) < asked.answer and not asked.stop):
            self.tally.complain(f"{asked.name}: heard {len(heard)} tokens of {asked.answer}")
        else:
            self.tally.note("streamed")

    async def _cancelled(self, asked: Asked, number: float) -> None:
        task = asyncio.ensure_future(self._generate(asked, 0, **self.drawn.options(asked)))
        await asyncio.wait([task], timeout=number * LATEST_S)
        if not task.cancel():
            self._answered(asked, await task)
            return
        try:
            await task
        except asyncio.CancelledError:
            self.tally.note("cancelled")

    def _answered(self, asked: Asked, done: Any) -> None:
        self.tally.answered(asked, done)
        self.drawn.answered(asked, done.tokens)

"""Callers in threads of their own: who wait, stream, leave, stop reading, cancel, or ask too much.

What each of them does is drawn with its request; what comes of it is known, or complained of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from benchmarks.soak.asked import POLICIES, VOCABULARY, Asked, Author
from benchmarks.soak.prompts import how_of, policy_of, prompt_of
from benchmarks.soak.served import TOO_MANY
from benchmarks.soak.tally import Tally
from kvweave import Healing
from kvweave.errors import Cancelled, InvalidArgument, PoolFull
from kvweave.runner import ServedRequest, Server

WAYS = {"wait": 5, "stream": 4, "read late": 1, "leave": 2, "stop reading": 1, "cancel": 3}
WAYS |= {"ask too much": 1, "ask nonsense": 1}
PRIORITIES = (-1, 2)
HEALED, RESERVED, DISCOVERED, FORGOTTEN = 0.1, 0.1, 0.1, 0.2
"""Chances that an answer is healed, its room reserved, documents discovered, nothing remembered."""
LEAST_ANSWER, UNREAD = 8, 3
"""Who stops reading is cancelled, for answers of so many tokens have more unread than may be."""
LATEST_S = 0.4
"""A request is cancelled so long behind its submission at most."""
MOST_S = 120.0
"""No answer takes so long."""


class Drawn:
    """What is drawn for callers, one at a time: a request, what its caller does, and when.

    `without`: what the runner refuses.
    """

    def __init__(self, author: Author, seed: int, without: Collection[str] = ()) -> None:
        self.author, self.without = author, without
        self.lock = threading.Lock()
        self._numbers = np.random.default_rng([seed, 2])

    def next(self, ways: dict[str, int]) -> tuple[Asked, str, float]:
        """A request, a way, and a number in [0, 1)."""
        with self.lock:
            asked = self.author.request()
            chances = np.array(list(ways.values())) / sum(ways.values())
            way = str(self._numbers.choice(list(ways), p=chances))
            return asked, way, float(self._numbers.random())

    def options(self, asked: Asked) -> dict[str, Any]:
        """What else `submit` is told of a request."""
        with self.lock:
            drawn = self._numbers.random(4)
            how: dict[str, Any] = {"priority": int(self._numbers.integers(*PRIORITIES))}
        reuses = asked.marks is not None and asked.kind in POLICIES
        how["remember"] = bool(drawn[0] >= FORGOTTEN)
        how["reserve"] = bool(drawn[1] < RESERVED)
        how["discover"] = bool(reuses and drawn[2] < DISCOVERED)
        heals = reuses and asked.kind == "naive" and "healing" not in self.without
        if heals and drawn[3] < HEALED:
            how["healing"] = Healing()
        return how

    def know(self, number: int) -> None:
        """Requests may mark a document from now on."""
        with self.lock:
            if number not in self.author.there:
                self.author.there.append(number)

    def answered(self, asked: Asked, said: Sequence[int]) -> None:
        """A request has its answer: a second turn may follow it."""
        with self.lock:
            self.author.answered(asked, list(said))


class Clients:
    """Threads that ask a server, each one request after the other, until `stop`."""

    def __init__(self, server: Server, drawn: Drawn, tally: Tally, count: int) -> None:
        self.server, self.drawn, self.tally = server, drawn, tally
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Has no further request asked."""
        self._stopped.set()

    def join(self, most_s: float = MOST_S) -> None:
        """Returns when all have ended, behind `stop`; who waits for ever is complained of."""
        end = time.monotonic() + most_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self.tally.complain(f"requests without an end: {self.server.metrics()}")
            self.server.close()
        for thread in self._threads:
            thread.join()

    def _ask_on(self) -> None:
        while not self._stopped.is_set():
            asked, way, number = self.drawn.next(WAYS)
            with self.tally.watched(f"a client that was to {way}"):
                try:
                    self._ask(asked, way, number)
                except InvalidArgument as error:
                    # The server was closed in the middle of a load.
                    if not self._stopped.is_set() or "closed" not in str(error):
                        raise
                    self.tally.note("came too late")

    def _ask(self, asked: Asked, way: str, number: float) -> None:
        if way == "ask too much":
            self._refused(PoolFull, asked.tokens + [1] * TOO_MANY)
        elif way == "ask nonsense":
            self._refused(InvalidArgument, [*asked.tokens, VOCABULARY])
        elif asked.n > 1:
            self._several(asked)
        else:
            self._one(asked, way, number)

    def _refused(self, kind: type[Exception], tokens: list[int]) -> None:
        try:
            self.server.submit(tokens, "full", max_new_tokens=2).cancel()
        except kind as error:
            if "closed" in str(error):
                raise
            self.tally.note(f"refused as {kind.__name__}")
        else:
            self.tally.complain(f"{len(tokens)} tokens were to be refused as {kind.__name__}")

    def _several(self, asked: Asked) -> None:
        """Several answers to one prompt, drawn with different seeds."""
        requests = [self._submit(asked, n) for n in range(asked.n)]
        for request in requests:
            self._end(asked, request)
        self.tally.note("several answers")

    def _one(self, asked: Asked, way: str, number: float) -> None:
        more: dict[str, Any] = self.drawn.options(asked)
        if way == "stop reading":
            more["unread"] = UNREAD
        if asked.answer < LEAST_ANSWER or asked.stop:
            more.pop("unread", None)
        request = self._submit(asked, 0, **more)
        if way == "stream":
            heard = self._heard(request, len(asked.tokens) + asked.answer)
            self._end(asked, request, heard)
        elif way == "leave":
            with request:
                self._heard(request, int(number * asked.answer))
            self._end(asked, request, cancelled="left")
        elif way == "cancel":
            time.sleep(number * LATEST_S)
            request.cancel()
            said = len(request.tokens)
            self._end(asked, request, cancelled="cancelled")
            if len(request.tokens) != said:
                self.tally.complain(f"{asked.name}: a token came behind the end of `cancel`")
        elif way == "read late":
            self._end(asked, request)
            heard = [token.token for token in request.take()]
            if request.outcome == "finished" and heard != request.tokens:
                self.tally.complain(f"{asked.name}: read late {heard}, said {request.tokens}")
        elif "unread" in more:
            self._end(asked, request, cancelled="stopped reading")
            if request.outcome == "finished":
                self.tally.complain(f"{asked.name}: nobody read it, and it was not cancelled")
        else:
            self._end(asked, request)

    def _submit(self, asked: Asked, number: int, **more: Any) -> ServedRequest:
        how = {**how_of(asked, number), **more}
        return self.server.submit(prompt_of(asked), policy_of(asked), **how)

    @staticmethod
    def _heard(request: ServedRequest, most: int) -> list[int]:
        """Tokens of a stream, so many at most."""
        heard: list[int] = []
        # Whatever ends it, `_end` is told.
        with suppress(Cancelled, PoolFull):
            for token in request if most else ():
                heard.append(token.token)
                if len(heard) == most:
                    break
        return heard

    def _end(
        self,
        asked: Asked,
        request: ServedRequest,
        heard: list[int] | None = None,
        *,
        cancelled: str = "",
    ) -> None:
        """Waits for the end of a request, which may be that it was cancelled."""
        try:
            done = request.result(MOST_S)
        except Cancelled:
            if cancelled or self._stopped.is_set():
                self.tally.note(cancelled or "cancelled by the end")
                return
            raise
        except PoolFull:
            # It outgrew what others leave: documents are pinned, and nobody else decodes.
            self.tally.note("failed as PoolFull")
            return
        self.tally.answered(asked, done, heard)
        self.drawn.answered(asked, done.tokens)

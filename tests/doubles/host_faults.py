"""Transfers between device and host memory that fail when a test says so, or come over late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens
from kvweave.runner import Runner
from kvweave.runner.engine.engine_request import EngineRequest
from kvweave.runner.kv import host_pool
from kvweave.runner.kv.aside import Arrival
from kvweave.runner.kv.host_pages import HostPages, blocks_of
from kvweave.runner.kv.host_pool import HostPool

ALWAYS = 10**9
ASK: dict[str, Any] = {"max_new_tokens": 20, "stop": (), "remember": False}

PLACES = {
    "aside": "copy_aside",
    "before a ranking": None,
    "at a ranking": "fetch",
    "late": "fetch_late",
    "back": None,
    "bounds": "contents",
}
"""Where pages are carried, and the pool's call for it; others are told apart by their way."""


class Faults:
    """The first so many transfers at one place break off half-way.

    `of`: only those with pages of these requests; None for all. `hit`: how many have.
    """

    def __init__(
        self, place: str, times: int, of: Callable[[], Iterable[HostPages]] | None = None
    ) -> None:
        self.place, self.left, self.of = place, times, of
        self.hit = 0
        self._within: str | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        carry = host_pool.carry_pages

        def failing(moves: Any, count: Any, slots: Any, home: Any, way: Any, **named: Any) -> None:
            at = self._within or {"spill": "before a ranking", "fetch": "back"}[way]
            if at == self.place and self.left and self._concerned(moves, count, home):
                self.left, self.hit = self.left - 1, self.hit + 1
                half: Any = torch.as_tensor(count) // 2
                half = half if half.is_cuda else half.numpy()
                carry(moves, half, slots, home, way, **named)
                raise RuntimeError("the bus is gone")
            carry(moves, count, slots, home, way, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_pool, "carry_pages", failing)
            for place, call in PLACES.items():
                if call is not None:
                    patch.setattr(HostPool, call, self._seen(place, getattr(HostPool, call)))
            yield

    def _seen(self, place: str, call: Any) -> Any:
        def seen(*given: Any, **named: Any) -> Any:
            outer, self._within = self._within, self._within or place
            try:
                return call(*given, **named)
            finally:
                self._within = outer

        return seen

    def _concerned(self, moves: Any, count: Any, home: Any) -> bool:
        known = torch.as_tensor(moves).cpu().numpy()[: int(count[0])]
        if self.of is None or not len(known):
            return len(known) > 0
        pages = torch.as_tensor(home.blocks).cpu().numpy()[known[:, 0] // home.ranks, known[:, 1]]
        for of in self.of():
            memory = of.pool.pages.untyped_storage().data_ptr()
            # Seen from the page of a head's rank on it is the same memory.
            if of.home is not None and home.data.untyped_storage().data_ptr() == memory:
                own = blocks_of(of.home)
                if np.isin(pages, own[:, None] + np.arange(of.pool.budget.heads)).any():
                    return True
        return False


def answered(runner: Runner, faults: Faults, whose: int | None) -> list[EngineRequest]:
    """Three prompts in an engine under faults, of one of them or of all."""
    engine = runner.engine()
    asked = [engine.submit(random_tokens(100 + n, n), "full", **ASK) for n in range(3)]

    def pages() -> list[HostPages]:
        assert whose is not None
        live = engine._live.get(asked[whose].number)
        return [] if live is None or live.done is None else list(live.done.kv.host.values())

    faults.of = None if whose is None else pages
    with faults.at_work():
        engine.run()
    return asked


class LateCopies:
    """Copies beside decoding that are made as late as a stream of a GPU may make them.

    That is when somebody waits for one or, in their order, for a later one; or looks for the
    `comes`th time whether one is there.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.made = 0
        self.comes: int | None = None
        self._looks = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        copy = HostPool.copy_aside

        def later(pool: HostPool, here: Any, home: Any) -> Arrival:
            number = self.made + len(self.waiting)
            self.waiting.append(lambda: copy(pool, here, home) and None)
            return self._arrival(number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostPool, "copy_aside", later)
            yield

    def _arrival(self, number: int) -> Arrival:
        late = self

        class Late(Arrival):
            def is_there(self) -> bool:
                late._looks += 1
                if late.comes is not None and late._looks % late.comes == 0:
                    self.wait()
                return late.made > number

            def wait(self) -> None:
                while late.made <= number and late.waiting:
                    late.made += 1
                    late.waiting.pop(0)()

        return Late()

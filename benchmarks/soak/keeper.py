"""Whoever looks after the documents of a served runner while others ask about them.

They are inserted, deleted, restored from the store, prefetched, pinned and demoted at random, in a
thread of its own: what computes is called between two steps of the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.soak.asked import DOCUMENTS
from benchmarks.soak.clients import Drawn
from benchmarks.soak.served import Served
from benchmarks.soak.tally import Tally
from kvweave import Segment
from kvweave.errors import (
    Cancelled,
    InvalidArgument,
    PoolFull,
    QuotaExceeded,
    StoreFull,
    UnknownSegment,
    UnknownShard,
)

ALL = 3 * DOCUMENTS
"""Documents that there are: prompts mark those too that were deleted, as the tiers have them."""
DOES = {"put": 4, "drop": 4, "restore": 2, "prefetch": 3, "pin": 2, "forget": 1, "flush": 1}
TOLD = {"retain": 2, "demote": 2}
OF_TIERS = ("restore", "prefetch")
LONGEST_S = 0.15
"""Nothing is done for so long at most."""

Call = Callable[[Callable[[], Any]], Any]
"""Does something in the thread that computes, and returns what that returns."""


class Keeper:
    """Documents of one runner. `inserted`: the numbers of those that are frozen by name."""

    def __init__(self, served: Served, drawn: Drawn, tally: Tally, seed: int) -> None:
        self.served, self.drawn, self.tally = served, drawn, tally
        self._numbers = np.random.default_rng([seed, 3])
        self._document = served.kind.library.document
        known = {**DOES, **(TOLD if served.kind.is_told else {})}
        refused = {*served.kind.without, *(() if served.kind.has_tiers else OF_TIERS)}
        self._does = {what: chance for what, chance in known.items() if what not in refused}
        self.inserted: list[int] = []
        self._stopped = threading.Event()

    def work(self, call: Call) -> None:
        """Does one thing after the other, until `stop`. For a thread of its own."""
        self._stopped.clear()
        while not self._stopped.wait(float(self._numbers.random()) * LONGEST_S):
            self._look_at_home()
            chances = np.array(list(self._does.values())) / sum(self._does.values())
            what = str(self._numbers.choice(list(self._does), p=chances))
            with self.tally.watched(f"to {what} a document"):
                try:
                    self._do(what, call)
                except (Cancelled, InvalidArgument) as error:
                    if "closed" not in str(error):
                        raise
                    return

    def stop(self) -> None:
        """Has nothing more done."""
        self._stopped.set()

    def _do(self, what: str, call: Call) -> None:
        if what == "put" or not self.inserted:
            self._put(call)
        elif what == "flush":
            self.flush()
        elif what == "forget":
            space = self._document(self._any())[0]
            self.served.runner.forget(space)
            self.tally.note("forget")
        else:
            getattr(self, f"_{what}")(self._any(), call)

    def _look_at_home(self) -> None:
        """Takes note of times when the host's memory has no room for the slots of a request."""
        for pool in self.served.runner.host.values():
            stats = pool.stats()
            if stats["free"] + stats["claimable"] < pool.slots:
                self.tally.note("host memory was full")

    def _any(self) -> int:
        return int(self._numbers.choice(self.inserted))

    def _put(self, call: Call) -> None:
        """Inserts one that is not there, or once more where all are."""
        absent = sorted(set(range(1, ALL + 1)) - set(self.inserted)) or self.inserted
        number = int(self._numbers.choice(absent))
        space, name, tokens = self._document(number)
        runner = self.served.runner
        try:
            call(lambda: runner.insert(tokens, name, space))
        except QuotaExceeded:
            self.tally.note("refused by a quota")
        except PoolFull:
            self.tally.note("no room for a document")
        else:
            self.inserted.append(number)
            self.drawn.know(number)
            self.tally.note("put")

    def _drop(self, number: int, _: Call) -> None:
        space, name, _ = self._document(number)
        self.inserted.remove(number)
        self.served.runner.delete(name, space)
        self.tally.note("dropped")

    def _restore(self, number: int, call: Call) -> None:
        """Freezes a document once more, as the store has it."""
        space, name, _ = self._document(number)
        runner = self.served.runner
        try:
            call(lambda: runner.restore(None, space, name=name))
        except (UnknownSegment, UnknownShard):
            # It is being written, or its namespace has no room in the store.
            self.tally.note("nothing to restore")
        except PoolFull:
            self.tally.note("no room to restore")
        else:
            self.tally.note("restored")

    def _prefetch(self, _: int, call: Call) -> None:
        """Brings any document, also one that was deleted, from the tiers."""
        number = int(self._numbers.integers(1, ALL + 1))
        found = call(lambda: self.served.runner.prefetch(*self._text(number)))
        self.tally.note(f"prefetched from: {found[0]}")

    def _pin(self, number: int, call: Call) -> None:
        """Holds what is cached of a document, while one more thing is done."""
        try:
            pin = self.served.runner.pin(*self._text(number))
        except PoolFull:
            self.tally.note("no room to pin")
            return
        with pin:
            self.tally.note("pinned")
            self._prefetch(number, call)

    def _retain(self, number: int, _: Call) -> None:
        self.served.runner.retain(*self._text(number), ttl=1.0, priority=2)
        self.tally.note("retained")

    def _demote(self, number: int, _: Call) -> None:
        self.served.runner.demote(*self._text(number))
        self.tally.note("demoted")

    def flush(self) -> None:
        """Waits until the stores keep what was inserted, or say that there is no room for it."""
        try:
            self.served.runner.flush()
        except (QuotaExceeded, StoreFull):
            self.tally.note("no room in the store")
        else:
            self.tally.note("flushed")

    def _text(self, number: int) -> tuple[Any]:
        """A document as a text that marks it."""
        space, _, tokens = self._document(number)
        return ([Segment(tokens=tokens, namespace=space)],)

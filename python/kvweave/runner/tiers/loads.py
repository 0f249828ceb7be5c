"""`Load`: the documents of one prompt on their way from a tier to the host's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvweave.errors import CorruptShard, ForeignShard
from kvweave.payload.arriving import ArrivingPayload
from kvweave.runner.tiers.choice import Choice
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import StoredDocument
from kvweave.runner.tiers.read_tier import ReadTier
from kvweave.runner.tiers.trouble import Trouble
from kvweave.runner.worker import Job, Worker

NEEDED, PREFETCHED = 0, 1
"""What goes first: what a request needs whose turn has come, or that was decoded already; then what
requests need that wait."""


@dataclass(eq=False)
class Wanted:
    """A document at tokens [start, end) of a prompt, and where its KV is to come from.

    `payload` once it was read from a store, which took `seconds`; `arriving` while that is done,
    layer by layer.
    """

    start: int
    end: int
    document: Document
    choice: Choice
    payload: StoredDocument | None = None
    seconds: float = 0.0
    arriving: ArrivingPayload | None = None

    def compute(self, why: str) -> None:
        """Has it computed after all."""
        self.choice = Choice("computed", why)
        self.drop()

    def take_here(self) -> None:
        """Has it read where it lies, on the device."""
        self.choice = Choice("device", "it is on the device")
        self.drop()

    def drop(self) -> None:
        """Lets go of what was read of it."""
        self.payload = self.arriving = None

    @property
    def layers(self) -> int:
        """How many of its layers have come, where it arrives layer by layer."""
        arriving = self.arriving
        return 0 if arriving is None else arriving.layers

    def has(self, layers: int) -> bool:
        """Whether so many layers of it have been read."""
        return self.payload is not None or self.layers >= layers


PIECE_BYTES = 4 << 20
"""Of one document that arrives layer by layer at least so many bytes are read at once."""


class InFlight:
    """Bytes of documents that were read and are not on the device yet.

    At most `most`, or those of one prompt alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Read and written by whoever has the worker's `changed`.
        self.used = 0
        self.holders: list[Load] = []
        # Steps of engines that have ended, see `Load`.
        self.steps = 0

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may be read. What is more than `most` goes alone."""
        return not self.used or self.used + size <= self.most


class Load(Job):
    """Reads the documents that one prompt takes from one tier, all of them or none begun.

    They take their bytes of `room` when it begins and give them back by `release`, which everybody
    who has a load calls in the end. Prompts never wait for each other with some of their documents
    in hand. Where one that is needed finds no room, those that a whole step of an engine has left
    alone since they were read give it up, and read it again: so a bound on bytes stops nobody.
    """

    def __init__(
        self,
        worker: Worker,
        room: InFlight,
        tier: ReadTier,
        wanted: Sequence[Wanted],
        size: Callable[[Document], int],
        urgency: tuple[int, ...],
        trouble: Trouble,
    ) -> None:
        self.urgency = urgency
        self.began: float | None = None
        self._worker = worker
        self._room = room
        self._tier = tier
        self._wanted = wanted
        self._bytes = sum(size(want.document) for want in wanted)
        self._held = 0
        self._trouble = trouble
        self._released = False
        # All documents that are there have been opened and compared, and their KV may be arriving.
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._ended_in = 0
        self._taken = False
        worker.submit(self)

    @property
    def ended(self) -> bool:
        """Whether all was read, or will not be."""
        return self._ended.is_set()

    def take(self) -> bool:
        """Whether all was read that will be; if so it stays until it is released."""
        with self._worker.changed:
            self._taken = self.ended
            return self._taken

    def take_begun(self) -> bool:
        """The same of what is only begun."""
        with self._worker.changed:
            self._taken = self._begun.is_set()
            return self._taken

    def is_of(self, want: Wanted) -> bool:
        """Whether a document is one of those that it reads."""
        return any(one is want for one in self._wanted)

    def wait_for(self, want: Wanted, layers: int, seconds: float) -> bool:
        """Waits until so many layers of a document are there or will not be: whether they are."""
        with self._worker.changed:
            self._worker.changed.wait_for(lambda: want.has(layers) or self.ended, max(0.0, seconds))
            return want.has(layers)

    def hurry(self) -> None:
        """Has it go before those that nobody waits for yet."""
        self._worker.hurry(self, (NEEDED, *self.urgency[1:]))

    def wait(self, seconds: float, *, begun: bool = False) -> bool:
        """Waits for the end, or that it is `begun`, so long at most: whether that has come."""
        return (self._begun if begun else self._ended).wait(seconds)

    def release(self) -> None:
        """Gives the bytes back, of a load that goes on when its read at hand ends.

        Any thread; safe to call twice.
        """
        self._worker.drop(self)
        with self._worker.changed:
            self._released = True
            self._end()
            for want in self._wanted:
                want.drop()
            if self._worker.running is not self:
                self._give_back()

    # ---- the worker's side ----------------------------------------------------------------

    def may_begin(self) -> bool:
        """Takes the bytes, if they are to be had."""
        room = self._room
        if self.urgency[0] == NEEDED:
            for other in sorted(room.holders, key=lambda load: load.urgency, reverse=True):
                if not room.has_room(self._bytes):
                    other._give_way()
        if not room.has_room(self._bytes):
            return False
        room.used += self._bytes
        room.holders.append(self)
        self._held = self._bytes
        self.began = time.monotonic()
        return True

    def run(self) -> None:
        """Reads one document after the other; one that cannot be read stops no other.

        Those that arrive layer by layer do so side by side, as prompts need them.
        """
        for want in self._wanted:
            self._tried(want, partial(self._open, want))
        with self._worker.changed:
            self._begun.set()
        arriving = [want.arriving for want in self._wanted if want.arriving is not None]
        if not arriving:
            return
        layers = arriving[0].payload.header.layers
        least = max(1, min(one.layer_bytes for one in arriving))
        step = -(-PIECE_BYTES // least)
        for first in range(0, layers, step):
            for want in self._wanted:
                self._tried(want, partial(self._read_to, want, min(layers, first + step)))

    def _tried(self, want: Wanted, work: Callable[[], None]) -> None:
        """Does some of what a document takes, if anybody wants it still and nothing was wrong."""
        if self._is_left() or want.choice.source != self._tier.source:
            return
        begun, called = time.perf_counter(), self._tier.called
        try:
            work()
        except (CorruptShard, ForeignShard) as error:
            self._refuse(want, "refused", f"{called}'s document is refused: {error}")
        except Exception as error:
            self._refuse(want, "unread", f"{called} cannot be read: {error}")
        want.seconds += time.perf_counter() - begun

    def _open(self, want: Wanted) -> None:
        want.seconds = 0.0
        found = self._tier.read(want.document, self._is_left)
        with self._worker.changed:
            if self._is_left():
                return
            if found is None:
                want.compute("no tier has it")
            elif isinstance(found, ArrivingPayload):
                want.arriving = found
            else:
                want.payload = found

    def _read_to(self, want: Wanted, layers: int) -> None:
        arriving = want.arriving
        if arriving is None:
            return
        arriving.read_to(layers)
        with self._worker.changed:
            if not self._is_left() and layers == arriving.payload.header.layers:
                want.payload = arriving.payload
            self._worker.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Notes that nothing more will be read."""
        with self._worker.changed:
            if error is not None and not self._ended.is_set():
                self._note("unread", str(error))
            if self._released:
                self._give_back()
            self._ended_in = self._room.steps
            self._end()
            self._worker.changed.notify_all()

    def _end(self) -> None:
        self._begun.set()
        self._ended.set()

    def _refuse(self, want: Wanted, kind: str, why: str) -> None:
        self._note(kind, why)
        with self._worker.changed:
            want.compute(why)
            self._worker.changed.notify_all()

    def _note(self, kind: str, why: str) -> None:
        self._trouble.note(f"{self._tier.trouble}{kind}", f"a document is computed: {why}")

    def _is_left(self) -> bool:
        return self._released

    def _give_way(self) -> None:
        """Gives up what was read, if its request may well be slow to take it."""
        seen = self._room.steps > self._ended_in + 1
        if not seen or self._taken or self._released or not self.ended:
            return
        for want in self._wanted:
            want.drop()
        self._give_back()
        self._begun.clear()
        self._ended.clear()
        self._worker.submit(self)

    def _give_back(self) -> None:
        if self in self._room.holders:
            self._room.holders.remove(self)
        self._room.used -= self._held
        self._held = 0
        self._worker.changed.notify_all()

"""`Tally`: what happened in a soak and what should not have, told by many threads."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.soak.asked import LONG, Asked
from benchmarks.soak.kinds import Alike

KEPT = 12
"""Answers of a load that a quiet runner is asked for too, the next time that all is quiet."""
MOST_COMPLAINTS = 50
ALIKE = Alike()
"""What is exact under any load."""


class Tally:
    """Counts by name, complaints, and some answers that are compared in quiet. Any thread.

    `alike`: which answers these may be.
    """

    def __init__(self, alike: Alike = ALIKE) -> None:
        self.alike = alike
        self.counts: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.kept: list[tuple[Asked, list[int]]] = []
        self._lock = threading.Lock()

    def note(self, what: str, count: int = 1) -> None:
        """Something happened."""
        with self._lock:
            self.counts[what] += count

    def complain(self, what: str) -> None:
        """Something should not have happened."""
        with self._lock:
            if len(self.complaints) < MOST_COMPLAINTS:
                self.complaints.append(what)

    @contextmanager
    def watched(self, who: str) -> Iterator[None]:
        """Complains of whatever is raised that nobody expected, and goes on."""
        try:
            yield
        except Exception:
            self.complain(f"{who}: {traceback.format_exc(limit=-6)}")

    def answered(self, asked: Asked, done: Any, heard: Sequence[int] | None = None) -> None:
        """A request was answered. `heard`: its tokens as a stream gave them."""
        report, said = done.report, list(done.tokens)
        for wrong in wrongs(asked, done, heard):
            self.complain(f"{asked.name} ({asked.kind}): {wrong}")
        with self._lock:
            self.counts["finished"] += 1
            self.counts["prompt tokens"] += report.tokens
            self.counts["answer tokens"] += len(said)
            self.counts["reused tokens"] += report.reused_prefix + report.reused_segment
            self.counts["given way"] += report.resumed > 0
            self.counts["stopped by a string"] += done.stopped
            self.counts["second turns"] += asked.before is not None
            self.sources.update(document.source for document in report.documents)
            self.counts["longer than the device"] += asked.kind == LONG
            if report.speculation is not None:
                self.counts["tokens drafted"] += report.speculation.drafted
                self.counts["drafts accepted"] += report.speculation.accepted
            if report.packed is not None:
                self.counts["pages packed beside their prompt"] += report.packed.beside
                self.counts["pages packed behind their prompt"] += report.packed.behind
            if len(self.kept) < KEPT and self.alike.holds(asked, done):
                self.kept.append((asked, said))

    def take_kept(self) -> list[tuple[Asked, list[int]]]:
        """Answers to compare, each once."""
        with self._lock:
            kept, self.kept = self.kept, []
        return kept


def wrongs(asked: Asked, done: Any, heard: Sequence[int] | None) -> Iterator[str]:
    """What an answer says of itself that cannot be."""
    report, said = done.report, list(done.tokens)
    if report.tokens != len(asked.tokens):
        yield f"{report.tokens} tokens of a prompt of {len(asked.tokens)}"
    parts = report.reused_prefix + report.reused_segment + report.recomputed
    if parts != report.tokens:
        yield f"{report.tokens} tokens, {parts} of them reused or computed"
    if done.stopped and not asked.stop:
        yield "it was stopped by nothing"
    if len(said) > asked.answer or (len(said) < asked.answer and not done.stopped):
        yield f"{len(said)} tokens of {asked.answer}"
    if heard is not None and list(heard) != said:
        yield f"heard {list(heard)}, said {said}"

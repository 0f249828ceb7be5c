"""`Brought`: documents that were brought to the device for one prompt, until it is admitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from kvweave.cache import KvRequest, ReusePlan
from kvweave.errors import PoolFull
from kvweave.runner.clock import Clock, Mark
from kvweave.runner.report import DocumentSource
from kvweave.runner.tiers.choice import Tier
from kvweave.runner.tiers.loads import Wanted
from kvweave.runner.tiers.measured import Measured

Admitted = TypeVar("Admitted")
"""A prompt's request, or what has one."""


@dataclass
class Carried:
    """Bytes that came from a tier between two marks, and seconds of reading before."""

    tier: Tier
    size: int
    begin: Mark
    end: Mark
    read_s: float


@dataclass
class Brought:
    """What became of a prompt's documents. `requests` keep their blocks from being evicted.

    A context manager, which lets them go; the documents stay cached.
    """

    wanted: list[Wanted] = field(default_factory=list)
    requests: list[KvRequest] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    waited_s: float = 0.0
    measured: Measured | None = None

    def admit(self, admit: Callable[[bool], Admitted]) -> Admitted:
        """Admits the prompt, with the segments that it reuses, or without any.

        Without where there is no room beside the documents that were brought for it: it would have
        fitted had they not been there.

        # Errors
        `PoolFull` when it does not fit.
        """
        try:
            return admit(True)
        except PoolFull:
            if not self.requests:
                raise
            self.release()
            return admit(not self.carried)

    def sources(self, plan: ReusePlan) -> list[DocumentSource]:
        """Where each document's KV came from, as the admitted request's plan reads it."""
        spans = [s for s in plan.spans if s.kind in ("prefix", "segment")]
        found = []
        for want in self.wanted:
            source, why = want.choice.source, want.choice.why
            reused = sum(max(0, min(s.end, want.end) - max(s.start, want.start)) for s in spans)
            if source != "computed" and not reused:
                source, why = "computed", f"{why}, but there was no room for it beside the prompt"
            elif 0 < reused < want.document.length:
                why = f"{why}; {reused} of its {want.document.length} tokens are reused"
            found.append(DocumentSource(want.start, want.end, want.document.namespace, source, why))
        return found

    def take_times(self) -> float:
        """Seconds that it took; the device has come behind it all. Speeds are known from them."""
        total = self.waited_s
        for carried in self.carried:
            seconds = Clock.seconds(carried.begin, carried.end)
            total += seconds
            if self.measured is not None:
                self.measured.note(carried.tier, carried.size, seconds + carried.read_s)
        return total

    def release(self) -> None:
        """Lets the documents' blocks go; safe to call twice."""
        requests, self.requests = self.requests, []
        for request in requests:
            request.release()

    def __enter__(self) -> Brought:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

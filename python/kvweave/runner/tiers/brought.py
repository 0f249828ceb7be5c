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
from kvweave.runner.tiers.arrivals import Arrivals
from kvweave.runner.tiers.choice import Tier
from kvweave.runner.tiers.loads import Wanted
from kvweave.runner.tiers.measured import Measured

Admitted = TypeVar("Admitted")
"""A prompt's request, or what has one."""


@dataclass
class Carried:
    """Bytes that came from a tier between two marks, if there are any, and seconds of reading.

    `beside`: the prompt was prefilled meanwhile.
    """

    tier: Tier
    size: int
    begin: Mark | None
    end: Mark | None
    read_s: float
    beside: bool = False


@dataclass
class Brought:
    """What became of a prompt's documents. `requests` keep their blocks from being evicted.

    A context manager, which lets them go; the documents stay cached. `arrivals`: those of which KV
    comes while the prompt is prefilled, which whoever does so finishes or releases.
    """

    wanted: list[Wanted] = field(default_factory=list)
    requests: list[KvRequest] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    waited_s: float = 0.0
    measured: Measured | None = None
    arrivals: Arrivals | None = None

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
            if not self.requests and self.arrivals is None:
                raise
            reuses = not self.carried and self.arrivals is None
            self.give_up()
            return admit(reuses)

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
            seconds = 0.0
            if carried.begin is not None and carried.end is not None:
                seconds = Clock.seconds(carried.begin, carried.end)
            total += 0.0 if carried.beside else seconds
            if self.measured is not None:
                self.measured.note(carried.tier, carried.size, seconds + carried.read_s)
        return total

    def release(self) -> None:
        """Lets the documents' blocks go; safe to call twice."""
        requests, self.requests = self.requests, []
        for request in requests:
            request.release()

    def is_coming(self, request: KvRequest) -> bool:
        """Whether a request is of a document on its way."""
        coming = [] if self.arrivals is None else self.arrivals.coming
        return any(one.kv.request is request for one in coming)

    def give_up(self) -> None:
        """The same, of what is on its way too; safe to call twice."""
        arrivals, self.arrivals = self.arrivals, None
        if arrivals is not None:
            arrivals.release()
        self.release()

    def __enter__(self) -> Brought:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.give_up()
        self.release()

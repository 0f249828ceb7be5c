"""`Reads`: what is read from one tier, by a thread of its own, with its bytes in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.loads import InFlight, Load, Wanted
from kvweave.runner.tiers.read_tier import ReadTier
from kvweave.runner.tiers.trouble import Trouble
from kvweave.runner.worker import Worker


class Reads:
    """At most `most` bytes from a tier are read and not on the device yet, or one prompt's.

    Tiers have a thread each, so one that is slow holds up nobody who reads from another.
    """

    def __init__(self, tier: ReadTier, most: int, trouble: Trouble) -> None:
        self.tier = tier
        self.worker = Worker(f"kvweave {tier.trouble}reads")
        self.flight = InFlight(most)
        self._trouble = trouble

    def load(
        self, wanted: Sequence[Wanted], size: Callable[[Document], int], urgency: tuple[int, int]
    ) -> Load | None:
        """Has those read that come from this tier, if any do."""
        reads = [want for want in wanted if want.choice.source == self.tier.source]
        if not reads:
            return None
        place = (self.worker, self.flight, self.tier)
        return Load(*place, reads, size, urgency, self._trouble)

    def may_be_asked(self, patience_s: float) -> bool:
        """Whether nothing is known to be wrong with it.

        That is a failure just now, or a read that goes on for longer than anybody waits.
        """
        load = self.worker.running
        began = load.began if isinstance(load, Load) else None
        is_stuck = began is not None and time.monotonic() - began > patience_s
        return not is_stuck and not self.tier.is_resting

    def end_step(self) -> None:
        """Hears that a step of an engine has ended, which could take what was read for prompts."""
        if self.flight.holders:
            with self.worker.changed:
                self.flight.steps += 1
                self.worker.changed.notify_all()

    def note_late(self, wanted: Sequence[Wanted], patience_s: float) -> None:
        """Has those computed that were not read in time."""
        late = [
            want
            for want in wanted
            if want.choice.source == self.tier.source and want.payload is None
        ]
        if not late:
            return
        why = f"{self.tier.called} did not answer within {patience_s} s"
        self._trouble.note(f"{self.tier.trouble}late", f"documents are computed: {why}")
        for want in late:
            want.compute(why)

    def close(self) -> None:
        """Ends the thread; a read that goes on is left alone."""
        self.worker.close(finish=False, most_s=0)

"""`DocumentWeighing`: whether a document of the folder is read, or computed with its prompt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from kvweave.flops import TextSizes, attention_flops, product_flops
from kvweave.runner.clock import Clock, Mark
from kvweave.runner.tiers.choice import choose
from kvweave.runner.tiers.measured import Measured

LEAST_ROWS = 32
"""Steps of fewer rows are not timed: decode, which says little of a prefill."""


@dataclass
class StepWork:
    """What the scheduler gave a step: rows, and pairs of a row and a key that it sees."""

    rows: int = 0
    pairs: int = 0

    @classmethod
    def of(cls, scheduled: Any) -> StepWork:
        """Of vLLM's `SchedulerOutput`; pairs are counted where the step is timed, no other time."""
        work = cls()
        counts = scheduled.num_scheduled_tokens
        if scheduled.total_num_scheduled_tokens < LEAST_ROWS:
            work.rows = scheduled.total_num_scheduled_tokens
            return work
        for new in scheduled.scheduled_new_reqs:
            work.add(new.num_computed_tokens, counts[new.req_id])
        cached = scheduled.scheduled_cached_reqs
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            work.add(start, counts[name])
        return work

    def add(self, start: int, count: int) -> None:
        """Rows [start, start + count) of a request."""
        self.rows += count
        self.pairs += count * start + count * (count + 1) // 2


class DocumentWeighing:
    """What reading and computing took on this rank so far, and what follows from it.

    Forwards are timed by events of the device, which nobody waits for; their FLOPs are counted of
    the rows that were not spared. `always`: every document is read, whatever that takes.
    """

    def __init__(self, sizes: TextSizes, layers: int, clock: Clock, *, always: bool) -> None:
        self._sizes, self._layers, self._always = sizes, layers, always
        self._clock = clock
        self._measured = Measured()
        self._begun: tuple[Mark, StepWork, int] | None = None
        self._ended: deque[tuple[Mark, Mark, int]] = deque()

    # ---- what things take ------------------------------------------------------------------

    def was_read(self, size: int, seconds: float) -> None:
        """A document of so many bytes was read, and written to the pages, in so many seconds."""
        self._measured.note("disk", size, seconds)

    def begin(self, work: StepWork, spared: int) -> None:
        """A forward begins; `spared`: (row, layer) pairs that none computed so far."""
        self._note_steps()
        self._begun = None
        if not self._always and work.rows >= LEAST_ROWS:
            self._begun = self._clock.mark(), work, spared

    def end(self, spared: int) -> None:
        """The forward has ended, or its last launch been made."""
        if self._begun is None:
            return
        (begun, work, before), self._begun = self._begun, None
        computed = max(work.rows - (spared - before) / self._layers, 0.0)
        flops = product_flops(work.rows, self._sizes.weights)
        flops += attention_flops(work.pairs, self._sizes.width)
        self._ended.append((begun, self._clock.mark(), round(flops * computed / work.rows)))

    def _note_steps(self) -> None:
        """Takes note of forwards that the device is done with."""
        while self._ended:
            begun, ended, flops = self._ended[0]
            if not self._clock.is_reached(ended):
                return
            self._measured.note("compute", flops, self._clock.seconds(begun, ended))
            self._ended.popleft()

    def flops(self, start: int, end: int) -> int:
        """FLOPs of computing a text's tokens [start, end)."""
        return self._sizes.flops(start, end)

    # ---- what follows ----------------------------------------------------------------------

    def is_worth_reading(self, size: int, start: int, end: int, others: int) -> bool:
        """Whether `size` bytes are read sooner than a prompt's tokens [start, end) are computed.

        `others`: tokens of the prompt that are computed anyway.
        """
        if self._always:
            return True
        self._note_steps()
        flops, beside = self._sizes.flops(start, end), self._sizes.flops(0, others)
        speeds = self._measured.speeds_for(size, flops, beside)
        if choose(["disk"], size, flops, speeds).source == "disk":
            return True
        self._measured.decline("disk", size)
        return False

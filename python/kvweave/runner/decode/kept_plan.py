"""`KeptPlan`: what was said of a step in which nobody was ranked, for the next ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvweave.runner.decode.chosen_step import LENGTH, NEWEST
from kvweave.runner.decode.listed_step import ListedStep
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.tables import Int32


@dataclass
class KeptPlan:
    """What was said of a step in which nobody was ranked: the next ones change little of it.

    Of the same `rows`, whose tables began at `begin` [B] and had `count` [B] entries: `kept` bool
    [B], whether a request reads what was chosen for it; it is ranked when its newest token is at
    `until` [B], and anybody when there are more entries than `most` [B]. `newest` i64 [B, n]: the
    places that are read beside what was chosen, as they are filled. `least` [B]: the entries that
    each had at its ranking.
    """

    rows: Int32
    begin: Int64
    count: Int64
    kept: npt.NDArray[np.bool_]
    until: Int64
    most: Int64
    least: Int64
    newest: Int64
    plan: Int32

    def holds(
        self, step: ListedStep, begin: Int64, count: Int64, known: npt.NDArray[np.bool_]
    ) -> bool:
        """Whether nobody is ranked in a step either. `known` as `_Budget` has it."""
        return (
            step.rows is self.rows
            and np.array_equal(begin, self.begin)
            # A table that is listed anew has another first entry.
            and bool(known[begin[self.kept]].all())
            and bool((step.positions < self.until).all())
            and bool((count <= self.most).all())
            and bool((count >= self.least).all())
        )

    def grown(self, count: Int64, nobody: int) -> Int32:
        """What is said when the tables have so many entries."""
        more = np.flatnonzero(count != self.count)
        if len(more):
            self.plan[more, LENGTH] += (count - self.count)[more].astype(np.int32)
            of = more[self.kept[more]]
            newest, ends = self.newest[of], (self.begin + count)[of]
            self.plan[of, NEWEST:] = np.where(newest < ends[:, None], newest, nobody)
            self.count = count
        return self.plan

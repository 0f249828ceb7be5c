"""Plans of a prompt that is prefilled in chunks of positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.plan import Draft, LayerPlan, Rows
from kvweave.plan_walk import Begin, Further, PlanWalk


def spans(start: int, end: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """[start, end) in chunks of `chunk_tokens`, the last of them shorter."""
    edges = [*range(start, end, chunk_tokens), end]
    return list(pairwise(edges))


def collected(walk: PlanWalk) -> list[LayerPlan]:
    """All plans of a policy that measures nothing.

    # Errors
    `InvalidArgument` for a plan that has a probe or restores a head, which needs all of its keys;
    for a draft or a second pass, which need all rows of the first; for what the walk refuses.
    """
    plans: list[LayerPlan] = []
    while (task := walk.advance()) is not None:
        if isinstance(task, (Draft, Further)) or (isinstance(task, Begin) and plans):
            got = "a draft" if isinstance(task, Draft) else "a second pass"
            raise InvalidArgument(
                f"layer plan: expected one pass of a policy that measures nothing, got {got}"
            )
        plan = task.plan
        if plan.restore:
            raise InvalidArgument(
                f"layer plan: expected one of a policy that measures nothing and restores no head, "
                f"got {len(plan.restore)} heads to restore in layer {plan.layer}"
            )
        if plan.probe is not None:
            raise InvalidArgument(
                f"layer plan: expected no probe of a policy that measures nothing, "
                f"got {plan.probe.value} in layer {plan.layer}"
            )
        plans.append(plan)
    return plans


def cut(plans: Sequence[LayerPlan], start: int, end: int) -> Iterator[LayerPlan]:
    """The plans' rows in [start, end); layers without any are left out."""

    def part(rows: Rows) -> Rows:
        low, high = np.searchsorted(rows, (start, end))
        return rows[low:high]

    # Layers mostly plan the very same array: so do their parts.
    parts: dict[int, Rows] = {}

    def kept(rows: Rows | None) -> Rows | None:
        return None if rows is None else parts.setdefault(id(rows), part(rows))

    for plan in plans:
        rows = kept(plan.rows)
        assert rows is not None
        if len(rows):
            yield replace(
                plan,
                rows=rows,
                local_rows=kept(plan.local_rows),
                ffn_rows=kept(plan.ffn_rows),
            )

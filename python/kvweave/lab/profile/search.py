"""The search of `certify`: which policies, and under which head maps, may keep a bound.

Policies are searched without a map first, coarsely and then near the cheapest that may do. A map
is then judged by what full loses under it. What a policy under a map loses is guessed to be what
the two lose together: the guess says which few of all pairs are measured, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvweave.cache import HeadClassMap
from kvweave.lab.profile.candidate import Candidate
from kvweave.lab.profile.effort import MARGINS, Effort, level_of_each, most_finalists
from kvweave.lab.profile.losses import Losses, LossMeter, StageJobs, race
from kvweave.lab.profile.runners import MapRunners
from kvweave.policies import Foresight, Full, Naive, Policy
from kvweave.policies.policy_profile import Bound
from kvweave.runner.progress import track

SHARES = (0.05, 0.1, 0.2, 0.35, 0.5)
DRAFTS = (0, 4, 16)
DEPTHS = (0.0, 0.5)
ALONE = (0, 8)
"""Drafts beside which tokens are also chosen by their own mass alone."""
LEAST_ROUNDS = 4
"""Rounds before a candidate is given up or taken."""


class Search:
    """What was looked at on the text that is searched on, by the candidates' names."""

    def __init__(self, meter: LossMeter, at: StageJobs, bound: Bound, effort: Effort) -> None:
        self.seen: dict[str, Losses] = {}
        self._meter, self._at = meter, at
        self._bound, self._effort = bound, effort

    def policies(self, heads: HeadClassMap | None) -> None:
        """Policies under one map, or without one: coarsely, then near the cheapest that may do.

        Full is one of them under a map, where it is no longer what all are compared with.
        """
        coarse: list[Policy] = [Naive(), *(Foresight(share=share) for share in SHARES)]
        coarse += [] if heads is None else [Full()]
        self._race("coarse", (Candidate(policy, heads) for policy in coarse), self._settled)
        losses = {s.candidate.text: _mean(s) for s in self.seen.values()}
        fine = near(losses, self._bound.value)
        self._race("fine", (Candidate(policy, heads) for policy in fine), self._settled)

    def heads(self, maps: Sequence[HeadClassMap], runners: MapRunners) -> None:
        """Full under each map, then policies under those that full loses little enough by."""
        whole = list(self.seen.values())
        alone = {one.name: one for one in (Candidate(Full(), heads) for heads in maps)}
        self._race("head maps", alone.values(), lambda losses: False)
        usable = [s for n in alone if _mean(s := self.seen[n]) <= self._bound.value]
        runners.keep([str(losses.candidate.digest) for losses in usable])
        pairs = list(guessed(whole, usable, self._bound.value))
        self._race("policies under head maps", pairs, self._settled)

    def _race(
        self, what: str, candidates: Iterable[Candidate], settled: Callable[[Losses], bool]
    ) -> None:
        new = {
            one.name: Losses(one, self._bound.kind)
            for one in candidates
            if one.name not in self.seen
        }
        rounds = track(range(self._effort.search), f"searching, {what}", self._meter.progress)
        race(self._meter, self._at, new, self._bound.value, rounds, settled)
        self.seen |= new

    def _settled(self, losses: Losses) -> bool:
        """Whether a candidate is surely within the bound."""
        enough = _rounds(losses) >= LEAST_ROUNDS
        return enough and losses.interval(self._bound.level).high <= self._bound.value


def near(means: Mapping[str, float], bound: float) -> Iterator[Policy]:
    """Policies about the cheapest of the coarse ones that may do; none where naive does.

    Budgets between it and the next cheaper one, with other drafts and depths and without averaging
    over neighbours; between the dearest and everything where none may do. `means`: losses of the
    coarse ones, by their text.
    """
    if means["naive"] <= bound:
        return
    may = [s for s in SHARES if means[Candidate(Foresight(share=s)).text] <= bound]
    dearer = min(may, default=1.0)
    cheaper = max((s for s in SHARES if s < dearer), default=dearer / 2)
    between = round(math.sqrt(cheaper * dearer), 3)
    yield Foresight(share=between)
    for draft in DRAFTS:
        yield Foresight(share=between, draft=draft)
    if may:
        yield Foresight(share=dearer, draft=0)
    for depth in DEPTHS:
        yield Foresight(share=between, depth=depth)
    for draft in ALONE:
        yield Foresight(share=between, draft=draft, near=1)


def guessed(
    whole: Sequence[Losses], under_maps: Sequence[Losses], bound: float
) -> Iterator[Candidate]:
    """For each map and margin the cheapest policy that is guessed to be within that of the bound.

    The guess is the policy's loss without a map (`whole`) and full's under it (`under_maps`).
    """
    cheapest = sorted(whole, key=lambda losses: losses.cost)
    for of_map in under_maps:
        lost = _mean(of_map)
        for margin in MARGINS:
            for losses in cheapest:
                if _mean(losses) + lost <= margin * bound:
                    yield Candidate(losses.candidate.policy, of_map.candidate.heads)
                    break


def finalists(seen: Sequence[Losses], bound: Bound, effort: Effort) -> list[Candidate]:
    """Of each margin the cheapest candidate that the larger number of samples is likely to certify.

    Where none is likely, the dearest whose mean is within the bound. Candidates of about the same
    cost would fail together, so they are not all that is tried. Where heads were searched the
    surest one without a map stands beside them, for maps may do worse on the other half.
    """
    whole = [losses for losses in seen if losses.candidate.heads is None]
    mapped = 0 < len(whole) < len(seen)
    most = most_finalists(mapped)
    likely, possible = _likely(seen, bound, effort, most)
    chosen = list(likely.values()) or possible[-1:]
    if mapped:
        surest, possible = _likely(whole, bound, effort, most)
        chosen += list(surest.values())[-1:] or possible[-1:]
    return list({one.name: one for one in chosen}.values())


def _likely(
    seen: Sequence[Losses], bound: Bound, effort: Effort, most: int
) -> tuple[dict[float, Candidate], list[Candidate]]:
    """By margin the cheapest likely candidate; and all whose mean is within the bound.

    An interval over c times the samples is about √c times narrower.
    """
    cheaper = sorted((s for s in seen if s.cost < 1.0), key=lambda s: s.cost)
    possible: list[Candidate] = []
    likely: dict[float, Candidate] = {}
    for losses in cheaper:
        found = losses.interval(level_of_each(bound, most))
        if not found.value <= bound.value:
            continue
        possible.append(losses.candidate)
        above = (found.high - found.value) * math.sqrt(_rounds(losses) / effort.certify)
        for margin in MARGINS:
            if found.value + above <= margin * bound.value:
                likely.setdefault(margin, losses.candidate)
    return likely, possible


def _rounds(losses: Losses) -> int:
    return min(map(len, losses.by_job.values()))


def _mean(losses: Losses) -> float:
    return losses.interval(0.95).value

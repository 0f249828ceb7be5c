"""`certify`: the cheapest policy whose loss against `full` on a model is within a stated bound.

Candidates are foresight at several budgets, drafts and depths, and naive, which is its budget of 0.
They are chosen on one half of a text, coarsely and then near the cheapest that may do; a few, which
are within the bound by more or less, are measured on samples of the other half, and the cheapest of
these whose interval ends within it is the profile's. With several of them the level of each
interval is raised (Bonferroni), so that the chance of a false certificate is what the stated level
says.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave import __version__
from kvweave.errors import InvalidArgument
from kvweave.lab.eval import Task, task_of
from kvweave.lab.eval.corpus import DEFAULT_CORPUS, HALVES, corpus_of
from kvweave.lab.profile.losses import Losses, LossMeter, StageJobs, race, samples_needed
from kvweave.policies import Foresight, Naive, Policy
from kvweave.policies.policy_profile import (
    Bound,
    Evidence,
    PolicyProfile,
    Stage,
    Text,
    heads_digest,
)
from kvweave.policies.policy_text import text_of
from kvweave.runner import Runner
from kvweave.runner.progress import track

ALL_JOBS = "all jobs"
SHARES = (0.05, 0.1, 0.2, 0.35, 0.5)
DRAFTS = (0, 4, 16)
DEPTHS = (0.0, 0.5)
MARGINS = (1.0, 0.75, 0.5)
"""Shares of the bound that the finalists are likely to be within: the other half is other text."""
FINALISTS = len(MARGINS)
LEAST_ROUNDS = 4
"""Rounds before a candidate is given up or taken."""


@dataclass(frozen=True)
class CertifyJob:
    """A task at a prompt length, and how it is laid out: see `task_of`."""

    task: str
    length: int
    layout: str | None = None
    documents: int | None = None

    def on(self, corpus: str) -> Task:
        """The task on a text, where it uses one."""
        uses_none = self.task in ("lookup", "lookups", "common-words", "frequent-words")
        text = None if uses_none else corpus
        return task_of(self.task, self.length, text, self.layout, self.documents)


@dataclass(frozen=True)
class Effort:
    """What is measured: jobs, and samples of each for the search and for the certificate."""

    jobs: tuple[CertifyJob, ...]
    search: int
    certify: int
    max_new_tokens: int = 16

    @property
    def longest(self) -> int:
        """The longest prompt, in tokens."""
        return max(job.length for job in self.jobs)


KL_JOBS = (
    CertifyJob("lm", 1024, "plain", 8),
    CertifyJob("needles", 512, "plain", 4),
    CertifyJob("two-hop", 512, "plain", 4),
)
SCORE_JOBS = KL_JOBS[1:]


def effort_of(bound: Bound, quick: bool = False) -> Effort:
    """The usual effort for a bound; `quick` takes one short job of KL, of score it spares nothing.

    A drop of score is certified on as many samples as bound it when none loses anything.
    """
    if bound.kind == "kl":
        jobs = (CertifyJob("lm", 512, "plain", 4),) if quick else KL_JOBS
        return Effort(jobs, *((6, 12) if quick else (6, 16)))
    rounds = math.ceil(samples_needed(bound.value, _level(bound, FINALISTS)) / len(SCORE_JOBS))
    return Effort(SCORE_JOBS, 6, max(rounds, 12))


def certify(
    runner: Runner,
    bound: Bound,
    *,
    effort: Effort | None = None,
    corpus: str = DEFAULT_CORPUS,
    whole: Runner | None = None,
    seed: int = 0,
    log: Path | None = None,
) -> PolicyProfile:
    """Searches, certifies, and says what was found; `full` where nothing is within the bound.

    `corpus`: the text, whose first half is searched on and whose second half certifies. A runner
    with a head map needs a `whole` one of the same model without it: full is measured there. `log`
    keeps each sample, and what it holds is not measured again. The same arguments give the same
    profile, but for the date.

    # Errors
    `InvalidArgument` for a runner without a tokenizer, a head map without a whole runner, fewer
    samples than can certify a drop of score, a prompt that the text or the arena does not hold, or
    a log of something else; `TextUnavailable` for a text that is not installed.
    """
    chosen = effort or effort_of(bound)
    reference = _checked(runner, bound, chosen, whole)
    halves = [f"{corpus}#{half}" for half in HALVES]
    search, certifying = (
        StageJobs(stage, tuple(job.on(half) for job in chosen.jobs))
        for stage, half in zip(_STAGES, halves, strict=True)
    )
    meter = LossMeter(runner, reference, (search, certifying), seed, chosen.max_new_tokens, log)
    progress = runner.progress
    seen = _searched(meter, search, bound, chosen, progress)
    finalists = _finalists(list(seen.values()), bound, chosen)
    level = _level(bound, len(finalists))
    final = {title: Losses(seen[title].policy, bound.kind) for title in map(text_of, finalists)}
    rounds = track(range(chosen.certify), "certifying", progress)
    race(meter, certifying, final, bound.value, rounds, lambda losses: False)
    within = [
        (losses.flops_share, title)
        for title, losses in final.items()
        if losses.samples == chosen.certify * len(chosen.jobs)
        and losses.interval(level).high <= bound.value
    ]
    share, title = min(within, default=(1.0, "full"))
    return PolicyProfile(
        model_fingerprint=runner.spec.fingerprint,
        dtype=str(runner.spec.dtype).removeprefix("torch."),
        policy=title,
        bound=bound,
        flops_share=share,
        evidence=(
            *_evidence(search, seen, bound.level),
            *_evidence(certifying, final, level),
        ),
        texts=tuple(Text(half, corpus_of(half).digest) for half in halves),
        seed=seed,
        kvweave=__version__,
        date=datetime.date.today().isoformat(),
        heads=_digest(runner),
    )


_STAGES: tuple[Stage, Stage] = ("search", "certify")


def _checked(runner: Runner, bound: Bound, effort: Effort, whole: Runner | None) -> Runner:
    """The runner that full is measured by; errors as `certify`."""
    reference = runner if whole is None else whole
    if reference.prompts.tokenizer is None:
        raise InvalidArgument("certify: expected a runner with a tokenizer, got none")
    if reference.heads is not None:
        raise InvalidArgument("certify: expected a whole runner without a head map, got one")
    if reference.spec.fingerprint != runner.spec.fingerprint:
        raise InvalidArgument("certify: expected two runners of one model, got two models")
    if not effort.jobs or effort.search < 1 or effort.certify < 1:
        raise InvalidArgument("effort: expected jobs and samples of each stage, got none")
    if bound.kind == "score-drop":
        needed = samples_needed(bound.value, bound.level)
        given = effort.certify * len(effort.jobs)
        if given < needed:
            raise InvalidArgument(
                f"samples: expected at least {needed}, as fewer cannot certify {bound}, got {given}"
            )
        if any(job.task == "lm" for job in effort.jobs):
            raise InvalidArgument("score-drop: expected tasks with answers, got lm")
    return reference


def _digest(runner: Runner) -> str | None:
    return None if runner.heads is None else heads_digest(runner.heads)


def _level(bound: Bound, finalists: int) -> float:
    """Of each of several intervals, so that all of them hold with the bound's."""
    return 1.0 - (1.0 - bound.level) / max(1, finalists)


def _searched(
    meter: LossMeter, at: StageJobs, bound: Bound, effort: Effort, progress: bool
) -> dict[str, Losses]:
    """All candidates that were looked at, by their text."""
    coarse: list[Policy] = [Naive(), *(Foresight(share=share) for share in SHARES)]
    seen: dict[str, Losses] = {}
    for what, policies in (("coarse", coarse), ("fine", None)):
        chosen = list(_near(seen, bound)) if policies is None else policies
        new = {
            title: Losses(policy, bound.kind)
            for policy in chosen
            if (title := text_of(policy)) not in seen
        }
        rounds = track(range(effort.search), f"searching, {what}", progress)
        race(meter, at, new, bound.value, rounds, lambda losses: _settled(losses, bound))
        seen |= new
    return seen


def _settled(losses: Losses, bound: Bound) -> bool:
    """Whether a candidate of the search is surely within the bound."""
    rounds = min(map(len, losses.by_job.values()))
    return rounds >= LEAST_ROUNDS and losses.interval(bound.level).high <= bound.value


def _near(seen: Mapping[str, Losses], bound: Bound) -> Iterator[Policy]:
    """Candidates about the cheapest of the coarse ones that may do; none where naive does.

    Budgets between it and the next cheaper one, with other drafts and depths.
    """
    may = [s for s in SHARES if _mean(seen[text_of(Foresight(share=s))]) <= bound.value]
    if _mean(seen[text_of(Naive())]) <= bound.value or not may:
        return
    dearer = min(may)
    cheaper = max((s for s in SHARES if s < dearer), default=dearer / 2)
    between = round(math.sqrt(cheaper * dearer), 3)
    yield Foresight(share=between)
    for draft in DRAFTS:
        yield Foresight(share=between, draft=draft)
    yield Foresight(share=dearer, draft=0)
    for depth in DEPTHS:
        yield Foresight(share=between, depth=depth)


def _mean(losses: Losses) -> float:
    return losses.interval(0.95).value


def _finalists(seen: Sequence[Losses], bound: Bound, effort: Effort) -> list[Policy]:
    """Of each margin the cheapest candidate that the larger number of samples is likely to certify.

    An interval over c times the samples is about √c times narrower. Where none is likely, the
    dearest whose mean is within the bound. Candidates of about the same cost would fail together,
    so they are not all that is tried.
    """
    cheaper = sorted((s for s in seen if s.flops_share < 1.0), key=lambda s: s.flops_share)
    possible: list[Policy] = []
    likely: dict[float, Policy] = {}
    for losses in cheaper:
        found = losses.interval(_level(bound, FINALISTS))
        if not found.value <= bound.value:
            continue
        possible.append(losses.policy)
        rounds = min(map(len, losses.by_job.values()))
        above = (found.high - found.value) * math.sqrt(rounds / effort.certify)
        for margin in MARGINS:
            if found.value + above <= margin * bound.value:
                likely.setdefault(margin, losses.policy)
    chosen = {text_of(policy): policy for policy in likely.values()}
    return list(chosen.values()) or possible[-1:]


def _evidence(at: StageJobs, measured: Mapping[str, Losses], level: float) -> Iterator[Evidence]:
    """What was measured of each candidate, the cheapest first: all jobs together, then each."""
    for title, losses in sorted(measured.items(), key=lambda item: item[1].flops_share):
        lengths = max(task.length for task in at.tasks)
        yield _row(at.stage, title, losses, level, (ALL_JOBS, ALL_JOBS, None, lengths), None)
        for task in at.tasks:
            layout = getattr(task, "layout", None)
            named = None if layout is None else f"{layout.name} {layout.documents}"
            name = at.name(task)
            about = (name.removeprefix(f"{at.stage}: "), task.name, named, task.length)
            yield _row(at.stage, title, losses, level, about, name)


def _row(
    stage: Stage,
    title: str,
    losses: Losses,
    level: float,
    about: tuple[str, str, str | None, int],
    job: str | None,
) -> Evidence:
    one = losses if job is None else losses.of(job)
    found = one.interval(level)
    value, low, high = (
        float(number) if math.isfinite(number) else None
        for number in (found.value, found.low, found.high)
    )
    return Evidence(stage, title, *about, one.samples, one.lost, value, low, high, one.flops_share)

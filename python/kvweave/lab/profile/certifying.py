"""`certify`: what is cheapest of all whose loss against `full` on a model is within a stated bound.

Candidates are foresight at several budgets, drafts and depths, and naive, which is its budget of 0;
where heads are searched, these and full under some head maps. They are chosen on one half of a text
(see `Search`); a few, which are within the bound by more or less, are measured on samples of the
other half, and the cheapest of these whose interval ends within it is the profile's. With several
of them the level of each interval is raised (Bonferroni), so that the chance of a false certificate
is what the stated level says.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvweave import __version__
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import DEFAULT_CORPUS, HALVES, corpus_of
from kvweave.lab.profile.effort import Effort, effort_of, level_of_each
from kvweave.lab.profile.head_ladder import HeadLadder
from kvweave.lab.profile.losses import Losses, LossMeter, StageJobs, race, samples_needed
from kvweave.lab.profile.runners import MapRunners
from kvweave.lab.profile.search import Search, finalists
from kvweave.policies.policy_profile import (
    Bound,
    Evidence,
    PolicyProfile,
    Stage,
    Text,
    TriedHeads,
    heads_digest,
)
from kvweave.runner import Runner
from kvweave.runner.progress import track

ALL_JOBS = "all jobs"
_STAGES: tuple[Stage, Stage] = ("search", "certify")


def certify(
    runner: Runner,
    bound: Bound,
    *,
    effort: Effort | None = None,
    corpus: str = DEFAULT_CORPUS,
    whole: Runner | None = None,
    ladder: HeadLadder | None = None,
    seed: int = 0,
    log: Path | None = None,
) -> PolicyProfile:
    """Searches, certifies, and says what was found; `full` where nothing is within the bound.

    `corpus`: the text, whose first half is searched on and whose second half certifies. A runner
    with a head map needs a `whole` one of the same model without it: full is measured there. With a
    `ladder` head maps are searched too: heads are profiled on the first half, before anything else.
    `log` keeps each sample, and what it holds is not measured again. The same arguments give the
    same profile, but for the date.

    # Errors
    `InvalidArgument` for a runner without a tokenizer, a head map without a whole runner or beside
    a ladder, fewer samples than can certify a drop of score, a prompt that the text or the arena
    does not hold, or a log of something else; as `profile_heads` where there is a ladder;
    `TextUnavailable` for a text that is not installed.
    """
    chosen = effort or effort_of(bound, find_heads=ladder is not None)
    reference = _checked(runner, bound, chosen, whole, ladder)
    halves = [f"{corpus}#{half}" for half in HALVES]
    search, certifying = (
        StageJobs(stage, tuple(job.on(half) for job in chosen.jobs))
        for stage, half in zip(_STAGES, halves, strict=True)
    )
    runners = MapRunners(reference, runner, None if ladder is None else ladder.make_runner)
    new_tokens = chosen.max_new_tokens
    meter = LossMeter(runners, (search, certifying), seed, new_tokens, bound.kind, log)
    maps = () if ladder is None else ladder.maps(runner, halves[0], seed)
    found = Search(meter, search, bound, chosen)
    found.policies(runner.heads)
    if maps:
        found.heads(maps, runners)
    final, level = _certified(meter, certifying, found.seen, bound, chosen)
    within = [
        losses
        for losses in final.values()
        if losses.samples == chosen.certify * len(chosen.jobs)
        and losses.interval(level).high <= bound.value
    ]
    best = min(within, key=lambda losses: (losses.cost, losses.candidate.name), default=None)
    evidence = (
        *_evidence(search, found.seen, bound.level),
        *_evidence(certifying, final, level),
    )
    return PolicyProfile(
        model_fingerprint=runner.spec.fingerprint,
        dtype=str(runner.spec.dtype).removeprefix("torch."),
        policy="full" if best is None else best.candidate.text,
        heads=None if best is None else best.candidate.heads,
        bound=bound,
        flops_share=1.0 if best is None else best.flops_share,
        kv_share=1.0 if best is None else best.kv_share,
        evidence=evidence,
        tried_heads=tuple(map(_tried, maps if runner.heads is None else (runner.heads,))),
        texts=tuple(Text(half, corpus_of(half).digest) for half in halves),
        seed=seed,
        kvweave=__version__,
        date=datetime.date.today().isoformat(),
    )


def _certified(
    meter: LossMeter, at: StageJobs, seen: Mapping[str, Losses], bound: Bound, effort: Effort
) -> tuple[dict[str, Losses], float]:
    """What the finalists lost on the other half, and the level of each interval."""
    last = finalists(list(seen.values()), bound, effort)
    final = {one.name: Losses(one, bound.kind) for one in last}
    rounds = track(range(effort.certify), "certifying", meter.progress)
    race(meter, at, final, bound.value, rounds, lambda losses: False)
    return final, level_of_each(bound, len(last))


def _tried(heads: HeadClassMap) -> TriedHeads:
    kinds = [head["class"]["kind"] for head in json.loads(heads.to_json())["heads"]]
    whole = sum(kind != "window" for kind in kinds)
    return TriedHeads(heads_digest(heads), whole, len(kinds))


def _checked(
    runner: Runner, bound: Bound, effort: Effort, whole: Runner | None, ladder: HeadLadder | None
) -> Runner:
    """The runner that full is measured by; errors as `certify`."""
    reference = runner if whole is None else whole
    if reference.prompts.tokenizer is None:
        raise InvalidArgument("certify: expected a runner with a tokenizer, got none")
    if reference.heads is not None:
        raise InvalidArgument("certify: expected a whole runner without a head map, got one")
    if reference.spec.fingerprint != runner.spec.fingerprint:
        raise InvalidArgument("certify: expected two runners of one model, got two models")
    if ladder is not None and runner.heads is not None:
        raise InvalidArgument("certify: expected a head map or a ladder of them, got both")
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


def _evidence(at: StageJobs, measured: Mapping[str, Losses], level: float) -> Iterator[Evidence]:
    """What was measured of each candidate, the cheapest first: all jobs together, then each."""
    for losses in sorted(measured.values(), key=lambda losses: losses.cost):
        lengths = max(task.length for task in at.tasks)
        yield _row(at.stage, losses, level, (ALL_JOBS, ALL_JOBS, None, lengths), None)
        for task in at.tasks:
            layout = getattr(task, "layout", None)
            named = None if layout is None else f"{layout.name} {layout.documents}"
            name = at.name(task)
            about = (name.removeprefix(f"{at.stage}: "), task.name, named, task.length)
            yield _row(at.stage, losses, level, about, name)


def _row(
    stage: Stage,
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
    return Evidence(
        stage,
        one.candidate.text,
        one.candidate.digest,
        *about,
        one.samples,
        one.lost,
        value,
        low,
        high,
        one.flops_share,
        one.kv_share,
    )

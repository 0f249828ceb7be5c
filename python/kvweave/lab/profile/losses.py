"""What candidates lose against `full`, sample by sample, and what that says about a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.lab.eval import (
    Bootstrap,
    Interval,
    Measurement,
    MeasurementLog,
    SampleMeasurer,
    Task,
    inserted,
    job_name,
)
from kvweave.lab.eval.corpus import corpus_of
from kvweave.lab.eval.summary import mean_kl
from kvweave.lab.profile.candidate import Candidate
from kvweave.lab.profile.runners import MapRunners
from kvweave.policies.policy_profile import BoundKind, Stage
from kvweave.runner.lossy.mean_bound import surely_above

STOPPED_AT = 0.99
"""How sure it must be that a candidate is above the bound before it is given up."""


@dataclass(frozen=True)
class StageJobs:
    """The tasks of one stage, whose samples are drawn from numbers of their own."""

    stage: Stage
    tasks: tuple[Task, ...]

    def name(self, task: Task) -> str:
        """The name of a job in the log."""
        return f"{self.stage}: {job_name(task)}"

    def numbers(self, seed: int, index: int) -> np.random.Generator:
        """What the sample of that index is drawn from."""
        return np.random.default_rng([seed, ("search", "certify").index(self.stage), index])


class LossMeter:
    """Measures candidates on samples; what a log holds already is not measured again.

    Full is measured by the whole runner of `runners`, once a sample, and each candidate by the one
    under its map. What candidates would answer is generated where their scores are asked for.
    """

    def __init__(
        self,
        runners: MapRunners,
        stages: Sequence[StageJobs],
        seed: int,
        max_new_tokens: int,
        kind: BoundKind,
        log: Path | None,
    ) -> None:
        self._runners = runners
        self._seed, self._max_new_tokens = seed, max_new_tokens
        self._scored = kind == "score-drop"
        self._samples: dict[tuple[str, int], tuple[SampleMeasurer, Measurement]] = {}
        spec = runners.whole.spec
        subject = {
            "model": spec.fingerprint,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "device": spec.device.type,
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "own_answers": self._scored,
        }
        self._log = MeasurementLog(log, subject)
        self._log.define({at.name(task): _meaning(task) for at in stages for task in at.tasks}, {})

    @property
    def progress(self) -> bool:
        """Whether the whole runner shows any."""
        return self._runners.whole.progress

    def measure(
        self, at: StageJobs, task: Task, index: int, candidates: Mapping[str, Candidate]
    ) -> dict[str, Measurement]:
        """Full and the candidates by name, on one sample."""
        self._log.define({}, {name: _told(one) for name, one in candidates.items()})
        known = self._log.measured(at.name(task), index)
        wanted = {"full", *candidates}
        if not wanted <= known.keys():
            new = self._made(at, task, index, candidates, known)
            self._log.append(at.name(task), index, new)
            known = self._log.measured(at.name(task), index)
        return {name: known[name] for name in ("full", *candidates)}

    def _made(
        self,
        at: StageJobs,
        task: Task,
        index: int,
        candidates: Mapping[str, Candidate],
        known: Mapping[str, Measurement],
    ) -> list[Measurement]:
        """What is not known yet; all of it, if full now answers something else."""
        whole = self._runners.whole
        sample = task.sample(whole.prompts.tokenizer, at.numbers(self._seed, index))
        namespace = f"certify/{at.name(task)}/{self._seed}/{index}"
        with inserted(whole, sample, namespace) as ready:
            if (at.name(task), index) not in self._samples:
                measurer = SampleMeasurer(
                    whole,
                    ready,
                    index,
                    namespace,
                    self._max_new_tokens,
                    own_answers=self._scored,
                )
                self._samples[at.name(task), index] = measurer, measurer.full()
            measurer, full = self._samples[at.name(task), index]
            if "full" in known and known["full"].answer != full.answer:
                known = {}
            made = [full] * ("full" not in known)
            new = {name: one for name, one in candidates.items() if name not in known}
            for digest in {one.digest: None for one in new.values()}:
                under = {name: one for name, one in new.items() if one.digest == digest}
                runner = self._runners.of(next(iter(under.values())))
                with nullcontext() if runner is whole else inserted(runner, sample, namespace):
                    here = measurer.on(runner)
                    made += [here.policy(one.policy, name=name) for name, one in under.items()]
        return made


@dataclass
class Losses:
    """One candidate's losses, [rounds] for each job; a round is one sample of every job.

    A loss that is no number is infinite. `flops`, `full_flops`, `kv` and `full_kv` (bytes): sums
    over the same samples.
    """

    candidate: Candidate
    kind: BoundKind
    by_job: dict[str, list[float]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    full_flops: dict[str, int] = field(default_factory=dict)
    kv: dict[str, int] = field(default_factory=dict)
    full_kv: dict[str, int] = field(default_factory=dict)

    def add(self, job: str, full: Measurement, mine: Measurement) -> None:
        """Takes in one sample."""
        loss = mean_kl(mine) if self.kind == "kl" else full.score - mine.score
        self.by_job.setdefault(job, []).append(loss if math.isfinite(loss) else math.inf)
        for totals, number in (
            (self.flops, mine.flops),
            (self.full_flops, full.flops),
            (self.kv, mine.kv_bytes + mine.shared_kv_bytes),
            (self.full_kv, full.kv_bytes + full.shared_kv_bytes),
        ):
            totals[job] = totals.get(job, 0) + number

    @property
    def flops_share(self) -> float:
        """Of full's, over all samples; infinite before the first."""
        return _share(self.flops, self.full_flops)

    @property
    def kv_share(self) -> float:
        """Bytes of KV that prompts hold once they are prefilled, of full's without a map."""
        return _share(self.kv, self.full_kv)

    @property
    def cost(self) -> float:
        """What candidates are ordered by: `flops_share` × `kv_share`, 1 for full without a map.

        To halve the one is worth as much as to halve the other.
        """
        return self.flops_share * self.kv_share

    @property
    def samples(self) -> int:
        """Of all jobs."""
        return sum(map(len, self.by_job.values()))

    @property
    def lost(self) -> int:
        """Samples whose loss is no number."""
        return sum(math.isinf(loss) for losses in self.by_job.values() for loss in losses)

    def surely_above(self, bound: float) -> bool:
        """Whether the mean is above the bound, at whatever round one looks.

        Rounds are independent; samples of different jobs have means of their own.
        """
        rounds = np.mean(list(self.by_job.values()), axis=0)
        # A score that rises is a loss of down to −1; the test is one of numbers >= 0.
        lift = 0.0 if self.kind == "kl" else 1.0
        return surely_above((rounds + lift).tolist(), bound + lift, STOPPED_AT)

    def interval(self, level: float) -> Interval:
        """The mean over jobs, each weighing alike, with its interval.

        Where no sample lost any score the bootstrap sees no spread; the upper end is then what n
        samples without a loss say of a loss of 1 (Clopper and Pearson 1934): 1 − (α/2)^(1/n).
        Infinite for a loss that is no number.
        """
        losses = list(self.by_job.values())
        if any(math.isinf(loss) for one in losses for loss in one):
            return Interval(math.inf, math.inf, math.inf)
        found = Bootstrap(level).pooled(losses)
        if self.kind == "score-drop" and max(map(max, losses)) <= 0.0:
            unseen = -math.expm1(math.log((1.0 - level) / 2.0) / sum(map(len, losses)))
            return replace(found, high=float(np.fmax(unseen, found.high)))
        return found

    def of(self, job: str) -> Losses:
        """Those of one job alone."""
        parts = self.flops, self.full_flops, self.kv, self.full_kv
        sums = ({job: part[job]} for part in parts)
        return Losses(self.candidate, self.kind, {job: self.by_job[job]}, *sums)


def _share(mine: Mapping[str, int], full: Mapping[str, int]) -> float:
    whole = sum(full.values())
    return sum(mine.values()) / whole if whole else math.inf


def samples_needed(drop: float, level: float) -> int:
    """Samples without any loss that bound a loss of score: see `Losses.interval`."""
    return math.ceil(math.log((1.0 - level) / 2.0) / math.log1p(-min(drop, 1.0 - 1e-12)))


def race(
    meter: LossMeter,
    at: StageJobs,
    candidates: Mapping[str, Losses],
    bound: float,
    rounds: Iterable[int],
    settled: Callable[[Losses], bool],
) -> None:
    """Measures candidates round by round, each as long as there is something to learn of it.

    One that is surely above the bound is measured no further. Neither is one that is settled, nor
    any that costs more than it.
    """
    live = dict(candidates)
    for index in rounds:
        if not live:
            return
        measured = {name: losses.candidate for name, losses in live.items()}
        for task in at.tasks:
            found = meter.measure(at, task, index, measured)
            for name, losses in live.items():
                losses.add(at.name(task), found["full"], found[name])
        live = {name: losses for name, losses in live.items() if not losses.surely_above(bound)}
        enough = min((s.cost for s in live.values() if settled(s)), default=math.inf)
        live = {name: losses for name, losses in live.items() if losses.cost < enough}


def _told(candidate: Candidate) -> str:
    """What a name in the log stands for."""
    policy = repr(candidate.policy)
    return policy if candidate.digest is None else f"{policy} under {candidate.digest}"


def _meaning(task: Task) -> dict[str, Any]:
    """What decides a job's samples."""
    digest = None if task.corpus is None else corpus_of(task.corpus).digest
    return {
        "repr": repr(task),
        "task": task.name,
        "length": task.length,
        "score_name": task.score_name,
        "corpus_digest": digest,
    }

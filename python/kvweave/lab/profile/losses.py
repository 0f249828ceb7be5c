"""What policies lose against `full`, sample by sample, and what that says about a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
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
from kvweave.policies import Policy
from kvweave.policies.policy_profile import BoundKind, Stage, heads_digest
from kvweave.runner import Runner
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
    """Measures policies on samples; what a log holds already is not measured again.

    `whole` is the runner that full is measured by: the same one, or one of the same model without
    the head map of `runner`.
    """

    def __init__(
        self,
        runner: Runner,
        whole: Runner,
        stages: Sequence[StageJobs],
        seed: int,
        max_new_tokens: int,
        log: Path | None,
    ) -> None:
        self._runner, self._whole = runner, whole
        self._seed, self._max_new_tokens = seed, max_new_tokens
        subject = {
            "model": runner.spec.fingerprint,
            "dtype": str(runner.spec.dtype).removeprefix("torch."),
            "device": runner.spec.device.type,
            "heads": None if runner.heads is None else heads_digest(runner.heads),
            "seed": seed,
            "max_new_tokens": max_new_tokens,
        }
        self._log = MeasurementLog(log, subject)
        self._log.define({at.name(task): _meaning(task) for at in stages for task in at.tasks}, {})

    def measure(
        self, at: StageJobs, task: Task, index: int, policies: Mapping[str, Policy]
    ) -> dict[str, Measurement]:
        """Full and the policies by name, on one sample."""
        self._log.define({}, {name: repr(policy) for name, policy in policies.items()})
        known = self._log.measured(at.name(task), index)
        wanted = {"full", *policies}
        if not wanted <= known.keys():
            new = self._made(at, task, index, policies, known)
            self._log.append(at.name(task), index, new)
            known = self._log.measured(at.name(task), index)
        return {name: known[name] for name in ("full", *policies)}

    def _made(
        self,
        at: StageJobs,
        task: Task,
        index: int,
        policies: Mapping[str, Policy],
        known: Mapping[str, Measurement],
    ) -> list[Measurement]:
        """What is not known yet; all of it, if full now answers something else."""
        sample = task.sample(self._whole.prompts.tokenizer, at.numbers(self._seed, index))
        namespace = f"certify/{at.name(task)}/{self._seed}/{index}"
        with ExitStack() as stack:
            ready = stack.enter_context(inserted(self._whole, sample, namespace))
            measurer = SampleMeasurer(self._whole, ready, index, namespace, self._max_new_tokens)
            full = measurer.full()
            if self._runner is not self._whole:
                stack.enter_context(inserted(self._runner, sample, namespace))
                measurer = measurer.on(self._runner)
            if "full" in known and known["full"].answer != full.answer:
                known = {}
            return [full] * ("full" not in known) + [
                measurer.policy(policy, name=name)
                for name, policy in policies.items()
                if name not in known
            ]


@dataclass
class Losses:
    """One policy's losses, [rounds] for each job; a round is one sample of every job.

    A loss that is no number is infinite. `flops` and `full_flops`: over the same samples.
    """

    policy: Policy
    kind: BoundKind
    by_job: dict[str, list[float]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    full_flops: dict[str, int] = field(default_factory=dict)

    def add(self, job: str, full: Measurement, mine: Measurement) -> None:
        """Takes in one sample."""
        loss = mean_kl(mine) if self.kind == "kl" else full.score - mine.score
        self.by_job.setdefault(job, []).append(loss if math.isfinite(loss) else math.inf)
        self.flops[job] = self.flops.get(job, 0) + mine.flops
        self.full_flops[job] = self.full_flops.get(job, 0) + full.flops

    @property
    def flops_share(self) -> float:
        """Of full's, over all samples; infinite before the first."""
        full = sum(self.full_flops.values())
        return sum(self.flops.values()) / full if full else math.inf

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
        return Losses(
            self.policy,
            self.kind,
            {job: self.by_job[job]},
            {job: self.flops[job]},
            {job: self.full_flops[job]},
        )


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
    any that computes more than it.
    """
    live = dict(candidates)
    for index in rounds:
        if not live:
            return
        policies = {name: losses.policy for name, losses in live.items()}
        for task in at.tasks:
            found = meter.measure(at, task, index, policies)
            for name, losses in live.items():
                losses.add(at.name(task), found["full"], found[name])
        live = {name: losses for name, losses in live.items() if not losses.surely_above(bound)}
        enough = min((s.flops_share for s in live.values() if settled(s)), default=math.inf)
        live = {name: losses for name, losses in live.items() if losses.flops_share < enough}


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

"""Jobs measured sample by sample, each under every policy that its log does not hold yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.arguments import several, shown, whole
from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import corpus_of
from kvweave.lab.eval.encoded import KnowledgeBase
from kvweave.lab.eval.laid_out import LaidOut
from kvweave.lab.eval.log import LogContents, MeasurementLog
from kvweave.lab.eval.measure import (
    CONTROL,
    FLOOR,
    MAX_NEW_TOKENS,
    Measurement,
    Role,
    SampleMeasurer,
    of_turns,
)
from kvweave.lab.eval.sample import Sample, Task
from kvweave.lab.eval.summary import Evaluation, evaluations_of
from kvweave.policies import Policy
from kvweave.policies.policy_text import titled
from kvweave.runner import Conversation, Runner
from kvweave.runner.progress import track


@dataclass(frozen=True)
class Shard:
    """Every `of`-th sample, from the `number`-th on: what one of several processes measures.

    Raises InvalidArgument unless 1 <= number <= of.
    """

    number: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        for name in ("number", "of"):
            whole("shard", getattr(self, name), 1, name=name)
        if not self.number <= self.of:
            raise InvalidArgument(f"shard: expected i/n with 1 <= i <= n, got {self}")

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @staticmethod
    def read(text: str) -> Shard:
        """A shard written `i/n`; raises InvalidArgument for any other text."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None:
            raise InvalidArgument(f"shard: expected i/n with 1 <= i <= n, got {shown(text)}")
        return Shard(int(found[1]), int(found[2]))

    def holds(self, sample: int) -> bool:
        """Whether this process measures the sample."""
        return sample % self.of == self.number - 1


WHOLE = Shard()


@dataclass(frozen=True)
class How:
    """How samples are measured: what all jobs of a run have in common.

    `controlled`: the first so many samples of a job also get the noise floor and the control
    without Δ-RoPE; None: all.
    """

    policies: Sequence[str | Policy]
    seed: int = 0
    max_new_tokens: int = MAX_NEW_TOKENS
    agreement_tokens: int = 0
    controlled: int | None = None
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        several("policies", self.policies, "policies")
        whole("seed", self.seed, 0)
        whole("max_new_tokens", self.max_new_tokens, 1)
        whole("agreement_tokens", self.agreement_tokens, 0)
        if self.controlled is not None:
            whole("controlled", self.controlled, 0)

    def wanted(self, sample: int) -> set[str]:
        """The names of all that a sample is measured under."""
        names = {"full", *self.named()}
        if self.controlled is None or sample < self.controlled:
            names |= {FLOOR, CONTROL.name}
        return names

    def named(self) -> dict[str, Policy]:
        """The policies by name, without full, which always comes, and with naive, which too."""
        named = titled(["naive", *self.policies])
        named.pop("full", None)
        return named


def measure_jobs(
    runner: Runner, jobs: Sequence[tuple[Task, int]], how: How, log: Path | None = None
) -> list[Evaluation]:
    """Measures tasks on so many samples each; the evaluations are in the order of the jobs.

    Each segment of a sample is first encoded alone. Besides the policies asked for there are
    always `full` (the reference), `naive` (the other end of the gap) and, for some samples, the
    noise floor and the control without Δ-RoPE. With `log`, each sample is kept in that file once
    it is measured, and what the file already holds is not measured again: of a sample that lacks
    some policies these alone are. A shard without a sample of a job has no evaluation of it.

    Raises InvalidArgument for an unknown policy, two of one name with other settings, no samples,
    two jobs of one name, a runner without a tokenizer, or a log of something else.
    """
    if runner.prompts.tokenizer is None:
        raise InvalidArgument("evaluate: expected a runner with a tokenizer, got none")
    named = how.named()
    defined: dict[str, dict[str, Any]] = {}
    for task, samples in jobs:
        whole("samples", samples, 1)
        name = job_name(task)
        if name in defined:
            raise InvalidArgument(f"jobs: expected {name} once, got it twice")
        defined[name] = _definition(task)
    subject = _subject(runner, how)
    kept = MeasurementLog(log, subject)
    kept.define(defined, {name: repr(policy) for name, policy in named.items()})
    mine = [
        (task, index)
        for task, samples in jobs
        for index in range(samples)
        if how.shard.holds(index)
    ]
    if not mine:
        raise InvalidArgument(f"shard: expected one that has a sample, got {how.shard}")
    pending = [
        (task, index)
        for task, index in mine
        if not how.wanted(index) <= kept.measured(job_name(task), index).keys()
    ]
    what = f"evaluating {jobs[0][0].name}" if len(jobs) == 1 else f"evaluating {len(jobs)} jobs"
    for task, index in track(pending, what, runner.progress):
        known = kept.measured(job_name(task), index)
        found = _measure(runner, task, index, how, known)
        kept.append(job_name(task), index, found)
    held = LogContents(kept.subject, defined)
    for task, index in mine:
        known, wanted = kept.measured(job_name(task), index), how.wanted(index)
        held.samples[job_name(task), index] = {n: m for n, m in known.items() if n in wanted}
    return evaluations_of([held])


def job_name(task: Task) -> str:
    """The name of a job: its task, length, layout and text."""
    layout = _layout(task)
    corpus = None if task.corpus is None else Path(task.corpus).name
    return ", ".join(str(word) for word in (task.name, layout, corpus, task.length) if word)


def _layout(task: Task) -> str | None:
    """A layout's name and how many documents it has; None for a task that has no layouts."""
    if not isinstance(task, LaidOut):
        return None
    return f"{task.layout.name} {task.layout.documents}"


def _measure(
    runner: Runner, task: Task, index: int, how: How, known: Mapping[str, Measurement]
) -> list[Measurement]:
    """What is not known of a sample yet; all of it, if full now answers something else."""
    sample = task.sample(runner.prompts.tokenizer, np.random.default_rng([how.seed, index]))
    namespace = f"eval/{job_name(task)}/{how.seed}/{index}"
    turns: dict[str, list[Measurement]] = {}
    said: list[str] = []
    for first, end in _conversations(sample):
        here = f"{namespace}/{first}" if sample.turns else namespace
        with KnowledgeBase(runner, here) as base:
            made = _Turns(runner, sample, index, how, here, range(first, end))
            for measured in made.measured(base, said, how.wanted(index) - known.keys()):
                turns.setdefault(measured.policy, []).append(measured)
    found = {name: of_turns(made) for name, made in turns.items()}
    if "full" in known:
        if known["full"].answer != found["full"].answer:
            return _measure(runner, task, index, how, {})
        del found["full"]
    return list(found.values())


def _conversations(sample: Sample) -> list[tuple[int, int]]:
    """The turns of a sample as half-open runs, each a conversation of its own."""
    first = [0, *(n for n, turn in enumerate(sample.turns, 1) if not turn.continues)]
    return list(pairwise([*first, len(sample.turns) + 1]))


@dataclass(frozen=True)
class _Turns:
    """Turns of one sample that follow one another in a conversation, or a single prompt."""

    runner: Runner
    sample: Sample
    index: int
    how: How
    namespace: str
    turns: range

    def measured(
        self, base: KnowledgeBase, said: list[str], missing: set[str]
    ) -> Iterator[Measurement]:
        """Full in every turn, and then what is missing, each in a conversation of its own.

        What full answers is said to all; `said` has it of earlier turns, and of these afterwards.
        """
        measurers: list[SampleMeasurer] = []
        with self._talk("full") as talk:
            for turn in self.turns:
                measurer = SampleMeasurer(
                    self.runner,
                    base.holding(self.sample.at_turn(turn, said)),
                    self.index,
                    self.namespace,
                    self.how.max_new_tokens,
                    self.how.agreement_tokens,
                    talk=talk,
                    after=measurers[-1] if measurers else None,
                )
                full = measurer.full()
                yield full
                said.append(full.answer)
                measurers.append(measurer)
        if FLOOR in missing:
            yield from (measurer.floor() for measurer in measurers)
        if CONTROL.name in missing:
            yield from self._by(CONTROL, CONTROL.name, "control", measurers)
        for name, policy in self.how.named().items():
            if name in missing:
                yield from self._by(policy, name, "policy", measurers)

    def _by(
        self, policy: Policy, name: str, role: Role, measurers: Sequence[SampleMeasurer]
    ) -> Iterator[Measurement]:
        with self._talk(policy) as talk:
            for measurer in measurers:
                yield measurer.policy(policy, role, name, talk)

    @contextmanager
    def _talk(self, policy: str | Policy) -> Iterator[Conversation | None]:
        """A conversation; none for a single prompt."""
        if len(self.turns) == 1:
            yield None
            return
        with self.runner.conversation(
            policy,
            namespace=self.namespace,
            discover=self.sample.discover,
            remember=False,
            watched=False,
        ) as talk:
            yield talk


def _subject(runner: Runner, how: How) -> dict[str, Any]:
    """What all figures of a run depend on."""
    return {
        "model": runner.spec.fingerprint,
        "dtype": str(runner.spec.dtype).removeprefix("torch."),
        "device": runner.spec.device.type,
        "seed": how.seed,
        "max_new_tokens": how.max_new_tokens,
        "agreement_tokens": how.agreement_tokens,
    }


def _definition(task: Task) -> dict[str, Any]:
    """What decides which samples a job has."""
    return {
        "repr": repr(task),
        "task": task.name,
        "length": task.length,
        "score_name": task.score_name,
        "layout": _layout(task),
        "corpus": task.corpus,
        "corpus_digest": None if task.corpus is None else corpus_of(task.corpus).digest,
    }

"""How much a certificate measures: which tasks at which lengths, and samples of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvweave.lab.eval import Task, task_of
from kvweave.lab.profile.losses import samples_needed
from kvweave.policies.policy_profile import Bound

MARGINS = (1.0, 0.75, 0.5)
"""Shares of the bound that the finalists are likely to be within: the other half is other text."""


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


def effort_of(bound: Bound, quick: bool = False, find_heads: bool = False) -> Effort:
    """The usual effort for a bound; `quick` takes one short job of KL, of score it spares nothing.

    A drop of score is certified on as many samples as bound it when none loses anything, for as
    many finalists as there may be: one more where heads are searched.
    """
    if bound.kind == "kl":
        jobs = (CertifyJob("lm", 512, "plain", 4),) if quick else KL_JOBS
        return Effort(jobs, *((6, 12) if quick else (6, 16)))
    level = level_of_each(bound, most_finalists(find_heads))
    rounds = math.ceil(samples_needed(bound.value, level) / len(SCORE_JOBS))
    return Effort(SCORE_JOBS, 6, max(rounds, 12))


def most_finalists(find_heads: bool) -> int:
    """How many candidates are certified at most: one a margin, and one without a map beside it."""
    return len(MARGINS) + find_heads


def level_of_each(bound: Bound, finalists: int) -> float:
    """The level of each of several intervals, so that all of them hold with the bound's."""
    return 1.0 - (1.0 - bound.level) / max(1, finalists)

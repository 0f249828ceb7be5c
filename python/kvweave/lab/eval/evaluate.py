"""`evaluate`: one task, or the tasks of a suite, measured under several policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.arguments import whole
from kvweave.lab.eval.jobs import WHOLE, How, Shard, measure_jobs
from kvweave.lab.eval.measure import MAX_NEW_TOKENS
from kvweave.lab.eval.sample import Sample, Task
from kvweave.lab.eval.suite import Suite
from kvweave.lab.eval.summary import Evaluation
from kvweave.lab.eval.tasks import task_of
from kvweave.policies import Policy
from kvweave.policies.policy_text import read_policies
from kvweave.runner import Runner

POLICIES: tuple[str, ...] = ("naive", "epic", "cacheblend", "sparsex", "foresight")


def draw(task: Task, tokenizer: Any, samples: int, seed: int) -> list[Sample]:
    """The task's samples: the i-th depends on the seed and i alone, not on how many are drawn.

    Raises InvalidArgument for fewer than one sample.
    """
    whole("samples", samples, 1)
    whole("seed", seed, 0)
    return [task.sample(tokenizer, np.random.default_rng([seed, i])) for i in range(samples)]


def evaluate(
    runner: Runner,
    task: Task,
    policies: Sequence[str | Policy] = POLICIES,
    samples: int = 8,
    seed: int = 0,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    agreement_tokens: int = 0,
    controlled: int | None = None,
    shard: Shard = WHOLE,
    log: Path | None = None,
) -> Evaluation:
    """Measures the policies on the task's samples; one job of `measure_jobs`, which see."""
    how = How(policies, seed, max_new_tokens, agreement_tokens, controlled, shard)
    return measure_jobs(runner, [(task, samples)], how, log)[0]


def evaluate_suite(
    runner: Runner, suite: Suite, *, shard: Shard = WHOLE, log: Path | None = None
) -> list[Evaluation]:
    """Measures every job of a suite: see `measure_jobs`, and `tasks_of` for what is refused."""
    how = How(
        read_policies(suite.policies),
        suite.seed,
        suite.max_new_tokens,
        suite.agreement_tokens,
        suite.controlled,
        shard,
    )
    return measure_jobs(runner, tasks_of(suite), how, log)


def tasks_of(suite: Suite) -> list[tuple[Task, int]]:
    """The tasks of a suite, each with its number of samples; raises what `task_of` raises."""
    return [
        (task_of(job.task, job.length, job.corpus, job.layout, job.documents), job.samples)
        for job in suite.jobs
    ]

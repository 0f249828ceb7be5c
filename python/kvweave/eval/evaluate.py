"""`evaluate`: a task's samples under several policies, always beside full, floor and control."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.eval.corpus import corpus_of
from kvweave.eval.log import MeasurementLog
from kvweave.eval.measure import MAX_NEW_TOKENS, Measurement, SampleMeasurer, inserted
from kvweave.eval.sample import Sample, Task
from kvweave.eval.summary import Evaluation
from kvweave.policies import Policy, policy_of
from kvweave.runner import Runner
from kvweave.runner.progress import track

POLICIES: tuple[str, ...] = ("naive", "epic", "cacheblend", "sparsex")


def draw(task: Task, tokenizer: Any, samples: int, seed: int) -> list[Sample]:
    """The task's samples: the i-th depends on the seed and i alone, not on how many are drawn.

    Raises InvalidArgument for fewer than one sample.
    """
    if samples < 1:
        raise InvalidArgument(f"samples: expected >= 1, got {samples}")
    return [task.sample(tokenizer, np.random.default_rng([seed, i])) for i in range(samples)]


def evaluate(
    runner: Runner,
    task: Task,
    policies: Sequence[str | Policy] = POLICIES,
    samples: int = 8,
    seed: int = 0,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    controlled: int | None = None,
    log: Path | None = None,
) -> Evaluation:
    """Measures the policies on the task's samples.

    Each segment of a sample is first encoded alone. Besides the policies asked for there are
    always `full` (the reference), `naive` (the other end of the gap) and, for the first
    `controlled` samples (default: all), the noise floor and the control without Δ-RoPE. With
    `log`, each sample is kept in that file once it is measured, and what the file already holds
    is not measured again.

    Raises InvalidArgument for an unknown policy, two of the same name with other settings, no
    samples, a runner without a tokenizer, or a log of something else.
    """
    tokenizer = runner.prompts.tokenizer
    if tokenizer is None:
        raise InvalidArgument("evaluate: expected a runner with a tokenizer, got none")
    given: dict[str, Policy] = {}
    for policy in map(policy_of, policies):
        if given.setdefault(policy.name, policy) != policy:
            raise InvalidArgument(
                f"policies: expected one {policy.name}, got {given[policy.name]!r} and {policy!r}"
            )
    wanted = {"naive": policy_of("naive"), **given}
    wanted.pop("full", None)
    drawn = draw(task, tokenizer, samples, seed)
    subject = {
        **_subject(runner, task, seed),
        "policies": [repr(policy) for policy in wanted.values()],
        "max_new_tokens": max_new_tokens,
        "controlled": controlled,
    }
    kept = MeasurementLog(log, subject) if log is not None else None
    measured: list[Measurement] = []
    for index, sample in enumerate(track(drawn, f"evaluating {task.name}", runner.progress)):
        if kept is not None and kept.measured(index):
            measured += kept.measured(index)
            continue
        namespace = f"eval/{task.name}/{seed}/{index}"
        with inserted(runner, sample, namespace) as ready:
            measurer = SampleMeasurer(runner, ready, index, namespace, max_new_tokens)
            found = [measurer.full()]
            if controlled is None or index < controlled:
                found += [measurer.floor(), measurer.no_rope_control()]
            found += [measurer.policy(policy) for policy in wanted.values()]
        if kept is not None:
            kept.append(index, found)
        measured += found
    return Evaluation(task.name, task.length, task.score_name, seed, tuple(measured), task.corpus)


def _subject(runner: Runner, task: Task, seed: int) -> dict[str, Any]:
    """What decides which samples are measured, and on which model."""
    return {
        "model": runner.spec.fingerprint,
        "task": repr(task),
        "corpus": None if task.corpus is None else corpus_of(task.corpus).digest,
        "seed": seed,
    }

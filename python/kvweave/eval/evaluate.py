"""`evaluate`: a task's samples under several policies, always beside full, floor and control."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.eval.key_value import KeyValue
from kvweave.eval.language_model import LanguageModel
from kvweave.eval.measure import MAX_NEW_TOKENS, Measurement, SampleMeasurer, inserted
from kvweave.eval.needle import Needle
from kvweave.eval.sample import Sample, Task
from kvweave.eval.summary import Evaluation
from kvweave.eval.variable_chain import VariableChain
from kvweave.policies import Policy, policy_of
from kvweave.runner import Runner
from kvweave.runner.progress import track

POLICIES: tuple[str, ...] = ("naive", "epic", "cacheblend", "sparsex")
TASK_NAMES = ("lm", "needle", "needles", "lookup", "lookups", "chain")


def task_of(name: str, length: int) -> Task:
    """A task by its name, at a prompt length in tokens.

    Raises InvalidArgument naming the known tasks, or a length that the task cannot fill.
    """
    tasks: dict[str, Callable[[], Task]] = {
        "lm": lambda: LanguageModel(length),
        "needle": lambda: Needle(length),
        "needles": lambda: Needle(length, asked=4),
        "lookup": lambda: KeyValue(length),
        "lookups": lambda: KeyValue(length, asked=4),
        "chain": lambda: VariableChain(length),
    }
    if name not in tasks:
        raise InvalidArgument(f"task: expected one of {', '.join(tasks)}, got {name!r}")
    return tasks[name]()


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
) -> Evaluation:
    """Measures the policies on the task's samples.

    Each segment of a sample is first encoded alone. Besides the policies asked for there are
    always `full` (the reference), `naive` (the other end of the gap), the noise floor and the
    control without Δ-RoPE.

    Raises InvalidArgument for an unknown policy, no samples, or a runner without a tokenizer.
    """
    tokenizer = runner.prompts.tokenizer
    if tokenizer is None:
        raise InvalidArgument("evaluate: expected a runner with a tokenizer, got none")
    wanted: dict[str, Policy] = {"naive": policy_of("naive")}
    for policy in map(policy_of, policies):
        if policy.name != "full":
            wanted[policy.name] = policy
    drawn = draw(task, tokenizer, samples, seed)
    measured: list[Measurement] = []
    for index, sample in enumerate(track(drawn, f"evaluating {task.name}", runner.progress)):
        namespace = f"eval/{task.name}/{seed}/{index}"
        with inserted(runner, sample, namespace) as ready:
            measurer = SampleMeasurer(runner, ready, index, namespace, max_new_tokens)
            measured += [measurer.full(), measurer.floor(), measurer.no_rope_control()]
            measured += [measurer.policy(policy) for policy in wanted.values()]
    return Evaluation(task.name, task.length, task.score_name, seed, tuple(measured))

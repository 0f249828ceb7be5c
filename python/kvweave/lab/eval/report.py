"""What logs of evaluations come to: a section a task and one of all tasks, for table and figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.measure import Measurement
from kvweave.lab.eval.statistics import (
    Bootstrap,
    Floats,
    Interval,
    Statistic,
    difference,
    finite,
    gap_closed,
    gap_difference,
)
from kvweave.lab.eval.summary import NOTHING, Evaluation, mean_kl, plain

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class ReportRow:
    """One policy in one section.

    All figures but `less` are as in `Summary`; of all tasks they are means of the tasks' own, each
    with the same weight, and `score` that of the tasks whose answers are scored. `less`: paired
    differences from the policy that was asked for, by what differs.
    """

    policy: str
    role: str
    samples: int
    score: Interval
    kl: Interval
    gap_closed: Interval
    kl_worst_decile: float
    same_answer: float
    agreed: float
    compared: float
    flops_ratio: float
    ttft_ratio: float
    pays_after: float
    kv_bytes: float
    shared_kv_bytes: float
    peak_bytes: float
    non_finite: int
    less: dict[str, Interval]


_MEANS = (
    "kl_worst_decile",
    "same_answer",
    "agreed",
    "compared",
    "flops_ratio",
    "ttft_ratio",
    "pays_after",
    "kv_bytes",
    "shared_kv_bytes",
    "peak_bytes",
)
"""Figures of a row without an interval: of all tasks they are the mean of the tasks' own."""


@dataclass(frozen=True)
class Subject:
    """What figures were measured on.

    A log's first line, its jobs by name, and every policy's settings by the name it is measured
    under.
    """

    measured_on: dict[str, Any]
    jobs: dict[str, dict[str, Any]]
    policies: dict[str, str]


@dataclass(frozen=True)
class Section:
    """The policies on one task, or (`tasks` > 1) on all tasks of one subject together."""

    title: str
    score_name: str
    tasks: int
    rows: tuple[ReportRow, ...]


@dataclass(frozen=True)
class QualityReport:
    """Sections in the order of the logs; those of all tasks stand behind theirs."""

    sections: tuple[Section, ...]
    against: str | None = None
    subjects: tuple[Subject, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; a number there is none for is null."""
        subjects = [plain(asdict(subject)) for subject in self.subjects]
        data = {"schema_version": SCHEMA_VERSION, "against": self.against, "subjects": subjects}
        sections: list[dict[str, Any]] = [plain(asdict(section)) for section in self.sections]
        for section in sections:
            for row in section["rows"]:
                row["never_pays"] = row["pays_after"] is None
        return {**data, "sections": sections}


def report_of(
    evaluations: Sequence[Evaluation],
    against: str | None = None,
    bootstrap: Bootstrap | None = None,
) -> QualityReport:
    """Sums evaluations up; those of one subject (model, seed) also all together.

    `against`: a policy that all others are compared with, sample by sample.

    Raises InvalidArgument for no evaluations, or none that has the policy to compare with.
    """
    if not evaluations:
        raise InvalidArgument("report: expected measured samples, got none")
    known = dict.fromkeys(name for one in evaluations for name in one.policies)
    if against is not None and against not in known:
        raise InvalidArgument(f"against: expected one of {', '.join(known)}, got {against!r}")
    subjects: dict[str, list[Evaluation]] = {}
    for one in evaluations:
        subjects.setdefault(one.subject, []).append(one)
    intervals = bootstrap or Bootstrap()
    sections: list[Section] = []
    for subject, tasks in subjects.items():
        tail = f" · {_told(subject)}" if len(subjects) > 1 else ""
        own = [_section(one, tail, against, intervals) for one in tasks]
        sections += own
        if len(own) > 1:
            sections.append(_pooled(own, tasks, tail, against, intervals))
    found = tuple(_subject(subject, tasks) for subject, tasks in subjects.items())
    return QualityReport(tuple(sections), against, found)


def paired(
    evaluations: Sequence[Evaluation],
    one: str,
    other: str,
    what: str = "kl",
    bootstrap: Bootstrap | None = None,
) -> Interval:
    """How much a policy has more than another on the samples that both have, with its interval.

    `what` is `kl` (nats a token), `score`, or `gap_closed`. Every task counts the same.

    Raises InvalidArgument for another quantity; all NaN where no sample has both.
    """
    columns: dict[str, tuple[Callable[[Measurement], float], Statistic]] = {
        "kl": (mean_kl, difference),
        "score": (lambda m: m.score, difference),
        "gap_closed": (mean_kl, gap_difference),
    }
    if what not in columns:
        raise InvalidArgument(f"paired: expected one of {', '.join(columns)}, got {what!r}")
    value, statistic = columns[what]
    names = ("naive", one, other) if what == "gap_closed" else (one, other)
    groups = [_columns(evaluation, names, value) for evaluation in evaluations]
    groups = [group for group in groups if len(group)]
    return (bootstrap or Bootstrap()).pooled(groups, statistic) if groups else NOTHING


def _columns(
    evaluation: Evaluation, names: Sequence[str], value: Callable[[Measurement], float]
) -> Floats:
    """A quantity of several policies on the samples that all of them have: [n, policies]."""
    measured = [evaluation.of(name) for name in names]
    samples = [at for at in measured[0] if all(at in others for others in measured[1:])]
    found, _ = finite(*([value(of[at]) for at in samples] for of in measured))
    return found


def _compared(
    tasks: Sequence[Evaluation], policy: str, against: str | None, intervals: Bootstrap
) -> dict[str, Interval]:
    if against is None or policy == against:
        return {}
    scored = [one for one in tasks if len(tasks) == 1 or one.score_name == "recall"]
    return {
        "kl": paired(tasks, policy, against, "kl", intervals),
        "gap_closed": paired(tasks, policy, against, "gap_closed", intervals),
        "score": paired(scored, policy, against, "score", intervals),
    }


def _section(
    evaluation: Evaluation, tail: str, against: str | None, intervals: Bootstrap
) -> Section:
    rows = tuple(
        ReportRow(
            policy=s.policy,
            role=s.role,
            samples=s.samples,
            score=s.score,
            kl=s.kl,
            gap_closed=s.gap_closed,
            non_finite=s.non_finite,
            less=_compared([evaluation], s.policy, against, intervals),
            **{name: getattr(s, name) for name in _MEANS},
        )
        for s in evaluation.summaries(intervals)
    )
    return Section(f"{evaluation.job}{tail}", evaluation.score_name, 1, rows)


def _pooled(
    own: Sequence[Section],
    tasks: Sequence[Evaluation],
    tail: str,
    against: str | None,
    intervals: Bootstrap,
) -> Section:
    """The policies that every task has, each task with the same weight."""
    by_task = [{row.policy: row for row in section.rows} for section in own]
    everywhere = [name for name in by_task[0] if all(name in rows for rows in by_task)]
    scored = [one for one in tasks if one.score_name == "recall"]
    made = []
    for name in everywhere:
        rows = [rows[name] for rows in by_task]
        made.append(
            ReportRow(
                policy=name,
                role=rows[0].role,
                samples=sum(row.samples for row in rows),
                score=_over(scored, (name,), lambda m: m.score, intervals),
                kl=_over(tasks, (name,), mean_kl, intervals),
                gap_closed=_over(tasks, ("naive", name), mean_kl, intervals, gap_closed),
                non_finite=sum(row.non_finite for row in rows),
                less=_compared(tasks, name, against, intervals),
                **{of: _mean(getattr(row, of) for row in rows) for of in _MEANS},
            )
        )
    return Section(f"all {len(own)} tasks{tail}", "recall", len(own), tuple(made))


def _over(
    tasks: Sequence[Evaluation],
    names: Sequence[str],
    value: Callable[[Measurement], float],
    intervals: Bootstrap,
    statistic: Statistic | None = None,
) -> Interval:
    """The mean over tasks of a statistic; nothing where a task has no sample to tell it of."""
    groups = [_columns(one, names, value) for one in tasks]
    if not groups or any(len(group) == 0 for group in groups):
        return NOTHING
    return intervals.pooled(groups, statistic) if statistic else intervals.pooled(groups)


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _subject(subject: str, tasks: Sequence[Evaluation]) -> Subject:
    policies = {name: told for one in tasks for name, told in one.settings.items()}
    return Subject(json.loads(subject), {one.job: one.means for one in tasks}, policies)


def _told(subject: str) -> str:
    """A subject in few words: the model's fingerprint, and the seed."""
    found = json.loads(subject)
    return f"{str(found.get('model'))[:12]}, seed {found.get('seed')}"

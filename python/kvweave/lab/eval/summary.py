"""Measurements put together: per policy means with intervals, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.log import LogContents
from kvweave.lab.eval.measure import Measurement, Role
from kvweave.lab.eval.quality_table import quality_table, shown_interval, shown_number
from kvweave.lab.eval.statistics import (
    Bootstrap,
    Floats,
    Interval,
    finite,
    gap_closed,
    worst_decile,
)

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")
SCHEMA_VERSION = 2
TABLE_CAPTION = (
    "KL: to full, nats a token · low–high: 95 % bootstrap over samples · worst: KL of the worst "
    "tenth of tokens · gap: share of the naive-to-full KL closed · 1st, top-1: most likely token "
    "is full's · FLOPs, TTFT: over full's · ms: the median first token"
)
NOTHING = Interval(float("nan"), float("nan"), float("nan"))


@dataclass(frozen=True)
class Summary:
    """One policy over all samples. Samples, not tokens, are resampled for the intervals.

    `kl`: mean over samples of the mean KL to full, nats a token. `kl_worst_decile`: mean of the
    worst tenth of all tokens. `gap_closed`: share of the naive-to-full KL gap. `row_share`: rows
    computed, of tokens × layers. `ttft_s`: the median, and `ttft_ratio` the median of each
    sample's own share of full's. `flops_ratio`: of full's, over all samples together.
    `pays_after`: uses of the segments after which encoding them alone has cost less than what the
    policy saved against full; infinite where it saves nothing. `agreed` leading tokens that are
    full's, on average, of `compared`. `non_finite`: samples with a KL or score that is no number;
    they are in no mean.
    """

    policy: str
    role: Role
    samples: int
    score: Interval
    kl: Interval
    kl_worst_decile: float
    gap_closed: Interval
    top1: float
    first_token: float
    top10: float
    same_answer: float
    agreed: float
    compared: float
    reused_share: float
    row_share: float
    ttft_s: float
    ttft_ratio: float
    flops_ratio: float
    pays_after: float
    kv_bytes: float
    shared_kv_bytes: float
    peak_bytes: float
    non_finite: int


@dataclass(frozen=True)
class Evaluation:
    """All measurements of one task, and what they come to.

    `job`: the name in its log, and `means` what that says of it. `subject`: what it was measured
    on, as the log says; `settings`: every setting of its policies, by their names.
    """

    task: str
    length: int
    score_name: str
    seed: int
    measurements: tuple[Measurement, ...]
    corpus: str | None = None
    layout: str | None = None
    job: str = ""
    subject: str = ""
    means: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def policies(self) -> list[str]:
        """The names of all that was measured, in order: full, floor, control, then the policies."""
        return list(dict.fromkeys(m.policy for m in self.measurements))

    def of(self, policy: str) -> dict[int, Measurement]:
        """The measurements of one policy by sample."""
        return {m.sample: m for m in self.measurements if m.policy == policy}

    def summaries(self, bootstrap: Bootstrap | None = None) -> list[Summary]:
        """One a policy, in the order of measuring."""
        intervals = bootstrap or Bootstrap()
        return [self._summary(name, intervals) for name in self.policies]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; a number there is none for is null."""
        return {
            "schema_version": SCHEMA_VERSION,
            "task": self.task,
            "length": self.length,
            "layout": self.layout,
            "score_name": self.score_name,
            "seed": self.seed,
            "corpus": self.corpus,
            "policies": [plain(asdict(summary)) for summary in self.summaries()],
            "measurements": [plain({**asdict(m), "reused": m.reused}) for m in self.measurements],
        }

    def table(self) -> Table:
        """The summaries for a terminal of 80 columns or more."""
        from rich.markup import escape

        samples = len({m.sample for m in self.measurements})
        on = "" if self.corpus is None else f" on {self.corpus}"
        summaries = self.summaries()
        lost = sum(s.non_finite for s in summaries)
        table = quality_table(
            f"{self.task}{on}, {self.length} tokens, {samples} samples, seed {self.seed}",
            (self.score_name, "KL", "worst", "gap", "1st", "top-1", "FLOPs", "TTFT", "ms"),
        )
        table.caption = TABLE_CAPTION + f" · {lost} samples not finite, left out" * (lost > 0)
        table.caption_justify = "left"
        for s in summaries:
            table.add_row(
                escape(s.policy),
                shown_interval(s.score),
                shown_interval(s.kl),
                shown_number(s.kl_worst_decile),
                shown_interval(s.gap_closed) if s.role == "policy" else "",
                shown_number(s.first_token),
                shown_number(s.top1),
                shown_number(s.flops_ratio),
                shown_number(s.ttft_ratio),
                f"{1000 * s.ttft_s:.0f}",
            )
        return table

    def _summary(self, name: str, intervals: Bootstrap) -> Summary:
        mine = list(self.of(name).values())
        # Floor and control may have been measured on the first samples alone.
        full, naive = self.of("full"), self.of("naive")
        against = [full[m.sample] for m in mine if m.sample in full]
        scores, lost_scores = finite([m.score for m in mine])
        kls, lost_kls = finite([mean_kl(m) for m in mine])
        both = [m for m in mine if m.sample in naive]
        gaps, _ = finite([mean_kl(naive[m.sample]) for m in both], [mean_kl(m) for m in both])
        tokens = np.concatenate([np.asarray(m.kl, dtype=np.float64) for m in mine])
        flops, full_flops = sum(m.flops for m in mine), sum(m.flops for m in against)
        encoding = sum(m.encoding_flops for m in mine)
        saved = full_flops - flops
        times = [m.ttft_s / full[m.sample].ttft_s for m in mine if m.sample in full]
        peaks = [m.peak_bytes for m in mine if m.peak_bytes is not None]
        return Summary(
            policy=name,
            role=mine[0].role,
            samples=len(mine),
            score=_interval(intervals, scores),
            kl=_interval(intervals, kls),
            kl_worst_decile=worst_decile(tokens[np.isfinite(tokens)]),
            gap_closed=intervals.interval(gaps, gap_closed) if len(gaps) else NOTHING,
            top1=float(np.mean([m.top1 for m in mine])),
            first_token=float(np.mean([m.first_token for m in mine])),
            top10=float(np.mean([m.top10 for m in mine])),
            same_answer=float(np.mean([m.same_answer for m in mine])),
            agreed=float(np.mean([m.agreed for m in mine])),
            compared=float(np.mean([m.compared for m in mine])),
            reused_share=sum(m.reused for m in mine) / sum(m.tokens for m in mine),
            row_share=float(np.mean([m.row_share for m in mine])),
            ttft_s=float(np.median([m.ttft_s for m in mine])),
            ttft_ratio=float(np.median(times)) if times else float("nan"),
            flops_ratio=flops / full_flops if full_flops else float("nan"),
            pays_after=encoding / saved if saved > 0 else float("inf"),
            kv_bytes=float(np.mean([m.kv_bytes for m in mine])),
            shared_kv_bytes=float(np.mean([m.shared_kv_bytes for m in mine])),
            peak_bytes=float(np.mean(peaks)) if peaks else float("nan"),
            non_finite=max(lost_scores, lost_kls),
        )


def evaluations_of(logs: Iterable[LogContents]) -> list[Evaluation]:
    """One evaluation a job: what logs of one subject hold together, samples in order.

    Where two logs hold one sample under one policy the later log counts. Logs of several subjects
    (models, seeds) give each its own evaluations.

    Raises InvalidArgument when logs of one subject mean different things by one name.
    """
    merged: dict[str, LogContents] = {}
    for log in logs:
        subject = json.dumps(log.subject, sort_keys=True)
        into = merged.setdefault(subject, LogContents(log.subject))
        _unite(into.jobs, log.jobs)
        _unite(into.policies, log.policies)
        for at, measured in log.samples.items():
            into.samples.setdefault(at, {}).update(measured)
    return [
        _evaluation(name, job, subject, contents)
        for subject, contents in merged.items()
        for name, job in contents.jobs.items()
        if any(at[0] == name and measured for at, measured in contents.samples.items())
    ]


def _unite(mine: dict[str, T], theirs: Mapping[str, T]) -> None:
    for name, means in theirs.items():
        if mine.setdefault(name, means) != means:
            raise InvalidArgument(
                f"logs: expected one meaning of {name!r}, got {mine[name]!r} and {means!r}"
            )


def _evaluation(
    name: str, job: dict[str, object], subject: str, contents: LogContents
) -> Evaluation:
    order = {"full": 0, "floor": 1, "control": 2, "policy": 3}
    at = sorted(sample for job_name, sample in contents.samples if job_name == name)
    found = [m for sample in at for m in contents.samples[name, sample].values()]
    known = list(contents.policies or dict.fromkeys(m.policy for m in found))
    places = {policy: place for place, policy in enumerate(known)}
    # Policies that were added later stand where they would have been measured.
    found.sort(key=lambda m: (m.sample, order[m.role], places.get(m.policy, 0)))
    return Evaluation(
        task=str(job["task"]),
        length=int(str(job["length"])),
        score_name=str(job["score_name"]),
        seed=int(contents.subject.get("seed", 0)),
        measurements=tuple(found),
        corpus=None if job.get("corpus") is None else str(job["corpus"]),
        layout=None if job.get("layout") is None else str(job["layout"]),
        job=name,
        subject=subject,
        means=dict(job),
        settings={m: contents.policies[m] for m in known if m in contents.policies},
    )


def mean_kl(measurement: Measurement) -> float:
    """Mean KL to full over a sample's tokens, nats; NaN when it has none."""
    return float(np.mean(measurement.kl)) if measurement.kl else float("nan")


def _interval(intervals: Bootstrap, values: Floats) -> Interval:
    return intervals.interval(values) if len(values) else NOTHING


def plain(value: Any) -> Any:
    """Data for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value

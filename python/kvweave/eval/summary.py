"""Measurements put together: per policy means with intervals, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvweave.eval.measure import Measurement, Role
from kvweave.eval.statistics import Interval, bootstrap, gap_closed, worst_decile

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Summary:
    """One policy over all samples. Samples, not tokens, are resampled for the intervals.

    `kl`: mean over samples of the mean KL to full, nats a token. `kl_worst_decile`: mean of the
    worst tenth of all tokens. `gap_closed`: share of the naive-to-full KL gap. `row_share`: rows
    computed, of tokens × layers. `ttft_ratio`: mean time to first token over full's.
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
    reused_share: float
    row_share: float
    ttft_s: float
    ttft_ratio: float


@dataclass(frozen=True)
class Evaluation:
    """All measurements of one task, and what they come to."""

    task: str
    length: int
    score_name: str
    seed: int
    measurements: tuple[Measurement, ...]
    corpus: str | None = None

    def summaries(self) -> list[Summary]:
        """One a policy, in the order of measuring: full, floor, control, then the policies."""
        names = dict.fromkeys(m.policy for m in self.measurements)
        return [self._summary(name) for name in names]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; a number there is none for is null."""
        return {
            "schema_version": SCHEMA_VERSION,
            "task": self.task,
            "length": self.length,
            "score_name": self.score_name,
            "seed": self.seed,
            "corpus": self.corpus,
            "policies": [_plain(asdict(summary)) for summary in self.summaries()],
            "measurements": [_plain({**asdict(m), "reused": m.reused}) for m in self.measurements],
        }

    def table(self) -> Table:
        """The summaries for a terminal."""
        from rich import box
        from rich.table import Table

        samples = len({m.sample for m in self.measurements})
        on = "" if self.corpus is None else f" on {self.corpus}"
        table = Table(
            title=f"{self.task}{on}, {self.length} tokens, {samples} samples, seed {self.seed}",
            caption="KL: to full, nats a token · \\[low, high]: 95 % bootstrap interval · "
            "gap: share of the naive-to-full KL closed\n1st, top-1: most likely token is full's · "
            "rows: of tokens × layers · ×: time to first token over full's",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("policy", no_wrap=True)
        heads = (self.score_name, "KL", "worst 10 %", "gap", "1st", "top-1", "rows", "TTFT", "×")
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        previous: str | None = None
        for s in self.summaries():
            if previous is not None and previous != s.role and s.role == "policy":
                table.add_section()
            previous = s.role
            table.add_row(
                s.policy,
                _with_interval(s.score, ".2f"),
                _with_interval(s.kl, ".4f"),
                f"{s.kl_worst_decile:.3f}",
                _with_interval(s.gap_closed, ".2f") if s.role == "policy" else "",
                f"{s.first_token:.2f}",
                f"{s.top1:.2f}",
                f"{s.row_share:.0%}",
                f"{1000 * s.ttft_s:.0f} ms",
                f"{s.ttft_ratio:.2f}",
            )
        return table

    def _summary(self, name: str) -> Summary:
        mine = [m for m in self.measurements if m.policy == name]
        # Floor and control may have been measured on the first samples alone.
        samples = {m.sample for m in mine}
        beside = [m for m in self.measurements if m.sample in samples]
        kl = _mean_kl(mine)
        naive = _mean_kl([m for m in beside if m.policy == "naive"])
        full_ttft = np.mean([m.ttft_s for m in beside if m.role == "full"])
        ttft = float(np.mean([m.ttft_s for m in mine]))
        return Summary(
            policy=name,
            role=mine[0].role,
            samples=len(mine),
            score=bootstrap([m.score for m in mine]),
            kl=bootstrap(kl),
            kl_worst_decile=worst_decile(np.concatenate([np.asarray(m.kl) for m in mine])),
            gap_closed=bootstrap(np.stack([naive, kl], axis=1), gap_closed),
            top1=float(np.mean([m.top1 for m in mine])),
            first_token=float(np.mean([m.first_token for m in mine])),
            top10=float(np.mean([m.top10 for m in mine])),
            reused_share=sum(m.reused for m in mine) / sum(m.tokens for m in mine),
            row_share=float(np.mean([m.row_share for m in mine])),
            ttft_s=ttft,
            ttft_ratio=float(ttft / full_ttft),
        )


def _mean_kl(measurements: list[Measurement]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray([np.mean(m.kl) for m in measurements])


def _with_interval(value: Interval, form: str) -> str:
    if np.isnan(value.low):
        return f"{value.value:{form}}"
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _plain(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value

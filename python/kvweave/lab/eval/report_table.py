"""A report as text of at most 100 columns, and the same for paired differences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvweave.lab.eval.report import QualityReport, ReportRow, Section
from kvweave.lab.eval.statistics import Interval

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 100
CAPTION = (
    "KL: to full, nats a token · low–high: 95 % BCa bootstrap over samples · gap: share of the "
    "naive-to-full KL closed\nworst: KL of the worst tenth of tokens · same: answers that are "
    "full's to the token · FLOPs, TTFT: over full's\npays: uses of the segments after which "
    "encoding them has paid for itself · !k: k samples not finite, left out"
)


def tables_of(report: QualityReport) -> list[RenderableType]:
    """One table a section, with a caption below the last; then the differences, if any."""
    made: list[RenderableType] = [_section(section) for section in report.sections]
    made.append(CAPTION)
    if report.against is not None:
        made += [_differences(section, report.against) for section in report.sections]
    return made


def _table(title: str, heads: tuple[str, ...]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(title), title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.width = None
    table.add_column("policy", overflow="fold", max_width=22)
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    return table


def _section(section: Section) -> Table:
    heads = ("n", section.score_name, "KL", "gap", "worst", "same", "FLOPs", "TTFT", "pays")
    table = _table(section.title, heads)
    for row in section.rows:
        shown = row.role == "policy"
        table.add_row(
            _plain(row.policy),
            f"{row.samples}{f' !{row.non_finite}' if row.non_finite else ''}",
            _interval(row.score),
            _interval(row.kl),
            _interval(row.gap_closed) if shown else "",
            _number(row.kl_worst_decile),
            _number(row.same_answer),
            _number(row.flops_ratio),
            _number(row.ttft_ratio),
            _uses(row) if shown else "",
        )
    return table


def _differences(section: Section, against: str) -> Table:
    table = _table(f"{section.title}: less {against}, in pairs", (section.score_name, "KL", "gap"))
    for row in section.rows:
        if row.less and row.role == "policy":
            table.add_row(
                _plain(row.policy),
                *(_interval(row.less[key]) for key in ("score", "kl", "gap_closed")),
            )
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _uses(row: ReportRow) -> str:
    if math.isinf(row.pays_after):
        return "never"
    return f"{row.pays_after:.1f}" if row.pays_after < 1000 else f"{row.pays_after:.0e}"


def _interval(interval: Interval) -> str:
    """`0.53 0.41–0.66`; the value alone where there is no interval, a dash where there is none."""
    if math.isnan(interval.low):
        return _number(interval.value)
    return f"{_number(interval.value)} {_number(interval.low)}–{_number(interval.high)}"


def _number(value: float) -> str:
    """Three places below ten, as short as can be: `.053`, `1.27`, `-.2`."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if abs(value) >= 100:
        return f"{value:.3g}"
    text = f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text

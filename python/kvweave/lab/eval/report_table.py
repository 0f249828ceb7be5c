"""A report as text of at most 100 columns, and the same for paired differences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvweave.lab.eval.quality_table import quality_table, shown_interval, shown_number
from kvweave.lab.eval.report import QualityReport, ReportRow, Section

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 100
CAPTION = (
    "KL: to full, nats a token · low–high: 95 % BCa bootstrap over samples · gap: share of the "
    "naive-to-full KL closed · worst: KL of the worst tenth of tokens · same: answers that are "
    "full's to the token · FLOPs, TTFT: over full's · pays: uses of the segments after which "
    "encoding them has paid for itself · !k: k samples not finite, left out"
)


def tables_of(report: QualityReport) -> list[RenderableType]:
    """One table a section, with a caption below the last; then the differences, if any."""
    made: list[RenderableType] = [_section(section) for section in report.sections]
    made.append(CAPTION)
    if report.against is not None:
        made += [_differences(section, report.against) for section in report.sections]
    return made


def _section(section: Section) -> Table:
    heads = ("n", section.score_name, "KL", "gap", "worst", "same", "FLOPs", "TTFT", "pays")
    table = quality_table(section.title, heads)
    for row in section.rows:
        shown = row.role == "policy"
        table.add_row(
            _plain(row.policy),
            f"{row.samples}{f' !{row.non_finite}' if row.non_finite else ''}",
            shown_interval(row.score),
            shown_interval(row.kl),
            shown_interval(row.gap_closed) if shown else "",
            shown_number(row.kl_worst_decile),
            shown_number(row.same_answer),
            shown_number(row.flops_ratio),
            shown_number(row.ttft_ratio),
            _uses(row) if shown else "",
        )
    return table


def _differences(section: Section, against: str) -> Table:
    table = quality_table(
        f"{section.title}: less {against}, in pairs", (section.score_name, "KL", "gap")
    )
    for row in section.rows:
        if row.less and row.role == "policy":
            table.add_row(
                _plain(row.policy),
                *(shown_interval(row.less[key]) for key in ("score", "kl", "gap_closed")),
            )
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _uses(row: ReportRow) -> str:
    if math.isinf(row.pays_after):
        return "never"
    return f"{row.pays_after:.1f}" if row.pays_after < 1000 else f"{row.pays_after:.0e}"

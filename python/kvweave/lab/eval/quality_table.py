"""The table that qualities are shown in, and its numbers: short, folded and never cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvweave.lab.eval.statistics import Interval

if TYPE_CHECKING:
    from rich.table import Table


def quality_table(title: str, heads: Sequence[str]) -> Table:
    """A table of policies without rows yet; `heads` name its columns of numbers."""
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


def shown_interval(interval: Interval) -> str:
    """`0.53 0.41–0.66`; the value alone where there is no interval, a dash where there is none."""
    if math.isnan(interval.low):
        return shown_number(interval.value)
    low, high = shown_number(interval.low), shown_number(interval.high)
    return f"{shown_number(interval.value)} {low}–{high}"


def shown_number(value: float) -> str:
    """Three places below ten, as short as can be: `.053`, `1.27`, `-.2`."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if abs(value) >= 100:
        return f"{value:.3g}"
    text = f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text

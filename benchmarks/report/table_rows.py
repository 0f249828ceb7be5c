"""Rows of a run by their names, their figures, and rows of a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.statistics import Interval


def recorded(run: dict[str, Any], name: str) -> dict[str, Any]:
    """The row of a case's newest run that has this name, and a value.

    Raises InvalidArgument for a run without it.
    """
    for row in run["rows"]:
        if row["name"] == name and "value" in row:
            found: dict[str, Any] = row
            return found
    text = f"newest run of {run['case']}: expected the row {name!r}, got none"
    raise InvalidArgument(text, expected=name, got="none")


def valued(run: dict[str, Any], name: str, column: str | None = None) -> Any:
    """What a row has in a column; None: its measured value.

    Raises InvalidArgument for a run without the row or the column.
    """
    row = recorded(run, name)
    if column is None:
        return row["value"]
    if column not in row["of"]:
        text = f"newest run of {run['case']}: expected {column!r} in the row {name!r}, got none"
        raise InvalidArgument(text, expected=column, got="none")
    return row["of"][column]


def cell(run: dict[str, Any], name: str, column: str | None = None) -> str:
    """The same as it is shown, a measured value with its unit."""
    shown = figure(valued(run, name, column))
    return shown if column is not None else f"{shown} {recorded(run, name)['unit']}".rstrip()


def figure(value: Any) -> str:
    """A number as it is shown: three digits, or all of them from 1000 on."""
    if isinstance(value, list):
        return f"[{', '.join(map(figure, value))}]"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_bounds(interval: Interval) -> str:
    """A value and the bounds of its interval."""
    return f"{interval.value:.4f} ({interval.low:.4f} to {interval.high:.4f})"


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"

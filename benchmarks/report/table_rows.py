"""Rows of a run by their names, and rows of a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvweave.errors import InvalidArgument


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


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"

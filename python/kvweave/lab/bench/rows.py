"""What a benchmark says: rows of figures, and that a wrong answer has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measured figure. `of` are ratios and counts a reader wants beside it, by name."""

    name: str
    value: float
    unit: str
    p95: float | None
    of: dict[str, Any]


class WrongAnswer(Exception):
    """A contender computed something else than expected; its speed means nothing."""


def expect(holds: bool, what: str) -> None:
    """Raises `WrongAnswer` unless a contender's answer holds."""
    if not holds:
        raise WrongAnswer(what)

"""A reuse plan as plain spans with colours: what terminal, figure and notebook draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.errors import InvalidArgument

KINDS = {
    "prefix": "reused by prefix",
    "segment": "reused by segment",
    "fresh": "recomputed: fresh text",
    "miss": "recomputed: a miss",
}
COLOURS = {"prefix": "#0072b2", "segment": "#009e73", "fresh": "#e69f00", "miss": "#d55e00"}
"""Okabe and Ito's colours, which people of every colour vision can tell apart."""

_NOT_A_MISS = ("fresh", "last-token")


@dataclass(frozen=True)
class DrawnSpan:
    """Tokens [start, end) of one outcome; `kind` is a key of `KINDS`.

    `delta`: new position minus cached position, None where nothing is reused. `label`: the
    source of a reused span, or the reason for a recomputed one.
    """

    start: int
    end: int
    kind: str
    delta: int | None
    label: str

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start

    @property
    def colour(self) -> str:
        """The colour of its kind, `#rrggbb`."""
        return COLOURS[self.kind]

    @property
    def shift(self) -> str:
        """Δ with its sign, or nothing."""
        if self.delta is None:
            return ""
        return f"{self.delta:+d}".replace("-", "−") if self.delta else "0"


@dataclass(frozen=True)
class DrawnPlan:
    """All spans of a prompt of `tokens` tokens, in order."""

    tokens: int
    spans: tuple[DrawnSpan, ...]

    def count(self, *kinds: str) -> int:
        """Tokens of these kinds together."""
        return sum(span.tokens for span in self.spans if span.kind in kinds)

    @property
    def headline(self) -> str:
        """One sentence: how many tokens, and what becomes of them; 100 % is never short of all."""
        reused = self.count("prefix", "segment")
        return (
            f"{self.tokens:,} tokens: {self.count('prefix'):,} reused by prefix, "
            f"{self.count('segment'):,} by segment, {self.count('fresh', 'miss'):,} recomputed "
            f"({100 * reused // max(self.tokens, 1)}% reused)"
        )


def read_plan(plan: Mapping[str, Any]) -> DrawnPlan:
    """Reads `ReusePlan.to_dict()`: `tokens` and `spans` of start, end, kind, reason, delta, source.

    Raises InvalidArgument when the spans do not cover [0, tokens) one after the other.
    """
    spans = tuple(_read_span(span) for span in plan["spans"])
    at = 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            raise InvalidArgument(
                f"plan: expected a span from token {at} on, got [{span.start}, {span.end})"
            )
        at = span.end
    if at != plan["tokens"] or at == 0:
        raise InvalidArgument(f"plan: expected spans up to {plan['tokens']} tokens, got {at}")
    return DrawnPlan(at, spans)


def read_rows(rows_per_layer: Sequence[int] | None, tokens: int) -> list[tuple[int, int, int]]:
    """Runs of layers that compute the same number of rows: (first layer, end layer, rows).

    Raises InvalidArgument for more rows than tokens.
    """
    runs: list[tuple[int, int, int]] = []
    for layer, rows in enumerate(rows_per_layer or ()):
        if not 0 <= rows <= tokens:
            raise InvalidArgument(f"rows of layer {layer}: expected 0..{tokens}, got {rows}")
        if runs and runs[-1][2] == rows:
            runs[-1] = (runs[-1][0], layer + 1, rows)
        else:
            runs.append((layer, layer + 1, rows))
    return runs


def _read_span(span: Mapping[str, Any]) -> DrawnSpan:
    kind, reason = str(span["kind"]), span.get("reason")
    if kind == "recompute":
        kind = "fresh" if reason in _NOT_A_MISS else "miss"
        return DrawnSpan(int(span["start"]), int(span["end"]), kind, None, str(reason or ""))
    if kind not in KINDS:
        raise InvalidArgument(
            f"plan span: expected kind prefix, segment or recompute, got {kind!r}"
        )
    delta = span.get("delta")
    return DrawnSpan(
        int(span["start"]),
        int(span["end"]),
        kind,
        0 if delta is None else int(delta),
        str(span.get("source") or ""),
    )

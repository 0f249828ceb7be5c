"""A reuse plan in a notebook: a coloured bar of its spans, a legend, and why each was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvweave.drawn.markup import Markup, frame, headline, joined, legend, swatch, table, tag
from kvweave.drawn.spans import COLOURS, KINDS, DrawnPlan, DrawnSpan, read_plan

if TYPE_CHECKING:
    from kvweave.cache import ReusePlan

_WIDTH = 1000
_HIGH = 26
_NARROWEST = 2.0
_MOST_ROWS = 40


def plan_html(plan: ReusePlan) -> str:
    """A plan as a piece of HTML that needs nothing else; no script.

    Raises InvalidArgument for a plan of no tokens.
    """
    return frame(plan_parts(plan))


def plan_parts(plan: ReusePlan) -> Markup:
    """The same without its frame, to stand in others."""
    drawn = read_plan(plan.to_dict())
    explained = [span.explanation or "" for span in plan.spans]
    counts = {kind: drawn.count(kind) for kind in KINDS}
    shown = [swatch(COLOURS[k], f"{KINDS[k]} ({n:,})") for k, n in counts.items() if n]
    rows = [_row(span, why) for span, why in zip(drawn.spans, explained, strict=True)]
    left = len(rows) - _MOST_ROWS
    parts = [
        headline(drawn.headline),
        _bar(drawn),
        legend(*shown),
        table(["tokens", "count", "outcome", "Δ", "source or reason", ""], rows[:_MOST_ROWS]),
    ]
    if left > 0:
        parts.append(tag("div", f"and {left:,} more spans", style="opacity:.7"))
    return joined(*parts)


def _bar(plan: DrawnPlan) -> Markup:
    wide = [max(span.tokens / plan.tokens * _WIDTH, _NARROWEST) for span in plan.spans]
    scale, at, boxes = _WIDTH / sum(wide), 0.0, []
    for span, width in zip(plan.spans, wide, strict=True):
        words = f"{span.start:,}–{span.end:,}: {KINDS[span.kind]}"
        if span.label:
            words += f", {span.label}"
        box = {"x": f"{at:.2f}", "y": 0, "width": f"{width * scale:.2f}", "height": _HIGH}
        boxes.append(tag("rect", tag("title", words), fill=span.colour, **box))
        at += width * scale
    drawing = tag(
        "svg",
        *boxes,
        viewBox=f"0 0 {_WIDTH} {_HIGH}",
        preserveAspectRatio="none",
        role="img",
        aria_label=plan.headline,
        style=f"width:100%;height:{_HIGH}px;display:block;border-radius:3px",
    )
    ends = joined(tag("span", "0"), tag("span", f"{plan.tokens:,}"))
    style = "display:flex;justify-content:space-between;opacity:.7;font-size:11px"
    return joined(drawing, tag("div", ends, style=style))


def _row(span: DrawnSpan, why: str) -> list[object]:
    outcome = "recompute" if span.kind in ("fresh", "miss") else span.kind
    mark = swatch(span.colour, outcome)
    return [f"{span.start:,}–{span.end:,}", f"{span.tokens:,}", mark, span.shift, span.label, why]

"""A reuse plan in the terminal: a coloured bar, then one line a span with its Δ and reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvweave.drawn.spans import KINDS, DrawnPlan, read_plan, read_rows

# Named colours follow the terminal's own theme; the glyphs tell kinds apart without any.
_LOOKS = {
    "prefix": ("▓", "blue"),
    "segment": ("█", "green"),
    "fresh": ("░", "yellow"),
    "miss": ("▒", "red"),
}
_SHADES = " ░▒▓█"
# Kinds by how much a reader must see them: a cell shows the first of these that it holds.
_LOUD = ("miss", "fresh", "prefix", "segment")


def draw_plan(
    plan: Mapping[str, Any],
    rows_per_layer: Sequence[int] | None = None,
    *,
    previews: Sequence[str] | None = None,
    width: int = 96,
) -> RenderableType:
    """A plan (`ReusePlan.to_dict()`) as something rich prints.

    `rows_per_layer` [L] adds a strip of how many tokens each layer computes; `previews`, one a
    span, its beginning as text. `width` is that of the bar, in characters.

    Raises InvalidArgument for a plan that does not cover its tokens.
    """
    drawn = read_plan(plan)
    parts: list[RenderableType] = [
        Text(drawn.headline, style="bold"),
        _bar(drawn, width),
        _legend(drawn),
        _table(drawn, previews),
    ]
    if rows_per_layer:
        parts.append(_layers(rows_per_layer, drawn.tokens))
    return Group(*parts)


def _bar(plan: DrawnPlan, width: int) -> Text:
    width = max(1, min(width, plan.tokens))
    text = Text()
    for cell in range(width):
        # Half-open token range of the cell; never empty, since width <= tokens.
        start, end = cell * plan.tokens // width, (cell + 1) * plan.tokens // width
        held = {span.kind for span in plan.spans if span.start < end and span.end > start}
        text.append(*_LOOKS[next(kind for kind in _LOUD if kind in held)])
    end_of_scale = str(plan.tokens)
    scale = "0" + end_of_scale.rjust(max(len(end_of_scale) + 1, width - 1))
    return text.append(f"\n{scale}", style="dim")


def _legend(plan: DrawnPlan) -> Columns:
    """What the glyphs mean, none of them on another line than its words."""
    kinds = [kind for kind in KINDS if plan.count(kind)]
    return Columns(
        (Text(no_wrap=True).append(*_LOOKS[kind]).append(f" {KINDS[kind]}") for kind in kinds),
        padding=(0, 3),
    )


def _table(plan: DrawnPlan, previews: Sequence[str] | None) -> Table:
    # The text takes what the other columns leave of a line, not the other way round.
    table = Table(box=None, pad_edge=False, expand=previews is not None)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("Δ", justify="right", no_wrap=True)
    table.add_column("source or reason", overflow="fold")
    if previews is not None:
        table.add_column("text", no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for index, span in enumerate(plan.spans):
        outcome = "recompute" if span.kind in ("fresh", "miss") else span.kind
        cells: list[RenderableType] = [
            f"{span.start}–{span.end}",
            str(span.tokens),
            Text(outcome, style=_LOOKS[span.kind][1]),
            span.shift,
            span.label,
        ]
        if previews is not None:
            cells.append(Text(" ".join(previews[index].split())))
        table.add_row(*cells)
    return table


def _layers(rows_per_layer: Sequence[int], tokens: int) -> Text:
    text = Text("\n").append("rows computed by layer  ", style="bold")
    for rows in rows_per_layer:
        text.append(_SHADES[max(1 if rows else 0, round(rows / tokens * (len(_SHADES) - 1)))])
    for first, end, rows in read_rows(rows_per_layer, tokens):
        layers = f"layer {first}" if end == first + 1 else f"layers {first}–{end - 1}"
        text.append(f"\n  {layers}: {rows:,} of {tokens:,} tokens ({rows / tokens:.0%})")
    return text

"""A reuse plan as a picture: the prompt as a strip of spans, and the rows each layer computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.drawn.spans import COLOURS, KINDS, DrawnPlan, DrawnSpan, read_plan, read_rows
from kvweave.lab.drawing.figure_file import INK, MUTED, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 11.0
_STRIP_INCHES = 9.9
_CHARACTER_INCHES = 0.075
_STRIP_HIGH = 0.85
_HEAD_INCHES = 1.05
_FOOT_INCHES = 0.55
_LEVELS = 4
_LEVEL_SHARE = 0.27
"""Height of a line of reasons, as a share of the strip's."""


def plan_figure(
    plan: Mapping[str, Any],
    rows_per_layer: Sequence[int] | None = None,
    *,
    title: str = "Reuse plan",
) -> Figure:
    """A plan (`ReusePlan.to_dict()`) as a matplotlib figure; nothing is shown or kept globally.

    Tokens run along x; spans are coloured by outcome, with Δ and source inside and reasons for
    recomputing below. `rows_per_layer` [L] adds a strip of the rows each layer computes.

    Raises InvalidArgument for a plan that does not cover its tokens.
    """
    drawn = read_plan(plan)
    levels = _reason_levels(drawn)
    strip = _STRIP_HIGH * (1.0 + _LEVEL_SHARE * (1 + len(levels)))
    heights = [strip, 0.55] if rows_per_layer else [strip]
    high = sum(heights) + _HEAD_INCHES + _FOOT_INCHES + (0.95 if rows_per_layer else 0.0)
    figure = new_figure(_WIDTH_INCHES, high)
    grid = figure.add_gridspec(
        len(heights),
        1,
        height_ratios=heights,
        hspace=2 * 0.95 / sum(heights),
        left=0.05,
        right=0.95,
        top=1 - _HEAD_INCHES / high,
        bottom=_FOOT_INCHES / high,
    )
    figure.text(0.05, 1 - 0.12 / high, title, va="top", size=13, weight="bold", color=INK)
    figure.text(0.05, 1 - 0.42 / high, drawn.headline, va="top", size=9.5, color=MUTED)
    _draw_spans(figure.add_subplot(grid[0]), drawn, levels)
    if rows_per_layer:
        _draw_layers(figure.add_subplot(grid[1]), rows_per_layer, drawn.tokens)
    return figure


def save_plan(
    path: Path,
    plan: Mapping[str, Any],
    rows_per_layer: Sequence[int] | None = None,
    *,
    title: str = "Reuse plan",
) -> None:
    """Writes `plan_figure` as PNG, SVG or PDF, by the suffix of the path.

    Raises InvalidArgument for another suffix.
    """
    save_figure(plan_figure(plan, rows_per_layer, title=title), path)


def _draw_spans(axes: Axes, plan: DrawnPlan, levels: list[list[DrawnSpan]]) -> None:
    from matplotlib.patches import Rectangle

    per_token = _STRIP_INCHES / plan.tokens
    for span in plan.spans:
        axes.add_patch(
            Rectangle(
                (span.start, 0.0),
                span.tokens,
                1.0,
                facecolor=span.colour,
                edgecolor="white",
                linewidth=0.8,
            )
        )
        if span.kind in ("prefix", "segment"):
            _label_inside(axes, span, span.tokens * per_token)
    _label_reasons(axes, plan, levels)
    shown = [kind for kind in KINDS if plan.count(kind)]
    axes.legend(
        handles=[Rectangle((0, 0), 1, 1, facecolor=COLOURS[kind]) for kind in shown],
        labels=[f"{KINDS[kind]} ({plan.count(kind):,})" for kind in shown],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.01),
        ncols=4,
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.6,
        borderaxespad=0.0,
    )
    axes.set_xlim(0, plan.tokens)
    axes.set_ylim(-_LEVEL_SHARE * (1 + len(levels)), 1.0)
    axes.set_yticks([])
    axes.xaxis.set_ticks_position("bottom")
    axes.set_xlabel("token position in the prompt", color=MUTED, size=8.5)
    axes.tick_params(colors=MUTED, labelsize=8)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _label_inside(axes: Axes, span: DrawnSpan, inches: float) -> None:
    """Source and Δ, as long as they fit: across the span, else along it, else Δ alone or none."""
    lines = [line for line in (span.label, f"Δ {span.shift}") if line]
    middle = (span.start + span.end) / 2
    across = max(len(line) for line in lines) * _CHARACTER_INCHES
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "size": 8.5}
    if inches > across + 0.08:
        axes.text(middle, 0.5, "\n".join(lines), **style)
    elif inches > 0.17 * len(lines) + 0.05:
        axes.text(middle, 0.5, "\n".join(lines)[:40], rotation=90, **{**style, "size": 7})
    elif inches > 0.17:
        axes.text(middle, 0.5, lines[-1], rotation=90, **{**style, "size": 7})


def _reason(span: DrawnSpan) -> str:
    return f"{span.label} ({span.tokens})"


def _turned(span: DrawnSpan, plan: DrawnPlan) -> bool:
    """Near the right edge a label ends at its span instead of beginning there."""
    return span.start + _reason_tokens(span, plan) > plan.tokens


def _reason_tokens(span: DrawnSpan, plan: DrawnPlan) -> float:
    """How many tokens wide the label is."""
    return (len(_reason(span)) + 2) * _CHARACTER_INCHES * plan.tokens / _STRIP_INCHES


def _reason_levels(plan: DrawnPlan) -> list[list[DrawnSpan]]:
    """The misses whose reasons are shown, by line below the strip; labels never overlap.

    Fresh text needs no reason. What finds no room on the last line is left to the terminal.
    """
    levels: list[list[DrawnSpan]] = []
    free_from: list[float] = []
    for span in plan.spans:
        if span.kind != "miss":
            continue
        wide = _reason_tokens(span, plan)
        left = span.end - wide if _turned(span, plan) else span.start
        fits = (i for i, free in enumerate(free_from) if free <= left)
        level = next(fits, len(levels))
        if level == _LEVELS:
            continue
        if level == len(levels):
            levels.append([])
            free_from.append(0.0)
        levels[level].append(span)
        free_from[level] = left + wide
    return levels


def _label_reasons(axes: Axes, plan: DrawnPlan, levels: list[list[DrawnSpan]]) -> None:
    for level, spans in enumerate(levels):
        y = -_LEVEL_SHARE * (level + 0.75)
        for span in spans:
            turned = _turned(span, plan)
            at = span.end if turned else span.start
            axes.plot([at, at], [0.0, y], color=span.colour, linewidth=1.2, zorder=1)
            axes.annotate(
                _reason(span),
                (at, y),
                xytext=(-4 if turned else 4, 0),
                textcoords="offset points",
                ha="right" if turned else "left",
                va="center",
                size=8,
                color=INK,
                # Leaders of lower labels pass behind the text.
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
                zorder=2,
            )


def _draw_layers(axes: Axes, rows_per_layer: Sequence[int], tokens: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("rows", ["#fff4dc", COLOURS["fresh"], "#7a3b00"])
    shares = [rows / tokens for rows in rows_per_layer]
    axes.pcolormesh(
        range(len(shares) + 1),
        [0, 1],
        [shares],
        cmap=shades,
        vmin=0,
        vmax=1,
        edgecolors="white",
        linewidth=0.8,
    )
    runs = read_rows(rows_per_layer, tokens)
    previous_end = -1.0
    per_layer = _STRIP_INCHES / len(shares)
    for first, end, rows in runs:
        text = f"{rows:,} rows ({rows / tokens:.0%})"
        wide = len(text) * _CHARACTER_INCHES / per_layer
        middle = min(max((first + end) / 2, wide / 2), len(shares) - wide / 2)
        if middle - wide / 2 < previous_end:
            continue
        previous_end = middle + wide / 2
        axes.text(middle, 1.12, text, ha="center", va="bottom", size=8, color=INK)
    axes.set_yticks([])
    ticks = range(0, len(shares), max(1, len(shares) // 15))
    axes.set_xticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
    axes.set_xlabel("layer: share of the prompt's tokens it computes", color=MUTED, size=8.5)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in axes.spines.values():
        side.set_visible(False)

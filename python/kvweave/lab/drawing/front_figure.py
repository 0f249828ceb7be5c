"""Quality against cost: a panel a task, a line a family of policies over its budgets, the front."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.errors import InvalidArgument
from kvweave.lab.drawing.budget_figure import TYPE_COLOURS
from kvweave.lab.drawing.figure_file import INK, MUTED, new_figure, quiet_axes, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUALITIES = {"gap_closed": "gap closed", "score": "score of the generated answer"}
COSTS = {
    "flops_ratio": "FLOPs of the prefill ÷ full's",
    "ttft_ratio": "time to first token ÷ full's",
}
_MARKERS = "osD^vP*Xhp"
_DASHES = ("-", "--", ":", "-.")
_COLUMNS = 3


@dataclass(frozen=True)
class FrontPoint:
    """One policy: what it costs, what it reaches, with the interval of that (None: not known)."""

    policy: str
    cost: float
    quality: float
    low: float | None
    high: float | None


def front_of(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Those that no other reaches more than for as little, cheapest first."""
    best: list[FrontPoint] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.quality)):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    return best


def families_of(policies: Sequence[str]) -> dict[str, list[str]]:
    """Policies that are one rule at several budgets, by a name for each.

    The budget is the setting that most of a rule's policies differ in: `foresight(share=0.1)` and
    `foresight(share=0.2)` are one family, `foresight(draft=4, share=0.1)` belongs to another. A
    policy without settings belongs to the first family of its rule.
    """
    rules: dict[str, list[str]] = {}
    for policy in policies:
        rules.setdefault(_parsed(policy)[0], []).append(policy)
    found: dict[str, list[str]] = {}
    for rule, members in rules.items():
        values: dict[str, set[str]] = {}
        for policy in members:
            for key, value in _parsed(policy)[1].items():
                values.setdefault(key, set()).add(value)
        budget = max(values, key=lambda key: len(values[key]), default=None)
        for policy in members:
            rest = [f"{k}={v}" for k, v in _parsed(policy)[1].items() if k != budget]
            name = f"{rule}({', '.join(rest)})" if rest else rule
            found.setdefault(name, []).append(policy)
    return found


def front_figure(report: Mapping[str, Any], quality: str, cost: str) -> Figure:
    """`QualityReport.to_dict()` as panels of one quality over one cost.

    Panels without a point are left out: a task without generated answers has no score to compare.

    Raises InvalidArgument for another quality or cost, or a report without any point.
    """
    if quality not in QUALITIES or cost not in COSTS:
        raise InvalidArgument(
            f"front figure: expected one of {', '.join(QUALITIES)} over one of {', '.join(COSTS)}, "
            f"got {quality!r} over {cost!r}"
        )
    panels = _panels(report, quality, cost)
    if not panels:
        raise InvalidArgument(f"front figure: expected a policy with a {quality}, got none")
    families = families_of(
        list(dict.fromkeys(point.policy for _, points in panels for point in points))
    )
    across = min(_COLUMNS, len(panels))
    down = -(-len(panels) // across)
    high = 3.1 * down + 1.5
    figure = new_figure(max(4.1 * across, 6.0), high)
    figure.text(0.02, 1 - 0.12 / high, f"{QUALITIES[quality].capitalize()} over what it costs",
                va="top", size=13, weight="bold", color=INK)  # fmt: skip
    under = "bars: 95 % bootstrap intervals; ringed: no policy reaches more for as little"
    figure.text(0.02, 1 - 0.4 / high, under, va="top", size=9, color=MUTED)
    grid = figure.add_gridspec(
        down, across, left=0.09, right=0.98, top=1 - 0.95 / high, bottom=0.95 / high,
        wspace=0.25, hspace=0.45,
    )  # fmt: skip
    for index, (section, points) in enumerate(panels):
        axes = figure.add_subplot(grid[index // across, index % across])
        _draw(axes, points, families)
        full = [row for row in section["rows"] if row["role"] == "full"]
        _level(axes, full[0][quality]["value"] if full and quality == "score" else None)
        axes.set_title(_text(section["title"]), size=9.5, color=INK, loc="left")
        axes.set_xlabel(COSTS[cost], size=8.5, color=MUTED)
        if index % across == 0:
            axes.set_ylabel(QUALITIES[quality], size=8.5, color=MUTED)
    handles, labels = _legend(families)
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.02, 0.05 / high),
                  ncols=max(2, 2 * across), frameon=False, fontsize=8)  # fmt: skip
    return figure


def has_points(report: Mapping[str, Any], quality: str) -> bool:
    """Whether any task has this quality."""
    return any(_panels(report, quality, cost) for cost in COSTS)


def save_front(path: Path, report: Mapping[str, Any], quality: str, cost: str) -> None:
    """Writes `front_figure` as PNG, SVG or PDF, by the suffix of the path."""
    save_figure(front_figure(report, quality, cost), path)


def _panels(
    report: Mapping[str, Any], quality: str, cost: str
) -> list[tuple[Mapping[str, Any], list[FrontPoint]]]:
    """The sections that have points, with these."""
    return [
        (section, points)
        for section in report["sections"]
        if (quality != "score" or section["score_name"] == "recall")
        and (points := _points(section, quality, cost))
    ]


def _parsed(policy: str) -> tuple[str, dict[str, str]]:
    """`name(key=value, …)` as its name and settings; any other text is a name."""
    found = re.fullmatch(r"([^()]+)\(([^()]*=[^()]*)\)", policy)
    if found is None:
        return policy, {}
    settings = (setting.partition("=") for setting in found[2].split(", "))
    return found[1], {key: value for key, _, value in settings}


def _points(section: Mapping[str, Any], quality: str, cost: str) -> list[FrontPoint]:
    return [
        FrontPoint(
            row["policy"], row[cost], of["value"], of["low"], of["high"]
        )
        for row in section["rows"]
        if row["role"] == "policy"
        and (of := row[quality])["value"] is not None
        and row[cost] is not None
    ]  # fmt: skip


def _draw(axes: Axes, points: list[FrontPoint], families: Mapping[str, list[str]]) -> None:
    for index, members in enumerate(families.values()):
        mine = sorted((p for p in points if p.policy in members), key=lambda p: p.cost)
        colour, marker, dash = _look(index)
        for point in mine:
            if point.low is not None and point.high is not None:
                ends = [point.low, point.high]
                axes.plot([point.cost] * 2, ends, color=colour, linewidth=1.0, alpha=0.5)
        axes.plot(
            [p.cost for p in mine], [p.quality for p in mine], color=colour, marker=marker,
            linestyle=dash, linewidth=1.4, markersize=4.5,
        )  # fmt: skip
    front = front_of(points)
    axes.plot([p.cost for p in front], [p.quality for p in front], "o", markersize=10,
              markerfacecolor="none", markeredgecolor=INK, markeredgewidth=0.9)  # fmt: skip
    axes.set_xlim(left=0.0)
    quiet_axes(axes)


def _level(axes: Axes, value: float | None) -> None:
    if value is not None:
        axes.axhline(value, color=MUTED, linewidth=0.9, linestyle=":")
        axes.annotate("full", (1.0, value), xycoords=("axes fraction", "data"), ha="right",
                      va="bottom", size=7.5, color=MUTED)  # fmt: skip


def _look(index: int) -> tuple[str, str, str]:
    count = len(TYPE_COLOURS)
    return (
        TYPE_COLOURS[index % count],
        _MARKERS[index % len(_MARKERS)],
        _DASHES[index // count % len(_DASHES)],
    )


def _legend(families: Mapping[str, list[str]]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    looks = [_look(index) for index in range(len(families))]
    lines = [
        Line2D([], [], color=colour, marker=marker, linestyle=dash, markersize=4.5)
        for colour, marker, dash in looks
    ]
    return lines, [_text(name) for name in families]


def _text(name: str) -> str:
    """A name as it is: a dollar sign would begin a formula."""
    return name.replace("$", r"\$")

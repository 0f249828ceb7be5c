"""How near each policy comes to full: KL with its interval, beside the rows it computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.errors import InvalidArgument
from kvweave.lab.drawing.figure_file import INK, MUTED, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROLES = {"policy": "#009e73", "control": "#d55e00", "floor": "#999999"}
_WORDS = {"policy": "policy", "control": "control without Δ-RoPE", "floor": "noise floor"}
_SMALLEST = 1e-4
"""The logarithmic axis begins here; an arrow marks what lies further left."""


def quality_figure(evaluation: Mapping[str, Any]) -> Figure:
    """`Evaluation.to_dict()` as a figure: left KL to full (log), right time and rows against full.

    Raises InvalidArgument when there is no policy in it.
    """
    rows = [row for row in evaluation["policies"] if row["role"] != "full"]
    if not rows:
        raise InvalidArgument("evaluation: expected at least one policy, got none")
    figure = new_figure(10.5, 1.75 + 0.42 * len(rows))
    high = figure.get_figheight()
    grid = figure.add_gridspec(
        1,
        2,
        width_ratios=[1.7, 1.0],
        left=0.135,
        right=0.975,
        wspace=0.07,
        top=1 - 0.85 / high,
        bottom=0.72 / high,
    )
    samples = rows[0]["samples"]
    title = f"{evaluation['task']}: distance to full prefill"
    under = (
        f"{evaluation['length']:,} tokens in 4 segments encoded apart, {samples} samples, "
        f"seed {evaluation['seed']}; bars: 95 % bootstrap intervals"
    )
    figure.text(0.02, 1 - 0.1 / high, title, va="top", size=13, weight="bold", color=INK)
    figure.text(0.02, 1 - 0.38 / high, under, va="top", size=9, color=MUTED)
    left = figure.add_subplot(grid[0])
    _draw_kl(left, rows)
    _draw_cost(figure.add_subplot(grid[1], sharey=left), rows)
    return figure


def save_quality(path: Path, evaluation: Mapping[str, Any]) -> None:
    """Writes `quality_figure` as PNG, SVG or PDF, by the suffix of the path."""
    save_figure(quality_figure(evaluation), path)


def _draw_kl(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    for y, row in enumerate(rows):
        value = max(row["kl"]["value"], _SMALLEST)
        low, high = row["kl"]["low"], row["kl"]["high"]
        colour = _ROLES[row["role"]]
        if low is not None and high is not None:
            ends = [max(low, _SMALLEST), max(high, _SMALLEST)]
            axes.plot(ends, [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        outside = row["kl"]["value"] < _SMALLEST
        axes.plot([value], [y], "<" if outside else "o", color=colour, markersize=7)
        text = f"{row['kl']['value']:.1g}" if outside else f"{row['kl']['value']:.4f}"
        if row["role"] == "policy" and row["policy"] != "naive":
            closed = row["gap_closed"]["value"]
            text += "" if closed is None else f"  (gap closed {closed:.0%})"
        axes.annotate(
            text,
            (value, y),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            va="bottom",
            size=8,
            color=INK,
        )
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 2, high * 4)
    axes.set_ylim(len(rows) - 0.5, -0.75)
    axes.set_yticks(range(len(rows)), [row["policy"] for row in rows], size=9.5, color=INK)
    axes.set_xlabel("mean KL to full, nats a token (log scale)", size=9, color=MUTED)
    _legend(axes, rows)
    _plain(axes)


def _draw_cost(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    for y, row in enumerate(rows):
        axes.barh(y - 0.16, row["ttft_ratio"], height=0.3, color="#0072b2")
        axes.barh(y + 0.16, row["row_share"], height=0.3, color="#e69f00")
        for offset, share in ((-0.16, row["ttft_ratio"]), (0.16, row["row_share"])):
            axes.text(share + 0.015, y + offset, f"{share:.2f}", va="center", size=7.5, color=INK)
    axes.axvline(1.0, color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, max(1.2, max(row["ttft_ratio"] for row in rows) * 1.15))
    axes.set_xlabel("against full = 1", size=9, color=MUTED)
    axes.legend(
        handles=axes.containers[:2],
        labels=["time to first token", "rows × layers computed"],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=2,
        frameon=False,
        fontsize=8,
        handlelength=1.0,
        columnspacing=1.2,
        borderaxespad=0.1,
    )
    axes.tick_params(labelleft=False)
    _plain(axes)


def _legend(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    roles = [role for role in _ROLES if any(row["role"] == role for row in rows)]
    axes.legend(
        handles=[
            Line2D([], [], marker="o", linestyle="", color=_ROLES[role], label=_WORDS[role])
            for role in roles
        ],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=3,
        frameon=False,
        fontsize=8,
        handletextpad=0.2,
        columnspacing=1.2,
        borderaxespad=0.1,
    )


def _plain(axes: Axes) -> None:
    axes.tick_params(axis="x", colors=MUTED, labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)

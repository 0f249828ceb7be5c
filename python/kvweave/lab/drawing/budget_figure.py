"""How near policies come to full as more heads are kept whole: one curve a policy, with bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.errors import InvalidArgument
from kvweave.lab.drawing.figure_file import INK, MUTED, new_figure, quiet_axes, save_figure

TYPE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999")
_SMALLEST = 1e-6
"""What is drawn for a distance of nothing: the axis is logarithmic."""


@dataclass(frozen=True)
class Point:
    """A mean and its interval at one share of whole heads; bounds are NaN for one sample."""

    share: float
    value: float
    low: float
    high: float


def save_budget(
    path: Path,
    title: str,
    under: str,
    curves: Mapping[str, Sequence[Point]],
    levels: Mapping[str, float],
) -> None:
    """Writes curves over the share of whole heads, and dotted levels of what needs no head map.

    Raises InvalidArgument when there is no curve or a suffix that cannot be written.
    """
    if not any(curves.values()):
        raise InvalidArgument("budget figure: expected at least one curve, got none")
    figure = new_figure(9.0, 5.0)
    figure.text(0.02, 0.975, title, va="top", size=13, weight="bold", color=INK)
    figure.text(0.02, 0.915, under, va="top", size=8.5, color=MUTED)
    axes = figure.add_axes((0.11, 0.11, 0.56, 0.74))
    shares = sorted({point.share for points in curves.values() for point in points})
    for colour, (name, points) in zip(TYPE_COLOURS, curves.items(), strict=False):
        at = [100 * point.share for point in points]
        low, high = ([_drawn(getattr(p, end), p.value) for p in points] for end in ("low", "high"))
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        values = [_drawn(point.value, point.value) for point in points]
        axes.plot(at, values, "o-", color=colour, linewidth=1.6, markersize=4.5, label=name)
    for name, value in levels.items():
        axes.axhline(_drawn(value, value), color=MUTED, linewidth=0.9, linestyle=":")
        axes.annotate(
            name,
            (1.0, _drawn(value, value)),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            size=8,
            color=MUTED,
        )
    axes.set_yscale("log")
    axes.set_xticks([100 * share for share in shares], [f"{100 * share:g}" for share in shares])
    axes.set_xlabel("KV heads that are kept whole, % (the others: sink and window)", size=9)
    axes.set_ylabel("mean KL to full without a map, nats a token", size=9)
    quiet_axes(axes)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="upper left",
        bbox_to_anchor=(0.745, 0.87),
        frameon=False,
        fontsize=8.5,
    )
    save_figure(figure, path)


def _drawn(bound: float, value: float) -> float:
    """A number that a logarithmic axis can show; the value where there is no bound."""
    return max(_SMALLEST, value if bound != bound else bound)

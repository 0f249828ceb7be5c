"""What `packed_front` measured, as a table and as a chart of KL over bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.lab.drawing.figure_file import INK, MUTED, new_figure, quiet_axes, save_figure
from kvweave.lab.eval.statistics import Bootstrap, Floats, Interval, difference

REFERENCE = "INT4"
COLOURS = {"planes": "#cc79a7", "own": "#0072b2", "calibrated": "#009e73", "INT": "#d55e00"}
OTHER = "#999999"


@dataclass(frozen=True)
class Found:
    """One way: bytes a token and KV head, KL [texts] with its interval, and beside `REFERENCE`.

    Bytes count a basis of the text's own, over 64K tokens as MosaicKV's segments have them.
    """

    name: str
    size: float
    kl: Floats
    interval: Interval
    beside: Interval
    agreement: float
    blocks: float
    """The share of packed blocks that rows read."""


def found_of(record: Mapping[str, Any]) -> list[Found]:
    """All ways of a record, those of the most bytes first."""
    bootstrap = Bootstrap()

    def column(name: str, what: str) -> Floats:
        return np.array([text[name][what] for text in record["texts"]], dtype=np.float64)

    reference = column(REFERENCE, "kl")
    ways = []
    for name, size in record["bytes"].items():
        kl = column(name, "kl")
        pairs = np.stack((kl, reference), 1)
        beside = bootstrap.interval(pairs, difference)
        agreement = float(column(name, "agreement").mean())
        interval = bootstrap.interval(kl)
        sizes = size["with basis, 64K tokens"], size.get("blocks", 1.0)
        ways.append(Found(name, sizes[0], kl, interval, beside, agreement, sizes[1]))
    return sorted(ways, key=lambda way: (-way.size, way.interval.value))


def beaten_by(way: Found, others: list[Found]) -> list[str]:
    """Ways of no more bytes whose KL is lower: the paired interval of the difference says so.

    Those that read a share of blocks are beside those that read as many.
    """
    bootstrap = Bootstrap()
    better = []
    for other in others:
        if other.name == way.name or other.size > way.size or other.blocks != way.blocks:
            continue
        if other.kl.mean() > way.kl.mean():
            continue
        apart = bootstrap.interval(np.stack((other.kl, way.kl), 1), difference)
        if apart.high < 0.0 or (other.size < way.size and apart.low == apart.high == 0.0):
            better.append(other.name)
    return better


def table(record: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown, a line a way."""
    ways = found_of(record)
    exact = exact_bytes(record)
    lines = [
        "| way | bytes | of bf16 | with its basis: 64K, 832 tokens | KL, nats a token | more than "
        "INT4's by | likeliest token stays | on the front |",
        "|---|---:|---:|---|---|---|---:|---|",
    ]
    for way in ways:
        size = record["bytes"][way.name]
        pages, short = size["pages"], size["with basis, 832 tokens"]
        basis = "" if short == pages else f"{way.size:.1f}, {short:.0f}"
        kl, beside = (spread(interval) for interval in (way.interval, way.beside))
        on = "yes" if not beaten_by(way, ways) else ""
        shown = "" if way.name == REFERENCE else beside
        lines.append(
            f"| {way.name} | {pages:.0f} | 1 / {exact / pages:.2f} | {basis} | {kl} | {shown} | "
            f"{way.agreement:.1%} | {on} |"
        )
    return lines


def exact_bytes(record: Mapping[str, Any]) -> float:
    """Bytes a token and KV head in bf16."""
    return 4.0 * record["head_dim"]


def spread(interval: Interval) -> str:
    """A value and its bounds."""
    return f"{interval.value:.4f} ({interval.low:.4f} to {interval.high:.4f})"


def save_chart(path: Path, record: Mapping[str, Any]) -> None:
    """Draws KL over bytes: filled where no way of as few bytes is surely nearer.

    Raises InvalidArgument for a suffix that cannot be written.
    """
    ways = found_of(record)
    figure = new_figure(11.0, 7.6)
    figure.text(0.02, 0.975, "Packed pages: distance to exact over bytes", va="top", size=13,
                weight="bold", color=INK)  # fmt: skip
    under = (
        f"{record['model']}, {record['corpus']['measured on'][0]}, {len(record['texts'])} texts of "
        f"{record['length']} + {record['following']} tokens, 192 of them exact; 95 % bootstrap; "
        "filled: on the front; squares: a quarter of blocks read"
    )
    figure.text(0.02, 0.92, under, va="top", size=8.5, color=MUTED)
    axes = figure.add_axes((0.08, 0.11, 0.52, 0.74))
    for number, way in enumerate(ways, 1):
        hue = next((hue for word, hue in COLOURS.items() if word in way.name), OTHER)
        low, high = way.interval.value - way.interval.low, way.interval.high - way.interval.value
        on = not beaten_by(way, ways)
        axes.errorbar(
            [way.size], [way.interval.value], yerr=[[max(low, 0.0)], [max(high, 0.0)]],
            fmt="o" if way.blocks == 1.0 else "s",
            color=hue, markerfacecolor=hue if on else "white", markersize=6, linewidth=1.2,
            label=f"{number}  {way.name}",
        )  # fmt: skip
        axes.annotate(str(number), (way.size, way.interval.value), xytext=(6, 3),
                      textcoords="offset points", size=8, color=hue)  # fmt: skip
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel(
        f"bytes a token and KV head, own bases over 64K tokens (bf16: {exact_bytes(record):.0f})",
        size=9,
    )
    axes.set_ylabel("KL to exact, nats a token", size=9)
    quiet_axes(axes)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.61, 0.9),
        frameon=False, fontsize=7,
    )  # fmt: skip
    save_figure(figure, path)

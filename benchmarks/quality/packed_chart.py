"""What `packed_front` measured, as a table and as a chart of KL over bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.table_rows import with_bounds
from kvweave.lab.drawing.figure_file import INK, MUTED, new_figure, quiet_axes, save_figure
from kvweave.lab.eval.statistics import Bootstrap, Floats, Interval, difference

REFERENCE = "INT4"
COLOURS = {"planes": "#cc79a7", "own": "#0072b2", "calibrated": "#009e73", "INT": "#d55e00"}
OTHER = "#999999"
LEAST_DRAWN = 1e-5
"""KL in nats below which a way is as good as exact: a chart of its logarithm leaves it out."""
FEW = ", a quarter of blocks"


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
    perplexity: float
    """Over that of exact pages, read as a whole."""
    answered: dict[str, Interval]
    """The share of right answers, by task."""
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
        beside = bootstrap.interval(np.stack((kl, reference), 1), difference)
        answered = {
            task: bootstrap.interval(np.array([sample[name] for sample in samples], float))
            for task, samples in record.get("tasks", {}).items()
        }
        ways.append(
            Found(
                name,
                bytes_in(record, name, "with basis, 64K tokens"),
                kl,
                bootstrap.interval(kl),
                beside,
                float(column(name, "agreement").mean()),
                float(np.exp(column(name, "surprise").mean())),
                answered,
                size.get("blocks", 1.0),
            )
        )
    return sorted(ways, key=lambda way: (-way.size, way.interval.value))


def bytes_in(record: Mapping[str, Any], name: str, what: str) -> float:
    """Bytes a token and KV head of a way: those of its pages are the mean over texts where each
    text chooses."""
    size = record["bytes"][name]
    chosen = [text[name]["bytes"] for text in record["texts"] if "bytes" in text[name]]
    pages = float(np.mean(chosen)) if chosen else size["pages"]
    return float(size[what] - size["pages"] + pages)


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
    """Lines of Markdown, a line a way: read as a whole, and in a quarter of its blocks."""
    ways = found_of(record)
    few = {way.name.removesuffix(FEW): way for way in ways if way.blocks < 1.0}
    exact, tasks = exact_bytes(record), list(record.get("tasks", {}))
    right = "".join(f" {task} |" for task in tasks)
    lines = [
        f"| way | bytes | of bf16 | KL, nats a token | perplexity | likeliest stays |{right} front "
        f"| a quarter of blocks: KL |{right} front |",
        "|---|---:|---:|---|---:|---:|" + "---:|" * len(tasks) + "---|---|" + "---:|" * len(tasks)
        + "---|",
    ]  # fmt: skip
    for way in (way for way in ways if way.blocks == 1.0):
        pages = bytes_in(record, way.name, "pages")
        part = few.get(way.name)
        chosen = ["", *[""] * len(tasks), ""]
        if part is not None:
            chosen = [with_bounds(part.interval), *right_of(part), front_of(part, ways)]
        cells = [
            way.name, f"{pages:.0f}", f"1 / {exact / pages:.2f}", with_bounds(way.interval),
            f"× {way.perplexity:.4f}", f"{way.agreement:.1%}", *right_of(way),
            front_of(way, ways), *chosen,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def right_of(way: Found) -> list[str]:
    """The share of right answers of each task, with its interval."""
    return [f"{of.value:.0%} ({of.low:.0%} to {of.high:.0%})" for of in way.answered.values()]


def front_of(way: Found, ways: list[Found]) -> str:
    """Whether nothing of as few bytes is surely nearer."""
    return "" if beaten_by(way, ways) else "yes"


def exact_bytes(record: Mapping[str, Any]) -> float:
    """Bytes a token and KV head in bf16."""
    return 4.0 * record["head_dim"]


def save_chart(path: Path, record: Mapping[str, Any]) -> None:
    """Draws KL over bytes, of ways read as a whole and with block selection: filled where no way
    of as few bytes is surely nearer.

    Raises InvalidArgument for a suffix that cannot be written.
    """
    ways = found_of(record)
    figure = new_figure(15.0, 8.2)
    figure.text(0.02, 0.975, "Packed pages: distance to exact over bytes", va="top", size=13,
                weight="bold", color=INK)  # fmt: skip
    under = (
        f"{record['model']}, {record['corpus']['measured on'][0]}, {len(record['texts'])} texts of "
        f"{record['length']} + {record['following']} tokens, 192 of them exact; 95 % bootstrap; "
        "filled: on the front"
    )
    figure.text(0.02, 0.93, under, va="top", size=8.5, color=MUTED)
    names = [way.name for way in ways if way.blocks == 1.0]
    numbers = {name: number for number, name in enumerate(names, 1)}
    low, high = (fit([way.interval.value for way in ways if way.interval.value > LEAST_DRAWN])
                 for fit in (min, max))  # fmt: skip
    for left, blocks, title in ((0.06, 1.0, "all blocks"), (0.40, 0.25, "a quarter of blocks")):
        axes = figure.add_axes((left, 0.09, 0.29, 0.78))
        for way in (way for way in ways if way.blocks == blocks):
            if way.interval.value > LEAST_DRAWN:
                _draw(axes, way, numbers.get(way.name.removesuffix(FEW)), front_of(way, ways))
        axes.set_yscale("log")
        axes.set_ylim(low / 1.6, high * 2.5)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_title(title, size=10, color=INK)
        axes.set_xlabel("bytes a token and KV head, own bases over 64K tokens "
                        f"(bf16: {exact_bytes(record):.0f})", size=8)  # fmt: skip
        quiet_axes(axes)
    figure.axes[0].set_ylabel("KL to exact, nats a token", size=9)
    for at, name in enumerate(names):
        figure.text(0.71, 0.875 - 0.0205 * at, f"{numbers[name]}  {name}", size=7, va="top",
                    color=hue_of(name))  # fmt: skip
    save_figure(figure, path)


def hue_of(name: str) -> str:
    """The colour of a way's kind."""
    return next((hue for word, hue in COLOURS.items() if word in name), OTHER)


def _draw(axes: Any, way: Found, number: int | None, on_front: str) -> None:
    low, high = way.interval.value - way.interval.low, way.interval.high - way.interval.value
    hue, label = hue_of(way.name), str(number or way.name.removesuffix(FEW))
    axes.errorbar(
        [way.size], [way.interval.value], yerr=[[max(low, 0.0)], [max(high, 0.0)]],
        fmt="o", color=hue, markerfacecolor=hue if on_front else "white", markersize=6,
        linewidth=1.2,
    )  # fmt: skip
    axes.annotate(label, (way.size, way.interval.value), xytext=(6, 3),
                  textcoords="offset points", size=8, color=hue)  # fmt: skip

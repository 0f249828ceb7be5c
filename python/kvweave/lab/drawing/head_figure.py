"""A head map: which (layer, KV head) reads everything, over what was measured of each.

As figure by matplotlib and as lines of a terminal, both from the map's own JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from kvweave.drawn.heads import PANELS, DrawnHeads, Values, read_heads
from kvweave.lab.drawing.figure_file import INK, MUTED, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = " ░▒▓█"
_ROUND_SHADES = " ◔◑◕●"
_MARGIN = 10
"""Characters before the first layer in a terminal."""
_CELL = 0.24
"""Inches of one head in the figure."""


def head_figure(head_map: Mapping[str, Any], title: str = "Head classes") -> Figure:
    """A map (its JSON as plain data) as a figure: a strip of heat for each thing measured.

    Columns are layers, rows KV heads; a frame marks each head that reads everything.

    Raises InvalidArgument for data that is no head map.
    """
    drawn = read_heads(head_map)
    layers, heads = drawn.is_global.shape
    panels = drawn.panels or {"score": np.where(drawn.is_global, 1.0, 0.0)}
    wide = max(6.5, 2.3 + _CELL * layers)
    strip = _CELL * heads
    high = 0.95 + len(panels) * (max(strip, 0.45) + 0.22) + 0.45
    figure = new_figure(wide, high)
    figure.text(0.02, 1 - 0.1 / high, title, va="top", size=13, weight="bold", color=INK)
    figure.text(0.02, 1 - 0.38 / high, drawn.headline, va="top", size=9, color=MUTED)
    grid = figure.add_gridspec(
        len(panels),
        1,
        left=1.55 / wide,
        right=1 - 0.75 / wide,
        top=1 - 0.75 / high,
        bottom=0.5 / high,
        hspace=0.22 / max(strip, 0.45),
    )
    for index, (name, values) in enumerate(panels.items()):
        _strip(figure, grid[index], name, values, drawn, index + 1 == len(panels))
    return figure


def save_heads(path: Path, head_map: Mapping[str, Any], title: str = "Head classes") -> None:
    """Writes `head_figure` as PNG, SVG or PDF, by the suffix of the path."""
    save_figure(head_figure(head_map, title), path)


def draw_heads(head_map: Mapping[str, Any], width: int = 140) -> RenderableType:
    """A map as something rich prints: a column a layer, a row a KV head, darker for a higher score.

    Heads that read everything are round and green, the others square and grey, so that they are
    told apart where there are no colours. Layers that `width` characters have no
    room for stand below the others.

    Raises InvalidArgument for data that is no head map.
    """
    drawn = read_heads(head_map)
    score = drawn.panels.get("score", drawn.is_global.astype(float))
    most = float(score.max()) or 1.0
    text, layers = Text(), score.shape[0]
    tens = max(1, (width - _MARGIN) // 10) * 10
    for first in range(0, layers, tens):
        band = range(first, min(first + tens, layers))
        for head in range(score.shape[1]):
            text.append(f"  head {head:<3}", style="dim")
            for layer in band:
                is_global = drawn.is_global[layer, head]
                shades = _ROUND_SHADES if is_global else _SHADES
                shade = shades[min(4, 1 + int(4 * score[layer, head] / most))]
                text.append(shade, style="green" if is_global else "bright_black")
            text.append("\n")
        ruler = "".join(f"{layer:<10}" for layer in band[::10])
        text.append(f"  layer   {ruler.rstrip()}", style="dim")
        text.append("\n" * (band.stop < layers))
    legend = Text().append(f"● {drawn.does} everything", style="green")
    legend.append("   █ sink and window", style="bright_black")
    legend.append("   fuller: a higher score", style="dim")
    return Group(Text(drawn.headline, style="bold"), text, legend)


def _strip(
    figure: Figure,
    place: Any,
    name: str,
    values: Values,
    drawn: DrawnHeads,
    last: bool,
) -> None:
    from matplotlib.patches import Rectangle

    axes = figure.add_subplot(place)
    image = axes.imshow(values.T, cmap="Blues", aspect="auto", vmin=0.0)
    for layer, head in zip(*np.nonzero(drawn.is_global), strict=True):
        corner = (layer - 0.5, head - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#d55e00", linewidth=1.1))
    axes.set_ylabel(PANELS[name], size=8, color=INK, rotation=0, ha="right", va="center")
    axes.set_yticks(range(values.shape[1]))
    step = 1 if values.shape[0] <= 16 else 5
    axes.set_xticks(range(0, values.shape[0], step))
    axes.tick_params(length=0, labelsize=7, colors=MUTED, labelbottom=last)
    if last:
        words = f"layer (rows: KV heads; framed: {drawn.does} everything)"
        axes.set_xlabel(words, size=8, color=MUTED)
    for side in axes.spines.values():
        side.set_visible(False)
    bar = figure.colorbar(image, ax=axes, fraction=0.025, pad=0.012)
    bar.ax.tick_params(length=0, labelsize=7, colors=MUTED)
    bar.outline.set_visible(False)

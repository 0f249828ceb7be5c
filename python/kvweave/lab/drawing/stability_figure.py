"""How long heads keep to their pages, and whether tasks agree on which do not (FlexiCache, §2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.drawing.figure_file import INK, MUTED, new_figure, save_figure

_STABLE, _UNSTABLE = "#0072b2", "#d55e00"


def save_stability(path: Path, stability: Mapping[str, Any], title: str) -> None:
    """Draws what a map keeps of `Stability` (its Figure 1 and Table 1) to PNG, SVG or PDF.

    Left a thin line a head, the overlap of its pages with those so many steps later, and the mean
    of both kinds; right the share of unstable heads that tasks have in common.

    Raises InvalidArgument for other data or a suffix that cannot be written.
    """
    try:
        overlap = np.asarray(stability["overlap_by_offset"], np.float64)
        unstable = np.asarray(stability["unstable"], bool)
        shared = np.asarray(stability["shared_by_tasks"], np.float64)
        tasks = [str(task) for task in stability["tasks"]]
        words = f"{stability['pages']} pages a head, {stability['steps']} decode steps a prompt"
        if overlap.shape[:2] != unstable.shape or shared.shape != (len(tasks), len(tasks)):
            raise ValueError(f"shapes {overlap.shape}, {unstable.shape}, {shared.shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"stability: expected what a map keeps, got {error!r}") from error
    figure = new_figure(10.0, 4.6)
    figure.text(0.02, 0.97, title, va="top", size=13, weight="bold", color=INK)
    figure.text(0.02, 0.91, words, va="top", size=8.5, color=MUTED)
    axes = figure.add_axes((0.07, 0.12, 0.46, 0.70))
    offsets = np.arange(1, overlap.shape[2] + 1)
    for flags, colour, name in ((~unstable, _STABLE, "stable"), (unstable, _UNSTABLE, "unstable")):
        lines = overlap[flags]
        for line in lines:
            axes.plot(offsets, line, color=colour, alpha=0.25, linewidth=0.7)
        if len(lines):
            axes.plot(offsets, lines.mean(0), color=colour, linewidth=2.4, label=name)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("decode steps later", size=9)
    axes.set_ylabel("pages in common, corrected for chance", size=9)
    axes.tick_params(colors=MUTED, labelsize=8)
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    table = figure.add_axes((0.70, 0.22, 0.28, 0.60))
    table.imshow(shared, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    for (row, column), value in np.ndenumerate(shared):
        ink = "white" if value > 0.6 else INK
        table.text(column, row, f"{value:.2f}", ha="center", va="center", size=8, color=ink)
    table.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    table.set_yticks(range(len(tasks)), tasks)
    table.tick_params(colors=MUTED, labelsize=7.5, length=0)
    table.set_title("unstable heads in common", size=9, color=INK)
    save_figure(figure, path)

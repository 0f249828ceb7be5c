"""Making and writing figures without pyplot: no global state, no display needed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
MUTED = "#666666"
SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure of that size in inches, on the Agg canvas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def quiet_axes(axes: Axes) -> None:
    """A pale grid behind what is drawn, small ticks, and no frame on the right and above."""
    axes.tick_params(which="both", colors=MUTED, labelsize=8)
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)


def check_suffix(path: Path) -> None:
    """Raises InvalidArgument unless the path ends in a format that can be written.

    And ModuleNotFoundError without matplotlib: both before what is drawn is measured.
    """
    import_module("matplotlib")
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidArgument(
            f"picture: expected a path ending in {', '.join(SUFFIXES)}, got {path.name!r}"
        )


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the figure; folders on the way are made.

    Raises InvalidArgument for a suffix that is not PNG, SVG or PDF.
    """
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    import matplotlib

    # Without a date, and with names that are not drawn by lot, a figure always gives the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with matplotlib.rc_context({"svg.hashsalt": "kvweave"}):
        figure.savefig(path, dpi=160, metadata=metadata)

"""Plans and evaluations as pictures: in the terminal by rich, as PNG, SVG or PDF by matplotlib."""

from kvweave.drawing.figure_file import check_suffix
from kvweave.drawing.plan_figure import plan_figure, save_plan
from kvweave.drawing.quality_figure import quality_figure, save_quality
from kvweave.drawing.spans import read_plan
from kvweave.drawing.terminal import draw_plan

__all__ = [
    "check_suffix",
    "draw_plan",
    "plan_figure",
    "quality_figure",
    "read_plan",
    "save_plan",
    "save_quality",
]

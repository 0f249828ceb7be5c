"""Plans, head maps and evaluations as pictures: in the terminal by rich, in files by matplotlib."""

from kvweave.drawn.spans import read_plan
from kvweave.lab.drawing.figure_file import check_suffix
from kvweave.lab.drawing.front_figure import front_figure, save_front
from kvweave.lab.drawing.head_figure import draw_heads, head_figure, save_heads
from kvweave.lab.drawing.plan_figure import plan_figure, save_plan
from kvweave.lab.drawing.quality_figure import quality_figure, save_quality
from kvweave.lab.drawing.stability_figure import save_stability
from kvweave.lab.drawing.terminal import draw_plan

__all__ = [
    "check_suffix",
    "draw_heads",
    "draw_plan",
    "front_figure",
    "head_figure",
    "plan_figure",
    "quality_figure",
    "read_plan",
    "save_front",
    "save_heads",
    "save_plan",
    "save_quality",
    "save_stability",
]

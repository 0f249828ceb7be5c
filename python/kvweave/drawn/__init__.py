"""Plans, head maps, reports and answers as pieces of HTML, and what of them is drawn anywhere.

A notebook shows them so by itself: each has a `_repr_html_` that calls one of these.
"""

from kvweave.drawn.heads import read_heads
from kvweave.drawn.heads_html import heads_html
from kvweave.drawn.plan_html import plan_html
from kvweave.drawn.report_html import answer_html, report_html
from kvweave.drawn.spans import read_plan

__all__ = [
    "answer_html",
    "heads_html",
    "plan_html",
    "read_heads",
    "read_plan",
    "report_html",
]

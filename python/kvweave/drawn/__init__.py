"""Plans, head maps and reports as pieces of HTML, and what of them is drawn anywhere.

`load_ipython_extension` is what `%load_ext kvweave` calls: from then on a notebook shows the native
classes so; reports and answers it shows so by itself.
"""

from typing import Any

from kvweave.drawn.heads import read_heads
from kvweave.drawn.heads_html import heads_html
from kvweave.drawn.plan_html import plan_html
from kvweave.drawn.report_html import answer_html, report_html
from kvweave.drawn.spans import read_plan


def load_ipython_extension(ipython: Any) -> None:
    """Has a notebook show `ReusePlan` and `HeadClassMap` as pictures."""
    shown = ipython.display_formatter.formatters["text/html"]
    shown.for_type_by_name("kvweave._native", "ReusePlan", plan_html)
    shown.for_type_by_name("kvweave._native", "HeadClassMap", heads_html)


__all__ = [
    "answer_html",
    "heads_html",
    "load_ipython_extension",
    "plan_html",
    "read_heads",
    "read_plan",
    "report_html",
]

"""How near a policy comes to full prefill: tasks made from seeds, KL, intervals, controls."""

from kvweave.eval.evaluate import POLICIES, draw, evaluate
from kvweave.eval.measure import FLOOR, Measurement, SampleMeasurer, inserted
from kvweave.eval.sample import AnyOf, Said, Sample, Task, Turn, task_encoder
from kvweave.eval.statistics import (
    Interval,
    bootstrap,
    gap_closed,
    kl_per_token,
    worst_decile,
)
from kvweave.eval.summary import Evaluation, Summary
from kvweave.eval.tasks import LAYOUT_NAMES, TASK_NAMES, layout_of, task_of

__all__ = [
    "FLOOR",
    "LAYOUT_NAMES",
    "POLICIES",
    "TASK_NAMES",
    "AnyOf",
    "Evaluation",
    "Interval",
    "Measurement",
    "Said",
    "Sample",
    "SampleMeasurer",
    "Summary",
    "Task",
    "Turn",
    "bootstrap",
    "draw",
    "evaluate",
    "gap_closed",
    "inserted",
    "kl_per_token",
    "layout_of",
    "task_encoder",
    "task_of",
    "worst_decile",
]

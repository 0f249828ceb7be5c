"""How near a policy comes to full prefill: tasks made from seeds, KL, intervals, controls."""

from kvweave.eval.evaluate import POLICIES, TASK_NAMES, draw, evaluate, task_of
from kvweave.eval.measure import FLOOR, Measurement, SampleMeasurer, inserted
from kvweave.eval.sample import Sample, Task, task_encoder
from kvweave.eval.statistics import (
    Interval,
    bootstrap,
    gap_closed,
    kl_per_token,
    worst_decile,
)
from kvweave.eval.summary import Evaluation, Summary

__all__ = [
    "FLOOR",
    "POLICIES",
    "TASK_NAMES",
    "Evaluation",
    "Interval",
    "Measurement",
    "Sample",
    "SampleMeasurer",
    "Summary",
    "Task",
    "bootstrap",
    "draw",
    "evaluate",
    "gap_closed",
    "inserted",
    "kl_per_token",
    "task_encoder",
    "task_of",
    "worst_decile",
]

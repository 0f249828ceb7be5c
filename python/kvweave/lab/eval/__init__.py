"""How near a policy comes to full prefill: tasks made from seeds, KL, intervals, controls."""

from kvweave.lab.eval.encoded import Encoded, inserted
from kvweave.lab.eval.evaluate import POLICIES, draw, evaluate, evaluate_suite, tasks_of
from kvweave.lab.eval.jobs import How, Shard, job_name, measure_jobs
from kvweave.lab.eval.log import MeasurementLog, read_log
from kvweave.lab.eval.measure import FLOOR, Measurement, SampleMeasurer
from kvweave.lab.eval.sample import AnyOf, Said, Sample, Task, Turn, task_encoder
from kvweave.lab.eval.statistics import Bootstrap, Interval, bootstrap, gap_closed, worst_decile
from kvweave.lab.eval.suite import SUITES, Job, Suite, suite_of
from kvweave.lab.eval.summary import Evaluation, Summary, evaluations_of
from kvweave.lab.eval.tasks import LAYOUT_NAMES, TASK_NAMES, layout_of, task_of
from kvweave.policies.policy_text import read_policies, title_of
from kvweave.runner.lossy.divergence import kl_per_token

__all__ = [
    "FLOOR",
    "LAYOUT_NAMES",
    "POLICIES",
    "SUITES",
    "TASK_NAMES",
    "AnyOf",
    "Bootstrap",
    "Encoded",
    "Evaluation",
    "How",
    "Interval",
    "Job",
    "Measurement",
    "MeasurementLog",
    "Said",
    "Sample",
    "SampleMeasurer",
    "Shard",
    "Suite",
    "Summary",
    "Task",
    "Turn",
    "bootstrap",
    "draw",
    "evaluate",
    "evaluate_suite",
    "evaluations_of",
    "gap_closed",
    "inserted",
    "job_name",
    "kl_per_token",
    "layout_of",
    "measure_jobs",
    "read_log",
    "read_policies",
    "suite_of",
    "task_encoder",
    "task_of",
    "tasks_of",
    "title_of",
    "worst_decile",
]

"""Quality on held-out text: `python -m benchmarks.quality.held_out LOGS [--steps N] [--record]`.

The policies' settings were chosen on State of the Union speeches. The other texts here are held
out, the list of samples below was fixed before any of them was measured, and every policy has its
default settings or budgets of about equal FLOPs. LOGS is a folder that keeps each sample once it is
measured: an interrupted run goes on. Quality does not depend on how busy the machine is; times are
not recorded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.quality.sampled import log_of, parser_of, show
from kvweave.lab.bench.rows import Row
from kvweave.lab.eval import Evaluation, Interval, bootstrap, evaluate, task_of
from kvweave.lab.eval.corpus import corpus_of
from kvweave.models import load
from kvweave.policies.policy_text import read_policies
from kvweave.runner import Runner

SEED = 1
OURS = "foresight"
POLICIES = (
    "naive",
    "random:share=0.2",
    "epic:first=32",
    "cacheblend",
    "cacheblend:ratio=0.25",
    "sparsex",
    "prophet:share=0.15",
    "infoflow",
    "foresight:share=0.1",
    OURS,
    "foresight:share=0.2",
)
TUNED_ON = "sotu"
CONTROLLED = {"smollm2": 10, "qwen-coder": 3}
"""Samples of `lm` that also get the noise floor and the control without Δ-RoPE, by model."""


@dataclass(frozen=True)
class Job:
    """One task on one text; `corpus` None for a task that uses none."""

    task: str
    corpus: str | None
    length: int
    model: str = "smollm2"

    @property
    def name(self) -> str:
        model = "" if self.model == "smollm2" else f"{self.model}, "
        text = "" if self.corpus is None else f", {self.corpus}"
        if self.corpus == TUNED_ON:
            text += " (tuned on)"
        return f"{model}{self.task}{text}, {self.length}"


BIBLE, CODE = Job("lm", "kjv", 1024), Job("lm", "python", 1024)
TASKS = (Job("needles", "kjv", 768), Job("lookups", None, 768), Job("chain", "kjv", 768))
OTHER_MODEL = (
    Job("lm", "kjv", 1024, "qwen-coder"),
    Job("lm", "python", 1024, "qwen-coder"),
)
# A job that comes again goes on to more samples: what is interrupted has all jobs in it.
STEPS: tuple[tuple[Job, int], ...] = (
    (BIBLE, 50),
    (CODE, 50),
    *((job, 25) for job in TASKS),
    *((job, 6) for job in OTHER_MODEL),
    *((job, 50) for job in TASKS),
    (BIBLE, 100),
    (CODE, 100),
    (Job("lm", TUNED_ON, 1024), 50),
)


def run(logs: Path, steps: int, device: str = "cpu") -> list[Row]:
    """Measures the first steps, or what is missing of them, and sums up."""
    runners: dict[str, Runner] = {}
    found: dict[Job, Evaluation] = {}
    for job, samples in STEPS[:steps]:
        if job.model not in runners:
            runners.clear()  # two models at once would not fit a small machine
            model, tokenizer = load(job.model, device=device)
            runners[job.model] = Runner(model, tokenizer, max_tokens=8192)
        found[job] = evaluate(
            runners[job.model],
            task_of(job.task, job.length, job.corpus),
            read_policies(",".join(POLICIES)),
            samples=samples,
            seed=SEED,
            controlled=CONTROLLED[job.model] if job.task == "lm" else 0,
            log=log_of(logs, job.name),
        )
        print(f"{job.name}: {samples} samples", flush=True)
    rows = []
    for job, evaluation in found.items():
        text = "" if job.corpus is None else corpus_of(job.corpus).digest
        rows += [
            Row(row.name, row.value, row.unit, row.p95, {**row.of, "text": text})
            for row in rows_of(job.name, evaluation)
        ]
    return rows


def rows_of(name: str, evaluation: Evaluation) -> list[Row]:
    """One row a policy: KL to full with its interval, FLOPs, and how far it is from foresight's.

    Floor, control and, where answers are scored, full stand below the policies.
    """
    scored = evaluation.score_name == "recall"
    rows = []
    for summary in sorted(evaluation.summaries(), key=lambda summary: summary.role != "policy"):
        if summary.role == "full" and not scored:
            continue
        beside: dict[str, object] = {"95 %": _bounds(summary.kl)}
        if summary.role == "policy":
            beside["gap closed"] = summary.gap_closed.value
            beside["95 % of it"] = _bounds(summary.gap_closed)
            if summary.policy != OURS:
                difference = paired(evaluation, summary.policy, OURS)
                beside[f"KL − {OURS}'s, 95 %"] = _bounds(difference)
        beside |= {"FLOPs": summary.flops_ratio, "worst 10 %": summary.kl_worst_decile}
        beside |= {"1st": summary.first_token, "rows": summary.row_share, "n": summary.samples}
        if scored:
            beside["recall"] = summary.score.value
        rows.append(Row(f"{name}: {summary.policy}", summary.kl.value, "", None, beside))
    return rows


def paired(evaluation: Evaluation, one: str, other: str) -> Interval:
    """Mean of KL(one) − KL(other) over the samples, which both have."""
    means = {
        policy: [np.mean(m.kl) for m in evaluation.measurements if m.policy == policy]
        for policy in (one, other)
    }
    return bootstrap(np.asarray(means[one]) - np.asarray(means[other]))


def _bounds(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def main() -> int:
    parser = parser_of("quality", __doc__)
    parser.add_argument("--steps", type=int, default=len(STEPS), help="only the first steps")
    parser.add_argument("--device", default="cpu", help="where the models are: cpu, or cuda")
    chosen = parser.parse_args()
    show("quality", run(chosen.logs, chosen.steps, chosen.device), chosen.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

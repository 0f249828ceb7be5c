"""Quality under head maps: `python -m benchmarks.quality.heads LOGS --map FILE [--record]`.

FILE is a map that `kvweave profile-heads` wrote: its scores rank the heads, and for each budget the
first of them stay whole while the others keep sink and window. Every policy under
every budget answers the samples of the list below, and all are compared with `full` without a map.
LOGS is a folder that keeps each sample once it is measured: an interrupted run goes on. Times are
not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.sampled import log_of, parser_of, show
from kvweave.cache import HeadClassMap
from kvweave.lab.bench.rows import Row
from kvweave.lab.drawing.budget_figure import Point, save_budget
from kvweave.lab.eval import (
    Measurement,
    MeasurementLog,
    SampleMeasurer,
    bootstrap,
    draw,
    inserted,
    task_of,
)
from kvweave.lab.eval.measure import MAX_NEW_TOKENS
from kvweave.lab.profile import HeadProfile
from kvweave.models import load
from kvweave.policies import Foresight, Full, Policy, RedKnot, SparseX, Weave
from kvweave.runner import Runner

SEED = 2
BUDGETS = (0.125, 0.25, 0.5, 0.75, 1.0)
WITHOUT_MAP = ("naive", "cacheblend", "sparsex", "foresight")
UNDER_MAP: dict[str, Policy] = {
    "full": Full(),
    "sparsex": SparseX(),
    "foresight": Foresight(),
    "redknot": RedKnot(),
    "redknot, dense feed-forward": RedKnot(dense_until=1.0),
    "weave": Weave(),
}


@dataclass(frozen=True)
class Job:
    """One task on one text, local heads keeping `sink` and `recent` tokens."""

    task: str
    corpus: str | None
    length: int
    samples: int
    sink: int = 16
    recent: int = 64

    @property
    def name(self) -> str:
        text = "" if self.corpus is None else f", {self.corpus}"
        return f"{self.task}{text}, {self.length}, window {self.recent}"


JOBS = (
    Job("lm", "kjv", 1024, 24),
    Job("lm", "python", 1024, 24),
    Job("lm", "kjv", 2048, 12, recent=256),
    Job("lm", "kjv", 4096, 12, recent=256),
    Job("needle", "kjv", 2048, 24, recent=256),
    Job("needle", "kjv", 768, 24),
    Job("lookup", None, 768, 24),
    Job("chain", "kjv", 768, 24),
)


def measured_as(policy: str, share: float | None) -> str:
    """The name of a policy under a budget; None: without a map."""
    return policy if share is None else f"{policy} @ {100 * share:g} %"


class Bench:
    """One model in float32: a runner without a map, and one for each budget and window."""

    def __init__(
        self, name: str, device: str, profile: HeadProfile, budgets: Sequence[float]
    ) -> None:
        self.profile, self.budgets = profile, tuple(budgets)
        self.model, self.tokenizer = load(name, torch.float32, device=device)
        self.whole = self._runner(None)

    def _runner(self, heads: HeadClassMap | None) -> Runner:
        return Runner(
            self.model,
            self.tokenizer,
            max_tokens=5120,
            heads=heads,
            progress=False,
            check=heads is None,
        )

    def measure(self, job: Job, log: Path) -> list[Measurement]:
        """All samples of a job under all policies, budgets and none."""
        task = task_of(job.task, job.length, job.corpus)
        subject = {
            "model": self.whole.spec.fingerprint,
            "task": repr(task),
            "window": [job.sink, job.recent],
            "seed": SEED,
            "budgets": self.budgets,
            "scores": self.profile.score().round(4).tolist(),
            "policies": [*WITHOUT_MAP, *map(repr, UNDER_MAP.values())],
        }
        kept = MeasurementLog(log, subject)
        kept.define({job.name: {"samples of": repr(task)}}, {})
        mapped = {
            share: self._runner(self.profile.map(share, sink=job.sink, recent=job.recent))
            for share in self.budgets
        }
        found: list[Measurement] = []
        for index, sample in enumerate(draw(task, self.tokenizer, job.samples, SEED)):
            if not kept.measured(job.name, index):
                namespace = f"heads/{index}"
                with ready(self.whole, sample, index, namespace) as measurer:
                    measured = [measurer.full(), *map(measurer.policy, WITHOUT_MAP)]
                    for share, runner in mapped.items():
                        with inserted(runner, sample, namespace):
                            measured += list(under(measurer.on(runner), share))
                kept.append(job.name, index, measured)
                print(f"{job.name}: {index + 1} of {job.samples}", flush=True)
            found += kept.measured(job.name, index).values()
        return found


@contextmanager
def ready(runner: Runner, sample: Any, index: int, namespace: str) -> Iterator[SampleMeasurer]:
    """The measurer of a sample whose segments are in the runner's knowledge base."""
    with ExitStack() as stack:
        here = stack.enter_context(inserted(runner, sample, namespace))
        yield SampleMeasurer(runner, here, index, namespace, MAX_NEW_TOKENS)


def under(measurer: SampleMeasurer, share: float) -> Iterator[Measurement]:
    """Every policy under one budget; where all heads are whole, those that differ from no map."""
    for name, policy in UNDER_MAP.items():
        if share < 1.0 or name in ("redknot", "weave"):
            yield measurer.policy(policy, "policy", measured_as(name, share))


def rows_of(job: Job, model: str, found: list[Measurement]) -> list[Row]:
    """One row a policy and budget: KL to full with its interval, and what stands beside it."""
    rows = []
    answered = any(m.answer for m in found)
    flops = {m.sample: m.flops for m in found if m.role == "full"}
    for name in dict.fromkeys(m.policy for m in found):
        mine = [m for m in found if m.policy == name]
        kl = bootstrap([np.mean(m.kl) for m in mine])
        beside: dict[str, object] = {"95 %": [kl.low, kl.high]}
        same = [m for m in found if m.policy == f"full @ {name.partition(' @ ')[2]}"]
        if same and mine != same:
            apart = bootstrap(
                np.subtract(*([np.mean(m.kl) for m in some] for some in (mine, same)))
            )
            beside["KL − full's under the map, 95 %"] = [apart.low, apart.high]
        beside |= {
            "1st": float(np.mean([m.first_token for m in mine])),
            "top-10": float(np.mean([m.top10 for m in mine])),
            "top-1": float(np.mean([m.top1 for m in mine])),
            "FLOPs ÷ full": float(np.mean([m.flops / flops[m.sample] for m in mine])),
            "restored": float(np.mean([m.restored for m in mine])),
            "n": len(mine),
        }
        if answered:
            score = bootstrap([m.score for m in mine])
            beside |= {"recall": score.value, "95 % of it": [score.low, score.high]}
        rows.append(Row(f"{model}, {job.name}: {name}", kl.value, "", None, beside))
    return rows


def draw_curves(path: Path, job: Job, model: str, found: list[Measurement]) -> None:
    """The curves of one job: KL to full over budgets."""

    def point(name: str, share: float) -> Point | None:
        mine = [np.mean(m.kl) for m in found if m.policy == name]
        if not mine:
            return None
        kl = bootstrap(mine)
        return Point(share, kl.value, kl.low, kl.high)

    shares = sorted({float(m.policy.split("@ ")[1][:-2]) / 100 for m in found if "@" in m.policy})
    points = {name: [point(measured_as(name, s), s) for s in shares] for name in UNDER_MAP}
    curves = {name: [p for p in some if p is not None] for name, some in points.items()}
    levels = {name: p.value for name in WITHOUT_MAP if (p := point(name, 1.0)) is not None}
    samples = len({m.sample for m in found})
    under_title = (
        f"{model}, {job.task} on {job.corpus or 'tables'}, {job.length} tokens in 4 segments, "
        f"{samples} samples; local heads: sink {job.sink}, window {job.recent}; "
        "bands: 95 % bootstrap"
    )
    save_budget(path, "Distance to full as heads are kept whole", under_title, curves, levels)


def main() -> int:
    parser = parser_of("heads_quality", __doc__)
    parser.add_argument("--map", type=Path, required=True, help="what profile-heads wrote")
    parser.add_argument("--model", default="smollm2", help="a packaged model, or a local folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", default="", help="only jobs whose name holds this")
    parser.add_argument("--samples", type=int, help="of each job, instead of the list's")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="shares of heads")
    parser.add_argument("--figure", type=Path, help="draw the first job to PNG, SVG or PDF")
    chosen = parser.parse_args()
    profile = HeadProfile.from_map(HeadClassMap.from_json(chosen.map.read_text()))
    budgets = [float(share) for share in chosen.budgets.split(",")]
    bench = Bench(chosen.model, chosen.device, profile, budgets)
    rows: list[Row] = []
    for listed in (job for job in JOBS if chosen.jobs in job.name):
        job = replace(listed, samples=chosen.samples or listed.samples)
        found = bench.measure(job, log_of(chosen.logs, f"heads-{chosen.model} {job.name}"))
        if not rows and chosen.figure is not None:
            draw_curves(chosen.figure, job, chosen.model, found)
        rows += rows_of(job, chosen.model, found)
    show("heads_quality", rows, chosen.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

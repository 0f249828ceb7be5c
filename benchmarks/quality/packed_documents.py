"""What packing documents costs: `python -m benchmarks.quality.packed_documents MODEL --out FILE`.

Tasks of the eval lab, each sample measured against full prefill of the same prompt by runners that
keep documents in exact pages, and in packed ones of each format; and these against the same policy
over exact pages, for reuse costs what it costs over both. Formats in a basis have the shared
one of their runner, made of `--calibrated` tokens of speeches; needles lie in speeches too. KL is
nats a token of full's own answer (of a text, of what follows), in float32, on a GPU in bfloat16,
which packed pages are read in there; intervals are over samples (`lab.eval`'s bootstrap, each task
weighing alike), those of differences over pairs.
`--exact-first`: of how many tokens at the beginning of documents pages are read exactly, where it
is not what `Packing` has. What is in FILE is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.measured_file import measured
from benchmarks.report.record import machine
from benchmarks.report.table_rows import with_bounds
from kvweave import models
from kvweave.lab.eval.corpus import corpus_of
from kvweave.lab.eval.encoded import inserted
from kvweave.lab.eval.measure import MAX_NEW_TOKENS, Measurement, SampleMeasurer
from kvweave.lab.eval.sample import Task
from kvweave.lab.eval.statistics import Bootstrap, difference
from kvweave.lab.eval.tasks import task_of
from kvweave.policies import Epic, Foresight, Naive, Policy
from kvweave.runner import Packing, Runner

TASKS = (("lm", "kjv"), ("lm", "python"), ("needles", None), ("lookups", None))
"""Names of tasks, and the texts that they are on."""
POLICIES: dict[str, Policy] = {"naive": Naive(), "epic 1": Epic(1), "foresight": Foresight()}
FORMATS = {
    "INT4": "int4",
    "half-int4": "half-int4",
    "quarter-bf16": "quarter-bf16",
    "planes-3": "planes-3",
}
"""Runners with packed pages, and their format."""
CALIBRATION = "sotu"
"""The text that shared bases are made of."""
SEED = 1


def title(task: tuple[str, str | None]) -> str:
    """A task as records and tables name it."""
    return task[0] if task[1] is None else f"{task[0]} ({task[1]})"


class Bench:
    """Runners of one model: over exact pages, and over those of some formats."""

    def __init__(self, asked: argparse.Namespace) -> None:
        length, first = asked.length, asked.exact_first
        dtype = torch.float32 if asked.device == "cpu" else torch.bfloat16
        loaded, self.tokenizer = models.load(asked.model, dtype, device=asked.device)
        known = {"check": False, "progress": False, "frozen_share": 0.9}
        exact = Runner(loaded, self.tokenizer, max_tokens=8 * length, **known)
        # Its exact pool has room for all that a policy may recompute.
        self.runners = {"exact": exact}
        for name in asked.formats:
            packing = Packing(FORMATS[name], exact_first=first)
            room = {"max_tokens": 16 * length, "kv_dtype": packing}
            self.runners[name] = Runner(loaded, self.tokenizer, **room, **known)
            self._calibrate(self.runners[name], asked.calibrated)

    def _calibrate(self, runner: Runner, tokens: int) -> None:
        """Has the shared basis made of the first text that the runner packs."""
        draws, encode = np.random.default_rng(SEED), self.tokenizer.encode
        text = corpus_of(CALIBRATION).token_slice(draws, encode, tokens)
        runner.prefill(text, "full", remember=False, watched=False).release()
        assert runner.packed is not None
        bases = runner.packed.bases
        assert bases is None or not bases.wants_moments

    def measure(self, task: Task, index: int, policies: Sequence[str]) -> dict[str, Any]:
        """One sample: by policy and runner what it differs by, and what it holds."""
        sample = task.sample(self.tokenizer, np.random.default_rng([SEED, index]))
        exact, *packed = self.runners.values()
        space = f"sample-{index}"
        with ExitStack() as stack:
            ready = stack.enter_context(inserted(exact, sample, space))
            for runner in packed:
                stack.enter_context(inserted(runner, sample, space))
                runner.flush()
            measurer = SampleMeasurer(exact, ready, index, space, MAX_NEW_TOKENS)
            rows = {"full": _row(measurer.full())}
            for named in policies:
                policy = POLICIES[named]
                beside = measurer.beside(policy)
                for name, runner in self.runners.items():
                    row = _row(measurer.on(runner).policy(policy))
                    if runner is not exact:
                        row["kl_exact"] = float(np.mean(beside.on(runner).policy(policy).kl))
                    rows[f"{named}, {name}"] = row
        return rows


def _row(of: Measurement) -> dict[str, float]:
    return {
        "kl": float(np.mean(of.kl)),
        "top1": of.top1,
        "score": of.score,
        "tokens": of.tokens,
        "reused": of.reused,
        "kv_bytes": of.kv_bytes,
        "shared_kv_bytes": of.shared_kv_bytes,
    }


def measure(record: dict[str, Any], asked: argparse.Namespace) -> Iterator[str]:
    """Adds what is not measured yet to the record, sample by sample; yields which."""
    bench: Bench | None = None
    known = {"model": asked.model, "length": asked.length, "documents": asked.documents}
    known |= {"seed": SEED, "machine": machine(), "calibrated": asked.calibrated}
    known |= {"formats": asked.formats, "exact_first": asked.exact_first}
    if asked.device != "cpu":
        known["gpu"] = torch.cuda.get_device_name()
    record |= {**known, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    tasks = {title(named): named for named in TASKS if named[0] in asked.tasks}
    done = record.setdefault("tasks", {})
    for index in range(asked.samples):
        for name, (task, corpus) in tasks.items():
            if index < len(done.setdefault(name, [])):
                continue
            bench = bench or Bench(asked)
            drawn = task_of(task, asked.length, corpus, "uneven", asked.documents)
            done[name].append(bench.measure(drawn, index, asked.policies))
            yield f"{name} {index}"


def _columns(record: Mapping[str, Any], *names: str, of: str = "kl") -> list[Any]:
    """Of each task what its samples have under some names, [n, k]."""
    tasks = record["tasks"].values()
    return [np.array([[row[name][of] for name in names] for row in rows]) for rows in tasks]


def table(record: Mapping[str, Any]) -> list[str]:
    """The record as lines of a Markdown table."""
    draws = Bootstrap()
    lines = [
        "| policy | documents | KL to full, nats a token | more than over exact ones by "
        "| KL to these | likeliest token is full's | score |",
        "|---|---|---:|---|---|---:|---:|",
    ]
    scored = [rows for task, rows in record["tasks"].items() if not task.startswith("lm")]
    for name in next(iter(record["tasks"].values()))[0]:
        if name == "full":
            continue
        policy, runner = name.split(", ")
        exact = f"{policy}, exact"
        kl = with_bounds(draws.pooled(_columns(record, name)))
        more = ""
        if name != exact:
            more = with_bounds(draws.pooled(_columns(record, name, exact), difference))
        beside = ""
        if all("kl_exact" in row[name] for rows in record["tasks"].values() for row in rows):
            beside = with_bounds(draws.pooled(_columns(record, name, of="kl_exact")))
        same = np.mean([task.mean() for task in _columns(record, name, of="top1")])
        scores = [row[name]["score"] for rows in scored for row in rows]
        score = f"{np.mean(scores):.2f}" if scores else ""
        lines.append(f"| {policy} | {runner} | {kl} | {more} | {beside} | {same:.1%} | {score} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is not in the file yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--documents", type=int, default=4, help="in a prompt")
    parser.add_argument("--samples", type=int, default=9, help="of each task")
    parser.add_argument("--calibrated", type=int, default=2048, help="tokens of shared bases")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    kinds = list(dict.fromkeys(task for task, _ in TASKS))
    parser.add_argument("--tasks", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--exact-first", type=int, help="tokens of a document; by the format else")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    measured(asked.out, partial(measure, asked=asked), table)


if __name__ == "__main__":
    main()

"""`kvweave eval`: how near policies come to full prefill, with intervals and controls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli.console import err, out, user_errors, write_json
from kvweave.cli.dtype import Dtype, read_dtype

if TYPE_CHECKING:
    from kvweave.lab.eval import Evaluation
    from kvweave.runner import Runner

QUICK = ("lm", 1024, 6)
"""Task, length and samples that stay under two minutes on two cores."""


@user_errors
def evaluate(
    task: Annotated[str, typer.Option(help="lm, needle(s), lookup(s), chain, ….")] = "lm",
    length: Annotated[int, typer.Option(min=64, help="Prompt tokens.")] = 1024,
    samples: Annotated[int, typer.Option(min=1)] = 8,
    policies: Annotated[
        str, typer.Option(help="NAME:setting=value:…, comma-separated; naive is always there.")
    ] = "naive,epic,cacheblend,sparsex,foresight",
    model: Annotated[
        str, typer.Option(help="A packaged model, a folder, or owner/name.")
    ] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Dtype = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    layout: Annotated[
        str | None, typer.Option(help="How documents stand: plain, even, moved, permuted, ….")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="sotu, kjv, python, a text file or a folder of .txt files.")
    ] = None,
    agreement_tokens: Annotated[
        int, typer.Option(min=0, help="Also compare so many generated tokens with full's.")
    ] = 0,
    suite: Annotated[
        str | None,
        typer.Option(help="smoke, quick, standard or FILE.json: its tasks, policies and samples."),
    ] = None,
    shard: Annotated[
        str, typer.Option(help="i/n: every n-th sample, from the i-th; each has its own log.")
    ] = "1/1",
    controlled: Annotated[
        int | None, typer.Option(min=0, help="Samples that also get floor and control; all.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Keep each sample in this file, and go on from it.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Task lm, 1024 tokens, 6 samples: two minutes.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything measured.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw KL by policy (PNG, SVG, PDF).")] = None,
) -> None:
    """Measure policies on a task or a suite, beside noise floor and a control without Δ-RoPE."""
    if quick:
        task, length, samples = QUICK
    if plot is not None:
        from kvweave.lab.drawing import check_suffix

        check_suffix(plot)
    make_runner = partial(_runner, model, dtype, device)
    if suite is not None:
        _evaluate_suite(suite, model, make_runner, shard, log, json)
        return
    with err().status(f"loading {model}"):
        from kvweave.lab.eval import Shard, read_policies, task_of
        from kvweave.lab.eval import evaluate as measure

        wanted, part = read_policies(policies), Shard.read(shard)
        chosen, runner = task_of(task, length, corpus, layout), make_runner(length)
    found = measure(
        runner,
        chosen,
        wanted,
        samples,
        seed,
        agreement_tokens=agreement_tokens,
        controlled=controlled,
        shard=part,
        log=log,
    )
    _show(found, model, json, plot)


def _show(found: Evaluation, model: str, json: Path | None, plot: Path | None) -> None:
    out().print(found.table())
    if json is not None:
        write_json(json, {"model": model, **found.to_dict()})
    if plot is not None:
        from kvweave.lab.drawing import save_quality

        save_quality(plot, found.to_dict())
        out().print(f"drawn to {plot}", style="dim")


def _evaluate_suite(
    name: str,
    model: str,
    make_runner: Callable[[int], Runner],
    shard: str,
    log: Path | None,
    json: Path | None,
) -> None:
    with err().status(f"loading {model}"):
        from kvweave.lab.eval import Shard, evaluate_suite, read_policies, suite_of, tasks_of
        from kvweave.lab.eval.report import report_of
        from kvweave.lab.eval.report_table import tables_of

        chosen, part = suite_of(name), Shard.read(shard)
        # What cannot be measured is said before a model is loaded.
        read_policies(chosen.policies)
        tasks_of(chosen)
        runner = make_runner(chosen.longest)
    found = report_of(evaluate_suite(runner, chosen, shard=part, log=log))
    for table in tables_of(found):
        out().print(table, highlight=False)
    if json is not None:
        write_json(json, {"model": model, "suite": chosen.name, **found.to_dict()})


def _runner(model: str, dtype: str | None, device: str, length: int) -> Runner:
    """A runner with room for a prompt of that length, its segments, and two answers."""
    from kvweave import models
    from kvweave.runner import Runner

    loaded, tokenizer = models.load(model, read_dtype(dtype), device=device)
    return Runner(loaded, tokenizer, max_tokens=4 * length + 4096)

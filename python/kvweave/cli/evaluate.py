"""`kvweave eval`: how near policies come to full prefill, with intervals and controls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.console import err, out, user_errors, write_json

QUICK = ("lm", 1024, 6)
"""Task, length and samples that stay under two minutes on two cores."""


@user_errors
def evaluate(
    task: Annotated[str, typer.Option(help="lm, needle(s), lookup(s) or chain.")] = "lm",
    length: Annotated[int, typer.Option(min=64, help="Prompt tokens.")] = 1024,
    samples: Annotated[int, typer.Option(min=1)] = 8,
    policies: Annotated[
        str, typer.Option(help="Comma-separated; naive is always there.")
    ] = "naive,epic,cacheblend,sparsex",
    model: Annotated[str, typer.Option(help="A packaged model, or a local folder.")] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    corpus: Annotated[
        str | None, typer.Option(help="sotu, kjv, python, a text file or a folder of .txt files.")
    ] = None,
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
    """Measure policies on a task, beside the noise floor and a control without Δ-RoPE."""
    if quick:
        task, length, samples = QUICK
    if plot is not None:
        from kvweave.drawing import check_suffix

        check_suffix(plot)
    with err().status(f"loading {model}"):
        from kvweave import models
        from kvweave.eval import evaluate as measure
        from kvweave.eval import task_of
        from kvweave.policies import policy_of
        from kvweave.runner import Runner

        wanted = [policy_of(name.strip()) for name in policies.split(",")]
        chosen = task_of(task, length, corpus)
        loaded, tokenizer = models.load(model, device=device)
        runner = Runner(loaded, tokenizer, max_tokens=4 * length + 4096)
    found = measure(runner, chosen, wanted, samples, seed, controlled=controlled, log=log)
    out().print(found.table())
    if json is not None:
        write_json(json, {"model": model, **found.to_dict()})
    if plot is not None:
        from kvweave.drawing import save_quality

        save_quality(plot, found.to_dict())
        out().print(f"drawn to {plot}", style="dim")

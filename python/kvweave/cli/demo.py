"""`kvweave demo`: a real model, a knowledge base of real text, every policy, one table."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.console import err, out, user_errors, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.demo import Row


@user_errors
def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the rows as JSON.")] = None,
    model: Annotated[str, typer.Option(help="A packaged model, or a local folder.")] = "smollm2",
    prompts: Annotated[int, typer.Option(min=1, max=3, help="How many questions.")] = 3,
    mode: Annotated[str, typer.Option(help="materialise or share.")] = "materialise",
) -> None:
    """Ask questions over a knowledge base, once under each policy."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    start = time.perf_counter()
    with err().status(f"loading {model}"):
        from kvweave import models
        from kvweave.demo import PASSAGES, QUESTIONS, means, run
        from kvweave.policies import POLICIES
        from kvweave.runner import Runner

        loaded, tokenizer = models.load(model)
        runner = Runner(loaded, tokenizer, max_tokens=16384, mode=mode)
    rows: list[Row] = []
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as progress:
        bar = progress.add_task("prompts × policies", total=prompts * len(POLICIES))
        for row in run(runner, QUESTIONS[:prompts]):
            rows.append(row)
            progress.update(bar, advance=1, description=f"prompt {row.prompt}, {row.policy}")
    averages = means(rows) if prompts > 1 else []
    took = time.perf_counter() - start
    out().print(_table(rows, averages))
    out().print(
        f"{len(PASSAGES)} passages encoded once, each alone; {model} on "
        f"{platform.machine()}, {_threads()} threads; {took:.0f} s in all",
        style="dim",
        highlight=False,
    )
    if json is not None:
        write_json(json, _document(model, mode, took, rows, averages))


def _table(rows: list[Row], averages: list[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title="Prompts over one knowledge base, its passages in another order each time",
        caption="reused = by prefix + by segment; rows = tokens × layers computed; KL to full in "
        "nats a token, over full's own answer",
    )
    table.add_column("policy", no_wrap=True)
    for head in ("reused", "recomputed", "rows", "TTFT", "× full", "KV", "first token", "KL"):
        table.add_column(head, justify="right", no_wrap=head != "first token")
    table.add_column("answer", overflow="fold", max_width=48)
    previous = -1
    for row in [*rows, *averages]:
        if row.prompt != previous:
            table.add_section()
            about = f"prompt {row.prompt}: {row.question}" if row.prompt else "mean of all prompts"
            table.add_row(Text(f"{row.tokens:.0f} tok."), *[""] * 8, Text(about, style="bold"))
            previous = row.prompt
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    agrees = f"{row.first_token:.0%}" if not row.prompt else "same" if row.first_token else "other"
    return [
        row.policy,
        f"{row.reused_prefix:.0f} + {row.reused_segment:.0f}",
        f"{row.recomputed:.0f}",
        f"{row.row_share:.0%}",
        f"{1000 * row.ttft_s:.0f} ms",
        f"{row.ttft_ratio:.2f}",
        f"{row.kv_bytes / 2**20:.0f} MiB",
        agrees,
        f"{row.kl:.4f}",
        " ".join(row.answer.split()),
    ]


def _document(
    model: str, mode: str, took: float, rows: list[Row], averages: list[Row]
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "model": model,
        "mode": mode,
        "machine": platform.machine(),
        "threads": _threads(),
        "seconds": took,
        "rows": [row.to_dict() for row in rows],
        "means": [row.to_dict() for row in averages],
    }


def _threads() -> int:
    import torch

    return torch.get_num_threads()

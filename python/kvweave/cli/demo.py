"""`kvweave demo`: a real model, a knowledge base of real text, every policy, one table."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.console import err, out, user_errors, write_json
from kvweave.cli.dtype import Dtype, read_dtype

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from kvweave.demo import Row

_ROOMY = 110
"""Characters of a terminal that has room for the answers inside the table."""


@user_errors
def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the rows as JSON.")] = None,
    model: Annotated[
        str, typer.Option(help="A packaged model, a folder, or owner/name.")
    ] = "smollm2",
    dtype: Dtype = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    prompts: Annotated[int, typer.Option(min=1, max=3, help="How many questions.")] = 3,
    mode: Annotated[
        str, typer.Option(help="materialise (copy passages) or share (read them in place).")
    ] = "materialise",
) -> None:
    """Ask questions over a knowledge base, once under each policy."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    start = time.perf_counter()
    with err().status(f"loading {model}"):
        from kvweave import models
        from kvweave.demo import PASSAGES, POLICIES, QUESTIONS, means, run
        from kvweave.runner import Runner

        loaded, tokenizer = models.load(model, read_dtype(dtype), device=device)
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
    console = out()
    roomy = console.width >= _ROOMY
    console.print(table_of(rows, averages, answers=roomy))
    for row in () if roomy else rows:
        console.print(f"{row.prompt} {row.policy:<10} {' '.join(row.answer.split())}", style="dim")
    # Each policy that cannot share says why, once.
    for reason in dict.fromkeys(row.mode_reason for row in rows if row.mode_reason):
        console.print(f"materialised, not shared: {reason}", style="dim", highlight=False)
    console.print(
        f"{len(PASSAGES)} passages encoded once, each alone; {model} on "
        f"{_place(device)}; {took:.0f} s in all",
        style="dim",
        highlight=False,
    )
    if json is not None:
        place = {"device": device, "dtype": str(loaded.dtype).removeprefix("torch.")}
        write_json(json, _document(model, place, mode, took, rows, averages))


def table_of(rows: list[Row], averages: list[Row], answers: bool) -> Table:
    """A line a prompt and policy; `answers` has room for them beside the numbers."""
    from rich import box
    from rich.table import Table

    table = Table(
        title="Questions over one knowledge base, its passages in another order each time",
        caption="reused: prefix + segment · rows: share computed · KV: MiB, own + shared\n"
        "1st: first token is full's · KL: to full, nats a token of full's answer",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1 if answers else 0),
    )
    table.add_column("policy", no_wrap=True)
    for head in ("reused", "recomputed", "rows", "TTFT", "× full", "KV", "1st", "KL"):
        table.add_column(head, justify="right", no_wrap=True)
    if answers:
        table.add_column("answer", overflow="fold")
    previous = -1
    for row in [*rows, *averages]:
        if row.prompt != previous:
            table.add_section()
            table.add_row(*_heading(row, answers))
            previous = row.prompt
        table.add_row(*_cells(row)[: 10 if answers else 9])
    return table


def _heading(row: Row, answers: bool) -> list[Text]:
    """The line above a prompt's rows: its number, tokens and question."""
    from rich.text import Text

    name = f"prompt {row.prompt}" if row.prompt else "mean"
    cells = [name, f"{row.tokens:.0f} tokens", *[""] * 7]
    if answers:
        cells.append(row.question)
    return [Text(cell, style="bold") for cell in cells]


def _cells(row: Row) -> list[str]:
    agrees = f"{row.first_token:.0%}" if not row.prompt else "yes" if row.first_token else "no"
    return [
        row.policy,
        f"{row.reused_prefix:.0f} + {row.reused_segment:.0f}",
        f"{row.recomputed:.0f}",
        f"{row.row_share:.0%}",
        f"{1000 * row.ttft_s:.0f} ms",
        f"{row.ttft_ratio:.2f}",
        f"{row.kv_bytes / 2**20:.0f} + {row.shared_kv_bytes / 2**20:.0f}",
        agrees,
        f"{row.kl:.4f}",
        " ".join(row.answer.split()),
    ]


def _document(
    model: str,
    place: dict[str, str],
    mode: str,
    took: float,
    rows: list[Row],
    averages: list[Row],
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "model": model,
        **place,
        "mode": mode,
        "machine": platform.machine(),
        "threads": _threads(),
        "seconds": took,
        "rows": [row.to_dict() for row in rows],
        "means": [row.to_dict() for row in averages],
    }


def _place(device: str) -> str:
    """What ran the model, for a person."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {_threads()} threads"


def _threads() -> int:
    import torch

    return torch.get_num_threads()

"""`kvweave report`: what logs of evaluations come to, as a table, as JSON, and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.console import err, out, user_errors, write_json


@user_errors
def report(
    files: Annotated[list[Path], typer.Argument(help="Logs of `kvweave eval`; shards together.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for report.json and figures (SVG, PNG).")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="A policy to compare the others with, in pairs.")
    ] = None,
) -> None:
    """Sum up measured samples: quality with intervals, and what it costs."""
    from rich.console import Console

    with err().status("summing up"):
        from kvweave.lab.eval import evaluations_of, read_log
        from kvweave.lab.eval.report import report_of
        from kvweave.lab.eval.report_table import WIDTH, tables_of

        found = report_of(evaluations_of([read_log(path) for path in files]), against)
    console = out()
    # As narrow in a wide terminal or a pipe as in a text: it is meant to be copied.
    narrow = Console(width=WIDTH) if console.width > WIDTH else console
    for table in tables_of(found):
        narrow.print(table, highlight=False)
        narrow.print()
    if out_dir is not None:
        from kvweave.lab.drawing.front_figure import COSTS, QUALITIES, has_points, save_front

        data = found.to_dict()
        write_json(out_dir / "report.json", data)
        for quality in QUALITIES:
            for cost in COSTS if has_points(data, quality) else ():
                name = f"{quality.replace('_', '-')}-over-{cost.split('_')[0]}"
                for suffix in (".svg", ".png"):
                    save_front(out_dir / f"{name}{suffix}", data, quality, cost)
        narrow.print(f"written to {out_dir}", style="dim")

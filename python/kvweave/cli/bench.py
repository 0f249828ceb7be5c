"""`kvweave bench ops`: the CUDA ops beside their peers and this device's ceilings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.console import err, out, user_errors, write_json

app = typer.Typer(name="bench", help="Measure speed on this machine.", no_args_is_help=True)


@app.command("ops")
@user_errors
def ops(
    case: Annotated[
        list[str] | None,
        typer.Option(help="An op, decode for one; may come again. All without it."),
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Comma-separated; those not installed are left out.")
    ] = "fa3,flashinfer,sdpa,torch",
    quick: Annotated[bool, typer.Option("--quick", help="Few samples, to see that it runs.")] = (
        False
    ),
    json: Annotated[Path | None, typer.Option(help="Also write everything measured.")] = None,
) -> None:
    """Measure every op on KV on a CUDA device, each beside its peers in this one process.

    Answers are checked first: a wrong one has no speed. Exit code 1 if one of ours is wrong or
    missing; a target that is missed is shown and changes nothing.
    """
    with err().status("loading torch"):
        from kvweave.lab.bench import session, table

    bench = session.start(case or (), [name.strip() for name in peers.split(",") if name.strip()])
    results = []
    with err().status("measuring the ceilings"):
        ceilings = bench.ceilings(quick)
    console, progress = out(), err()
    try:
        with progress.status("") as status:
            # A log keeps the names; a terminal shows the last.
            say = status.update if progress.is_terminal else progress.print
            for result in bench.results(ceilings, quick, say):
                results.append(result)
                if json is not None:
                    # After each case: what was measured survives whatever ends the run.
                    write_json(json, table.document(results, bench.field, ceilings, bench.device))
    finally:
        console.print(table.table_of(results))
        console.print(table.ceilings_line(ceilings), highlight=False)
        for line in table.notes_of(results, bench.field):
            console.print(line, style="dim", highlight=False, markup=False)
    if any(result.ours is None for result in results):
        raise typer.Exit(1)

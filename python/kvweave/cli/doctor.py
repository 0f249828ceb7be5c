"""`kvweave doctor`: what works here, and what to run for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli.console import out, user_errors, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.cli.environment import Finding

_COLOURS = {"works": "green", "limited": "yellow", "missing": "red"}


@user_errors
def doctor(
    json: Annotated[Path | None, typer.Option(help="Also write the findings as JSON.")] = None,
) -> None:
    """Say what of kvweave works in this environment, and what to run for the rest."""
    from kvweave.cli.environment import environment, findings

    found = findings(environment())
    out().print(table_of(found))
    for one in found:
        if one.command:
            said = f"for {one.part}: {one.command}"
            out().print(said, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_json(json, [asdict(one) for one in found])


def table_of(found: Sequence[Finding]) -> Table:
    """One line a part, as wide as the terminal lets it be."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found:
        table.add_row(one.part, Text(one.state, _COLOURS[one.state]), Text(one.found))
    return table

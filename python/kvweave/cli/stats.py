"""`kvweave stats`: what a served runner says of itself, as a table."""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections.abc import Iterator
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from kvweave.cli.console import out, user_errors
from kvweave.errors import InvalidArgument

_MOST_BYTES = 1 << 22
_PATIENCE_S = 10.0
_SAMPLE = re.compile(r"kvweave_(\w+?)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'\w+="((?:[^"\\]|\\.)*)"')


@user_errors
def stats(
    url: Annotated[str, typer.Argument(help="What `Server.expose` says: http://…/metrics.")],
) -> None:
    """Show what a served runner counts: blocks, hits, misses and why, its queue, its tiers."""
    rows = list(rows_of(_read(url)))
    if not rows:
        raise InvalidArgument(f"url: expected metrics of kvweave at {url}, got none")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    table.add_column("of", overflow="fold")
    table.add_column("count", justify="right")
    for name, labels, value in rows:
        shown = "".join(letter if letter.isprintable() else "·" for letter in labels)
        table.add_row(name.replace("_", " "), Text(shown), f"{value:.6g}")
    out().print(table)


def rows_of(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each sample in the text format that is kvweave's."""
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        yield sample[1], ", ".join(_LABEL.findall(sample[2] or "")), value


def _read(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"url: expected http://…, got {url[:200]!r}")
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE_S) as answer:
            body: bytes = answer.read(_MOST_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InvalidArgument(f"url: expected an answer from {url[:200]}, got: {error}") from error
    return body.decode("utf-8", "replace")

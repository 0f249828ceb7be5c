"""Files of what is measured: a long run that is broken off goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def kept(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is none."""
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return held


def keep(path: Path, record: Mapping[str, Any], measured: Iterable[object]) -> None:
    """Writes the record behind each thing that is measured of it, and says which that was."""
    for which in measured:
        write(path, record)
        print(which, flush=True)


def measured(
    path: Path,
    measure: Callable[[dict[str, Any]], Iterable[object]],
    table: Callable[[Mapping[str, Any]], Iterable[str]],
) -> None:
    """Measures what a file does not have yet, and prints all that it then has as a table."""
    record = kept(path)
    keep(path, record, measure(record))
    print("\n".join(table(record)))


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")

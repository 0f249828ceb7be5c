"""What a benchmark finds in a process of its own: one JSON object a line, as it comes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

Found = dict[str, Any]


def say(engine: str, **found: Any) -> None:
    """One line of results."""
    rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in found.items()}
    print(json.dumps({"engine": engine, **rounded}), flush=True)


def lines(module: str, words: list[str], limit_s: float | None = None) -> Iterator[Found]:
    """What `python -m module words…` says; all else it prints goes to stderr.

    Raises CalledProcessError where it fails, or takes longer than it may.
    """
    timeout = [] if limit_s is None else ["timeout", str(limit_s)]
    command = [*timeout, sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"engine"'):
                print(line, end="", flush=True)
                yield json.loads(line)
            else:
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)

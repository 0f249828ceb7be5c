"""Commands as a user calls them, in this process."""

from __future__ import annotations

import re

from typer.testing import CliRunner, Result

from kvweave.cli import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The one error line of a command that must leave with exit code 2."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def in_terminal(width: int, *arguments: object) -> str:
    """What a command prints where its output is a terminal so wide, without its colours."""
    words = [str(argument) for argument in arguments]
    there = {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    result = CliRunner().invoke(app, words, env=there)
    assert result.exit_code == 0, result.output
    assert "\x1b[" in result.stdout, "it was taken for a pipe"
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stdout)

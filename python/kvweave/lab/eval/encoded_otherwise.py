"""Layouts whose documents were encoded in another way than they stand in the prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from kvweave.lab.eval.layout import BLOCK_TOKENS, REMARKS, Body, Plain, between, joined_ids
from kvweave.lab.eval.problem import Document, Space
from kvweave.runner import Part, Segment

_Item = TypeVar("_Item", int, str)


@dataclass(frozen=True)
class Moved(Plain):
    """All documents were encoded together, behind another beginning than the prompt's.

    They are one segment, so documents see each other in the reused KV; only what stands before
    them, and with it their position, is another.
    """

    name: ClassVar[str] = "moved"

    def lay(self, documents: Sequence[Document], space: Space, rng: np.random.Generator) -> Body:
        """One segment of tokens, and the same tokens encoded behind a remark."""
        block = joined_ids(documents, space.gaps, space.encode)
        beginning = space.encode(REMARKS[int(rng.integers(len(REMARKS)))] + "\n\n")
        whole = Segment(tokens=(*beginning, *block))
        return Body((Segment(tokens=block),), encoded=(whole,))


@dataclass(frozen=True)
class Permuted(Plain):
    """Documents that were encoded together in another order."""

    name: ClassVar[str] = "permuted"
    least_documents: ClassVar[int] = 2

    def lay(self, documents: Sequence[Document], space: Space, rng: np.random.Generator) -> Body:
        """Each document a segment; one text of all of them encoded, in an order of its own."""
        as_they_stand = list(range(len(documents)))
        order = as_they_stand
        while order == as_they_stand:
            order = [int(i) for i in rng.permutation(len(documents))]
        together = joined_ids([documents[i] for i in order], space.gaps, space.encode)
        parts = tuple(between([[d.segment] for d in documents], space.gaps))
        return Body(parts, encoded=(Segment(tokens=together),))


@dataclass(frozen=True)
class Nested(Plain):
    """Every second document stands inside the one before it; each was encoded by itself.

    So the outer one is one segment that was never encoded as it stands: its halves and what lies
    between them come from two places. The last of an odd number of documents stands alone.
    """

    name: ClassVar[str] = "nested"
    least_documents: ClassVar[int] = 2

    def lay(self, documents: Sequence[Document], space: Space, rng: np.random.Generator) -> Body:
        """A segment of tokens a pair; the documents of all pairs encoded alone."""
        groups: list[list[Part]] = []
        for outer, inner in zip(documents[::2], documents[1::2], strict=False):
            head, tail = outer.halves(space.encode)
            seam = space.encode(space.gaps[0]) if space.gaps[0] else []
            ids = (*head, *seam, *inner.ids(space.encode), *seam, *tail)
            groups.append([Segment(tokens=ids)])
        if len(documents) % 2:
            groups.append([documents[-1].segment])
        encoded = tuple(Segment(tokens=document.ids(space.encode)) for document in documents)
        return Body(tuple(between(groups, space.gaps)), encoded)


@dataclass(frozen=True)
class Edited(Plain):
    """Each document was encoded with one word of it being another, and is not marked.

    What has not changed is found by its content. A document of tokens stays marked, as its text
    need not encode to the same tokens again.
    """

    name: ClassVar[str] = "edited"

    def lay(self, documents: Sequence[Document], space: Space, rng: np.random.Generator) -> Body:
        """The documents as they are, unmarked; each encoded with another word."""
        groups = [[d.segment if d.tokens else d.text] for d in documents]
        encoded = tuple(_with_another_word(document, rng) for document in documents)
        return Body(tuple(between(groups, space.gaps)), encoded, discover=True)


@dataclass(frozen=True)
class TailOnly(Plain):
    """The question stands first, and the prompt ends in reused text.

    The last document was encoded with the chat template's closing text behind it: nothing in or
    after the documents is fresh but what lies between them.
    """

    name: ClassVar[str] = "tail-only"
    question_first: ClassVar[bool] = True


@dataclass(frozen=True)
class Short(Plain):
    """Documents in pieces of 4 to 15 tokens: shorter than a block, each encoded alone."""

    name: ClassVar[str] = "short"
    least_tokens: ClassVar[int] = 1

    def lay(self, documents: Sequence[Document], space: Space, rng: np.random.Generator) -> Body:
        """Segments of tokens, one behind the other; the last of a document may be shorter."""
        groups: list[list[Part]] = []
        for document in documents:
            ids, pieces = document.ids(space.encode), list[Part]()
            while ids:
                cut = int(rng.integers(4, BLOCK_TOKENS))
                pieces.append(Segment(tokens=ids[:cut]))
                ids = ids[cut:]
            groups.append(pieces)
        return Body(tuple(between(groups, space.gaps)))


def _with_another_word(document: Document, rng: np.random.Generator) -> Segment:
    """One word, or token where there are no words, replaced by another one of the document."""
    if document.tokens:
        at, other = _replacement(document.tokens, rng)
        return Segment(tokens=(*document.tokens[:at], other, *document.tokens[at + 1 :]))
    words = list(re.finditer(r"\S+", document.text))
    at, word = _replacement([word[0] for word in words], rng)
    before, after = document.text[: words[at].start()], document.text[words[at].end() :]
    return Segment(text=before + word + after)


def _replacement(items: Sequence[_Item], rng: np.random.Generator) -> tuple[int, _Item]:
    """A place, and another item than the one there: the same where all are equal."""
    at = int(rng.integers(len(items)))
    others = [item for item in dict.fromkeys(items) if item != items[at]]
    return at, others[int(rng.integers(len(others)))] if others else items[at]

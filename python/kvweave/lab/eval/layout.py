"""How documents stand in a prompt: how many, how long, and with what between them.

A layout draws its choices from the sample's generator before the problem is made, and lays the
problem's documents out once they are written. Here are the layouts whose documents are encoded
each alone, as they stand; `encoded_otherwise` has those that were encoded in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import Encode
from kvweave.lab.eval.problem import Document, Space
from kvweave.runner import Part, Segment

BLOCK_TOKENS = 16
"""Tokens of a page by default, below which a segment is found only as a whole."""

SEGMENTS = 4
"""Segments a prompt is cut into by `even`; each is encoded apart (SparseX, appendix B.2, B.3)."""

REMARKS = (
    "The next document came in some time after the one before it.",
    "What follows was copied by hand and may be read on its own.",
    "Here another document begins; its author is not known to us.",
    "Please read this part as carefully as everything above.",
    "The following pages were found in the same folder.",
    "A clerk has filed the next text under a heading of its own.",
    "This document was added to the collection on a later day.",
    "The text below belongs to the collection as well.",
)
"""Fresh sentences that say nothing about any document's content."""


@dataclass(frozen=True)
class Body:
    """Documents as parts of a prompt, what was encoded before it, and how that is found.

    `encoded` is empty where the parts' own segments are what was encoded; see `Sample`.
    """

    parts: tuple[Part, ...]
    encoded: tuple[Segment, ...] = ()
    discover: bool = False


@dataclass(frozen=True)
class Plain:
    """Documents in order, each encoded alone, the longest with six times the shortest's filling."""

    documents: int = 8
    name: ClassVar[str] = "plain"
    spread: ClassVar[float] = 6.0
    least_documents: ClassVar[int] = 1
    question_first: ClassVar[bool] = False
    least_tokens: ClassVar[int] = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.documents < self.least_documents:
            raise InvalidArgument(
                f"{self.name}: expected {self.least_documents} documents or more, "
                f"got {self.documents}"
            )

    def space(self, tokenizer: Any, length: int, rng: np.random.Generator, gap: str) -> Space:
        """Draws lengths, what stands between documents, and where evidence goes."""
        steps = np.linspace(0.0, 1.0, self.documents)
        weights = tuple(float(w) for w in rng.permutation(self.spread**steps))
        order = tuple(int(i) for i in rng.permutation(self.documents))
        gaps = self.gaps(rng, gap)
        return Space(tokenizer, length, weights, gaps, order, least_tokens=self.least_tokens)

    def gaps(self, rng: np.random.Generator, gap: str) -> tuple[str, ...]:
        """The fresh text between documents; `gap` is the family's own."""
        return (gap,) * (self.documents - 1)

    def lay(self, documents: Sequence[Document], space: Space, rng: np.random.Generator) -> Body:
        """The documents as parts."""
        return Body(tuple(between([[d.segment] for d in documents], space.gaps)))


@dataclass(frozen=True)
class Even(Plain):
    """Documents with the same room each beside their evidence, which goes round in order."""

    documents: int = SEGMENTS
    name: ClassVar[str] = "even"
    least_tokens: ClassVar[int] = 1

    def space(self, tokenizer: Any, length: int, rng: np.random.Generator, gap: str) -> Space:
        """Draws nothing."""
        order = tuple(range(self.documents))
        return Space(tokenizer, length, None, self.gaps(rng, gap), order, trims=False)


@dataclass(frozen=True)
class Uneven(Plain):
    """The longest document has 32 times the shortest's filling, and about half of all of it."""

    name: ClassVar[str] = "uneven"
    spread: ClassVar[float] = 32.0
    least_documents: ClassVar[int] = 2


@dataclass(frozen=True)
class Interleaved(Plain):
    """k documents with a fresh sentence between each two (SparseX §3.2: [O1, R1, O2, R2, …]).

    Their filling is within a factor of three, so that many documents fit a short prompt.
    """

    name: ClassVar[str] = "interleaved"
    spread: ClassVar[float] = 3.0
    least_documents: ClassVar[int] = 2

    def gaps(self, rng: np.random.Generator, gap: str) -> tuple[str, ...]:
        """A remark each, drawn with repetition."""
        drawn = rng.integers(len(REMARKS), size=self.documents - 1)
        return tuple(f"\n\n{REMARKS[i]}\n\n" for i in drawn)


def between(groups: Sequence[Sequence[Part]], gaps: Sequence[str]) -> Iterator[Part]:
    """Groups of parts with the gaps between them; an empty gap is no part."""
    for index, group in enumerate(groups):
        if index and gaps[index - 1]:
            yield gaps[index - 1]
        yield from group


def joined_ids(
    documents: Sequence[Document], gaps: Sequence[str], encode: Encode
) -> tuple[int, ...]:
    """Tokens of documents with the gaps between them, each encoded alone."""
    ids: list[int] = []
    for index, document in enumerate(documents):
        if index and gaps[index - 1]:
            ids += encode(gaps[index - 1])
        ids += document.ids(encode)
    return tuple(ids)

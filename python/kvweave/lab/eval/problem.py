"""What a task asks, apart from how it is laid out: documents with evidence, and questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import Encode
from kvweave.lab.eval.sample import task_encoder
from kvweave.lab.eval.wording import Question, chat_prompt, prompt_tokens
from kvweave.runner import Part, Segment


@dataclass(frozen=True)
class Document:
    """A text of pieces that nothing may cut (sentences, lines), or of tokens where it has none."""

    pieces: tuple[str, ...] = ()
    joint: str = " "
    tokens: tuple[int, ...] = ()

    @property
    def segment(self) -> Segment:
        """The whole document as a reusable part."""
        return Segment(tokens=self.tokens) if self.tokens else Segment(text=self.text)

    @property
    def text(self) -> str:
        """The pieces, joined."""
        return self.joint.join(self.pieces)

    def ids(self, encode: Encode) -> tuple[int, ...]:
        """Its tokens, encoded alone."""
        return self.tokens or tuple(encode(self.text))

    def halves(self, encode: Encode) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its tokens cut near the middle, between two pieces where it has them."""
        ids = self.ids(encode)
        if not self.pieces:
            return ids[: len(ids) // 2], ids[len(ids) // 2 :]
        head = encode(self.joint.join(self.pieces[: (len(self.pieces) + 1) // 2]))
        # Where a tokenizer merges across the cut, it goes before the merged token.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(head, ids, strict=False))
        cut = sum(1 for _ in same)
        return ids[:cut], ids[cut:]


@dataclass(frozen=True)
class Problem:
    """Documents and what is asked about them.

    `questions`: the first one is the sample's own. None of them for a text whose `continuation`
    is scored as it stands.
    """

    documents: tuple[Document, ...]
    questions: tuple[Question, ...] = ()
    continuation: str = ""


@dataclass(frozen=True)
class Space:
    """What a layout leaves to a problem, of a prompt of `length` tokens.

    `weights`: how long the documents are, by ratio; None for an equal share each beside the
    evidence. `gaps`: the fresh text between documents. `order`: the document that gets the i-th
    piece of evidence (modulo their number). `trims`: a last sentence is cut short at a word where
    it does not fit. `least_tokens`: no document may be shorter.
    """

    tokenizer: Any
    length: int
    weights: tuple[float, ...] | None
    gaps: tuple[str, ...]
    order: tuple[int, ...]
    trims: bool = True
    least_tokens: int = 1

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.order)

    @property
    def encode(self) -> Encode:
        """Text to ids without special tokens."""
        return task_encoder(self.tokenizer)

    def spread(self, evidence: Sequence[str]) -> list[list[str]]:
        """Pieces of evidence by document, in turn."""
        by_document: list[list[str]] = [[] for _ in self.order]
        for index, piece in enumerate(evidence):
            by_document[self.order[index % len(self.order)]].append(piece)
        return by_document

    def outside(self, documents: Sequence[str], questions: Sequence[Question]) -> int:
        """Tokens of the longest prompt around these documents, theirs included."""
        parts: list[Part] = [Segment(text=documents[0])]
        for gap, text in zip(self.gaps, documents[1:], strict=True):
            parts += [gap, Segment(text=text)] if gap else [Segment(text=text)]
        whole = (chat_prompt(self.tokenizer, q, parts) for q in questions if not q.continues)
        return max(prompt_tokens(self.encode, prompt) for prompt in whole)

    def rooms(self, documents: Sequence[str], questions: Sequence[Question]) -> list[int]:
        """Tokens that each document may grow by, beside what it holds already.

        Raises InvalidArgument when the length does not hold even that.
        """
        least = self.outside(documents, questions)
        if least > self.length:
            raise InvalidArgument(
                f"length: expected at least {least} tokens for what is hidden, got {self.length}"
            )
        return self.shares(self.length - least)

    def shares(self, total: int) -> list[int]:
        """A whole number cut by the weights; what rounding leaves over belongs to nobody."""
        weights = self.weights or (1.0,) * self.documents
        # Multiplied first: equal weights then divide without rounding.
        return [int(total * weight / sum(weights)) for weight in weights]

    def cuts(self, total: int) -> list[int]:
        """Where a whole number is cut into one run a document: their ends."""
        reached = np.cumsum(self.weights or (1.0,) * self.documents)
        return [int(total * end / reached[-1]) for end in reached]


class Family(Protocol):
    """What is asked: a generator of problems for the space that a layout leaves.

    Besides the members of `Task` that say what the score is and where the text comes from.
    """

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        ...

    @property
    def score_name(self) -> str:
        """`recall` or `nll`, as of a `Task`."""
        ...

    @property
    def corpus(self) -> str | None:
        """Name or path of its text; None where it uses none."""
        ...

    @property
    def least_documents(self) -> int:
        """Documents below which the evidence is not split as the family promises."""
        ...

    @property
    def gap(self) -> str:
        """The fresh text between two documents, unless the layout has its own."""
        ...

    @property
    def asks(self) -> int:
        """How many questions a problem has, one after the other; 0 for none."""
        ...

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """The next problem of a generator.

        Raises InvalidArgument for a length that it cannot fill, or that does not hold it.
        """
        ...

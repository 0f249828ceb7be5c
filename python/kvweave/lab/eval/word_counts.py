"""`common-words`, `frequent-words`: the words that occur most often in all documents together.

RULER's aggregation tasks (Hsieh et al. 2024, CWE and FWE; SparseX, B.4 and B.5), sized for small
models: fewer words are asked for. Every document also has words that are as frequent in it as
those asked for and occur in no other one, so that no document alone tells them apart.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.problem import Document, Problem, Space
from kvweave.lab.eval.sample import check_asked
from kvweave.lab.eval.wording import Question

# fmt: off
_WORDS = (
    "apple", "arrow", "bench", "bird", "boat", "bone", "book", "bottle", "bread", "bridge", "brush",
    "bucket", "button", "camel", "castle", "chain", "chair", "cheese", "clock", "cloud", "coat",
    "corn", "crown", "desk", "door", "dress", "eagle", "farm", "fence", "field", "finger", "fish",
    "flag", "flower", "forest", "garden", "ghost", "glass", "glove", "goat", "grape", "hammer",
    "horse", "island", "jewel", "knife", "ladder", "lake", "leaf", "lemon", "lion", "market",
    "milk", "moon", "mountain", "mouse", "needle", "nest", "ocean", "onion", "paper", "pearl",
    "pencil", "piano", "planet", "plate", "queen", "rabbit", "river", "rope", "school", "sheep",
    "shirt", "shoe", "silver", "spoon", "stone", "sugar", "table", "tiger", "tower", "train",
    "tree", "valley", "wheel", "whale", "window", "winter", "wolf", "wool",
)
# fmt: on
_FILLERS = 24


@dataclass(frozen=True)
class WordCounts:
    """The `asked` most frequent words of numbered lists, or of coded text.

    A document is made of rounds, each in an order of its own: the words asked for (in lists once
    each; in coded text the first `asked` times as often as the last, as word frequencies fall),
    one word of the document's own as often as the rarest of them, and as many others. What is left
    behind the last whole round is others, too.
    """

    asked: int = 4
    coded: bool = False
    corpus: ClassVar[None] = None
    score_name: ClassVar[str] = "recall"
    gap: ClassVar[str] = "\n\n"
    asks: ClassVar[int] = 1
    least_documents: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_asked(self.asked, 10)

    @property
    def name(self) -> str:
        """`common-words` for lists, `frequent-words` for coded text."""
        return "frequent-words" if self.coded else "common-words"

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """Documents are filled to the word.

        Raises InvalidArgument for a length that is too short to make the words asked for the most
        frequent ones.
        """
        wanted = self.asked + _FILLERS + space.documents
        words = _coded_words(rng, wanted) if self.coded else _listed_words(rng, wanted)
        top, others = words[: self.asked], cycle(words[self.asked :][:_FILLERS])
        question = self._question(top)
        rooms = space.rooms(["."] * space.documents, [question])
        counts: Counter[str] = Counter()
        documents = []
        for own, room in zip(words[-space.documents :], rooms, strict=True):
            said = self._said(rng, space, room, self._round(top, own), others)
            counts.update(said)
            documents.append(Document(tuple(self._numbered(said))))
        most = {word for word, _ in counts.most_common(self.asked)}
        tied = counts.most_common(self.asked + 1)[self.asked - 1 :]
        if most != set(top) or tied[0][1] == tied[-1][1]:
            raise InvalidArgument(
                f"{self.name}: expected a length at which {self.asked} words are more frequent "
                f"than others in {space.documents} documents, got {space.length}"
            )
        return Problem(tuple(documents), (question,))

    def _round(self, top: Sequence[str], own: str) -> list[str]:
        """What a round has of the words asked for, and of the document's own word."""
        once = [own] * (2 if self.coded else 1)
        for rank, word in enumerate(top):
            once += [word] * (2 * (self.asked - rank) if self.coded else 1)
        return once

    def _said(
        self,
        rng: np.random.Generator,
        space: Space,
        room: int,
        once: Sequence[str],
        others: Iterator[str],
    ) -> list[str]:
        """The words of a document: whole rounds, and others up to the room."""
        said: list[str] = []
        while room >= 0:
            more = [str(w) for w in rng.permutation([*once, *islice(others, self.asked)])]
            cost = self._cost(space, said, more)
            if cost > room:
                break
            said, room = said + more, room - cost
        for other in others:
            room -= self._cost(space, said, [other])
            if room < 0 and said:
                return said
            said.append(other)
        return said

    def _cost(self, space: Space, said: Sequence[str], more: Sequence[str]) -> int:
        numbered = self._numbered([*said, *more])[len(said) :]
        return len(space.encode(" " + " ".join(numbered)))

    def _numbered(self, words: Sequence[str]) -> list[str]:
        """As they are written: with a number each, unless the text is coded."""
        if self.coded:
            return list(words)
        return [f"{number}. {word}" for number, word in enumerate(words, 1)]

    def _question(self, top: Sequence[str]) -> Question:
        if self.coded:
            return Question(
                f"What are the {self.asked} most frequently appearing words in the coded text "
                "above? Answer with the words only.",
                tuple(top),
                "Read the following coded text and track how often each coded word appears.",
            )
        return Question(
            f"What are the {self.asked} most common words in all the lists above together? "
            "Answer with the words only.",
            tuple(top),
            "Below are numbered lists of words. Some words appear more often than others. "
            "Memorise the ones that appear most often. For example, in the list `1. sand 2. rain "
            "3. sand` the most common word is sand.",
        )


def _listed_words(rng: np.random.Generator, count: int) -> list[str]:
    if count > len(_WORDS):
        raise InvalidArgument(
            f"common-words: expected {len(_WORDS) - _FILLERS} documents and words asked for or "
            f"fewer, got {count - _FILLERS}"
        )
    return [str(word) for word in rng.permutation(_WORDS)[:count]]


def _coded_words(rng: np.random.Generator, count: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(list(string.ascii_lowercase), 6))] = None
    return list(words)

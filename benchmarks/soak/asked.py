"""What a soak asks: requests of every kind over documents that come and go, as plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCABULARY = 512
EXACT = ("plain", "many", "stop", "full", "prefix", "choice")
"""Kinds whose KV is exact: what they are answered depends on nothing that went before."""
POLICIES = ("full", "prefix", "naive", "foresight", "sparsex")
WEIGHTS = {"plain": 4, "many": 1, "stop": 1, "full": 1, "prefix": 1}
WEIGHTS |= {"naive": 3, "foresight": 3, "sparsex": 2}
NAMESPACES = ("one", "other")
DOCUMENTS = 16
"""Documents of the knowledge base at a time."""
CHOICE = "choice"
"""A kind of prompts whose answers a grammar bounds, for who has grammars."""
LONG, LONG_TOKENS = "long", (1400, 1900)
"""A kind of prompts that are longer than some devices here, for who has room for them elsewhere."""
SHARED, TURNS, REMEMBERED = 4, 0.25, 32
"""Texts that prompts without marks begin with; the share of second turns, of so many first ones."""


@dataclass
class Asked:
    """A request. `documents`: numbers of those that are marked; `before`: the turn before it."""

    name: str
    kind: str
    tokens: list[int]
    answer: int
    marks: dict[str, Any] | None = None
    n: int = 1
    stop: list[str] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    before: str | None = None


def text(length: int, *seed: int) -> list[int]:
    """Random tokens, the same for the same seed."""
    return [int(t) for t in np.random.default_rng(seed).integers(1, VOCABULARY, length)]


@dataclass(frozen=True)
class Library:
    """Documents of so many tokens and up to `spread` more, of which a prompt marks some at most."""

    shortest: int = 40
    spread: int = 120
    marked: int = 3

    def document(self, number: int) -> tuple[str, str, list[int]]:
        """Namespace, name and tokens of a document: another text under each number."""
        length = self.shortest + number * 37 % self.spread
        return NAMESPACES[number % len(NAMESPACES)], f"document {number}", text(length, 7, number)


LIBRARY = Library()


def document(number: int) -> tuple[str, str, list[int]]:
    """A document of the library that there is unless another is named."""
    return LIBRARY.document(number)


class Author:
    """Draws requests by the weights of their kinds, about documents of a library.

    `there`: the numbers of those that are in the knowledge base.
    """

    def __init__(
        self, seed: int, library: Library = LIBRARY, weights: Mapping[str, int] = WEIGHTS
    ) -> None:
        self.numbers = np.random.default_rng(seed)
        self.library, self.weights = library, weights
        self.there: list[int] = []
        self.made = 0
        self._seed = seed
        self._first: deque[tuple[Asked, list[int]]] = deque(maxlen=REMEMBERED)

    def answered(self, asked: Asked, said: list[int]) -> None:
        """A request has its answer: a second turn may follow it."""
        if asked.before is None and asked.n == 1:
            self._first.append((asked, said))

    def request(self) -> Asked:
        """The next request: of a kind by weight, or a second turn."""
        self.made += 1
        known = [turn for turn in self._first if set(turn[0].documents) <= set(self.there)]
        if known and self.numbers.random() < TURNS:
            return self._second_turn(*known[int(self.numbers.integers(len(known)))])
        chances = np.array(list(self.weights.values())) / sum(self.weights.values())
        kind = str(self.numbers.choice(list(self.weights), p=chances))
        if kind in POLICIES and self.there:
            return self._marked(kind)
        return self._plain(kind if kind not in POLICIES else "plain")

    def _name(self) -> str:
        return f"r{self.made}"

    def _own(self, least: int, most: int) -> list[int]:
        """A text of this request's own."""
        length = int(self.numbers.integers(least, most))
        return text(length, self._seed, self.made, length, int(self.numbers.integers(1 << 30)))

    def _answer(self) -> int:
        return int(self.numbers.integers(4, 48))

    def _plain(self, kind: str) -> Asked:
        shared = int(self.numbers.integers(2 * SHARED))
        before = text(112, 3, shared) if shared < SHARED else []
        own = self._own(*LONG_TOKENS) if kind == LONG else self._own(8, 200)
        asked = Asked(self._name(), kind, before + own, self._answer())
        if kind == "many":
            asked.n = int(self.numbers.integers(2, 4))
        if kind == "stop":
            # Texts of tokens are `w` and a number: some end so.
            asked.stop, asked.answer = [f"{int(self.numbers.integers(10))} "], 48
        return asked

    def _marked(self, kind: str) -> Asked:
        """Some documents of a namespace, behind less than a block of other text."""
        space = int(self.numbers.integers(len(NAMESPACES)))
        known = [n for n in self.there if n % len(NAMESPACES) == space]
        if not known:
            return self._plain("plain")
        count = min(int(self.numbers.integers(1, self.library.marked + 1)), len(known))
        chosen = [int(n) for n in self.numbers.permutation(known)[:count]]
        tokens, spans = self._own(3, 15), []
        for number in chosen:
            own = self.library.document(number)[2]
            spans.append([len(tokens), len(tokens) + len(own)])
            tokens += own + self._own(4, 20)
        tokens += self._own(6, 40)
        # What an exact policy computes is kept too, and is not what a document alone computes.
        namespace = "exact" if kind in EXACT else NAMESPACES[space]
        marks = {"segments": spans, "namespace": namespace, "policy": kind}
        return Asked(self._name(), kind, tokens, self._answer(), marks, documents=chosen)

    def _second_turn(self, first: Asked, said: list[int]) -> Asked:
        """The prompt and the answer of an earlier turn, and another question."""
        asked = Asked(self._name(), first.kind, first.tokens + said, self._answer(), first.marks)
        asked.tokens = asked.tokens + self._own(6, 40)
        asked.documents, asked.before = first.documents, first.name
        asked.kind = first.kind if first.marks else "plain"
        return asked

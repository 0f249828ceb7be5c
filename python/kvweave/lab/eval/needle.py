"""`needle`, `needles`: one or four of eight numbers hidden in real text (SparseX, B.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvweave.lab.eval.corpus import DEFAULT_CORPUS
from kvweave.lab.eval.hidden_text import hide
from kvweave.lab.eval.problem import Problem, Space
from kvweave.lab.eval.sample import NAMES, check_asked, distinct_numbers, listed
from kvweave.lab.eval.wording import Question

INSTRUCTION = "Some special numbers are hidden in the following text. Memorise them."


@dataclass(frozen=True)
class Needle:
    """`asked` of `hidden` numbers, each tied to a city.

    A single hidden number does not tell policies apart, so the others stand beside it.
    """

    hidden: int = 8
    asked: int = 1
    corpus: str = DEFAULT_CORPUS
    score_name: ClassVar[str] = "recall"
    gap: ClassVar[str] = "\n\n"
    asks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_asked(self.hidden, len(NAMES))
        check_asked(self.asked, self.hidden)

    @property
    def name(self) -> str:
        """`needle` for one question, `needles` for several."""
        return "needle" if self.asked == 1 else "needles"

    @property
    def least_documents(self) -> int:
        """Two where several numbers are asked for."""
        return min(self.asked, 2)

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """The cities asked for are drawn from all, in random order."""
        cities, numbers = hidden_numbers(rng, self.hidden)
        chosen = [int(i) for i in rng.permutation(self.hidden)[: self.asked]]
        while len({i % space.documents for i in chosen}) < self.least_documents:
            chosen = [int(i) for i in rng.permutation(self.hidden)[: self.asked]]
        question = asked_for([cities[i] for i in chosen], [numbers[i] for i in chosen])
        lines = needle_lines(cities, numbers)
        return Problem(hide(space, rng, self.corpus, space.spread(lines), [question]), (question,))


def hidden_numbers(rng: np.random.Generator, count: int) -> tuple[list[str], list[str]]:
    """Cities and their numbers."""
    cities = [str(city) for city in rng.permutation(NAMES)[:count]]
    return cities, distinct_numbers(rng, count)


def needle_lines(cities: list[str], numbers: list[str]) -> list[str]:
    """The sentences to hide."""
    return [
        f"The special number for {city} is {number}."
        for city, number in zip(cities, numbers, strict=True)
    ]


def asked_for(cities: list[str], numbers: list[str], continues: bool = False) -> Question:
    """The question for the numbers of these cities."""
    is_or_are = "is the special number" if len(cities) == 1 else "are the special numbers"
    return Question(
        f"What {is_or_are} for {listed(cities)} mentioned in the text? "
        "Answer with each city and its number only.",
        tuple(numbers),
        INSTRUCTION,
        continues=continues,
    )

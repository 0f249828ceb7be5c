"""`two-hop`: a fact in one document names whom a fact in another document is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvweave.lab.eval.corpus import DEFAULT_CORPUS
from kvweave.lab.eval.hidden_text import hide
from kvweave.lab.eval.problem import Problem, Space
from kvweave.lab.eval.sample import NAMES, check_asked, distinct_numbers
from kvweave.lab.eval.wording import Question

# fmt: off
_FIRST = (
    "Agnes", "Bruno", "Clara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ingrid", "Jonas",
    "Kemal", "Lucia",
)
_LAST = (
    "Albrecht", "Bianchi", "Castro", "Dvorak", "Eriksen", "Fontaine", "Gruber", "Haddad",
    "Ivanov", "Jansen", "Kowalski", "Lindqvist",
)
# fmt: on


@dataclass(frozen=True)
class TwoHop:
    """`pairs` keepers of lighthouses, each with a badge number; one lighthouse is asked for.

    The two facts about a keeper stand in different documents, and only the keeper's name joins
    them: neither document answers the question.
    """

    pairs: int = 4
    corpus: str = DEFAULT_CORPUS
    name: ClassVar[str] = "two-hop"
    score_name: ClassVar[str] = "recall"
    gap: ClassVar[str] = "\n\n"
    asks: ClassVar[int] = 1
    least_documents: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_asked(self.pairs, len(_FIRST))

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """The first pair is the one asked for; facts go round the documents."""
        cities = [str(city) for city in rng.permutation(NAMES)[: self.pairs]]
        keepers = [
            f"{first} {last}"
            for first, last in zip(rng.permutation(_FIRST), rng.permutation(_LAST), strict=True)
        ][: self.pairs]
        numbers = distinct_numbers(rng, self.pairs)
        facts = []
        for city, keeper, number in zip(cities, keepers, numbers, strict=True):
            facts.append(f"The keeper of the lighthouse in {city} is {keeper}.")
            facts.append(f"The badge number of {keeper} is {number}.")
        question = Question(
            f"What is the badge number of the keeper of the lighthouse in {cities[0]}? "
            "Answer with the keeper's name and the number only.",
            (numbers[0],),
            "The following text tells who keeps which lighthouse, and who has which badge number.",
        )
        hidden = space.spread(facts)
        return Problem(hide(space, rng, self.corpus, hidden, [question]), (question,))

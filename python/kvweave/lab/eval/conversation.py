"""`chat`: several questions in a row over the same documents, with the answers between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvweave.lab.eval.corpus import DEFAULT_CORPUS
from kvweave.lab.eval.hidden_text import hide
from kvweave.lab.eval.needle import INSTRUCTION, asked_for, hidden_numbers, needle_lines
from kvweave.lab.eval.problem import Problem, Space
from kvweave.lab.eval.sample import check_asked
from kvweave.lab.eval.wording import Question

_HIDDEN = 8
_EACH = 2


@dataclass(frozen=True)
class Conversation:
    """Each of `questions` asks for two other numbers; a last one goes back to the first of all.

    History between questions is what was answered. The last question can be answered from it.
    """

    questions: int = 3
    corpus: str = DEFAULT_CORPUS
    name: ClassVar[str] = "chat"
    score_name: ClassVar[str] = "recall"
    gap: ClassVar[str] = "\n\n"
    least_documents: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_asked(self.questions, _HIDDEN // _EACH)

    @property
    def asks(self) -> int:
        """The questions, and the one that goes back."""
        return self.questions + 1

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """Cities of one question stand in different documents."""
        cities, numbers = hidden_numbers(rng, _HIDDEN)
        asked = [
            asked_for(cities[at : at + _EACH], numbers[at : at + _EACH], continues=at > 0)
            for at in range(0, self.questions * _EACH, _EACH)
        ]
        back = Question(
            f"You were asked about {cities[0]} at the beginning. What is its special number, "
            f"and what is that of {cities[1]}? Answer with each city and its number only.",
            (numbers[0], numbers[1]),
            INSTRUCTION,
            continues=True,
        )
        questions = (*asked, back)
        hidden = space.spread(needle_lines(cities, numbers))
        return Problem(hide(space, rng, self.corpus, hidden, questions), questions)

"""`agents`, `debate`: agents with own system prompts share documents and read each other.

As in SparseX, B.6 (AutoGen: an analyst evaluates what other agents said) and B.7 (multi-agent
debate: a moderator hears two sides): what an agent said is a reused segment of the prompts of the
agents after it, and the text around it is fresh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvweave.lab.eval.corpus import DEFAULT_CORPUS
from kvweave.lab.eval.hidden_text import hide
from kvweave.lab.eval.needle import INSTRUCTION, hidden_numbers, needle_lines
from kvweave.lab.eval.problem import Problem, Space
from kvweave.lab.eval.sample import listed
from kvweave.lab.eval.wording import Question

_HIDDEN = 8
_ROLES = (
    "You are an archivist. You look up facts in documents and quote them exactly.",
    "You are an auditor. You check what others report and add what they left out.",
    "You are a librarian. You read patiently and report numbers without mistakes.",
)
_ANALYST = (
    "You are a mathematical analyst. You evaluate the answers of several agents against the "
    "documents and give the final answer."
)
_MODERATOR = (
    "You are the moderator of a debate. You evaluate both sides against the documents and decide."
)


@dataclass(frozen=True)
class Agents:
    """Three agents look numbers up, one after the other; an analyst compares them all.

    Each agent sees the documents and what the agents before it said.
    """

    corpus: str = DEFAULT_CORPUS
    name: ClassVar[str] = "agents"
    score_name: ClassVar[str] = "recall"
    gap: ClassVar[str] = "\n\n"
    asks: ClassVar[int] = len(_ROLES) + 1
    least_documents: ClassVar[int] = 2

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """The i-th agent is asked for the i-th city; the analyst for the largest of them."""
        cities, numbers = hidden_numbers(rng, _HIDDEN)
        asked = []
        for index, role in enumerate(_ROLES):
            text = (
                f"What is the special number for {cities[index]} mentioned in the text? "
                "Answer in one full sentence."
            )
            heard = tuple((f"Agent {i + 1} said:", i) for i in range(index))
            asked.append(Question(text, (numbers[index],), INSTRUCTION, role, heard))
        final = Question(
            f"Evaluate what the agents said about {listed(cities[: len(_ROLES)])}. Which of these "
            "cities has the largest special number in the text? Answer with the city and its "
            "number only.",
            (max(numbers[: len(_ROLES)]),),
            INSTRUCTION,
            _ANALYST,
            tuple((f"Agent {i + 1} said:", i) for i in range(len(_ROLES))),
        )
        questions = (*asked, final)
        hidden = space.spread(needle_lines(cities, numbers))
        return Problem(hide(space, rng, self.corpus, hidden, questions), questions)


@dataclass(frozen=True)
class Debate:
    """Two debaters argue for two cities; a moderator hears both and decides by the documents."""

    corpus: str = DEFAULT_CORPUS
    name: ClassVar[str] = "debate"
    score_name: ClassVar[str] = "recall"
    gap: ClassVar[str] = "\n\n"
    asks: ClassVar[int] = 3
    least_documents: ClassVar[int] = 2

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """The two cities' numbers stand in different documents."""
        cities, numbers = hidden_numbers(rng, _HIDDEN)
        one, other = cities[:2]
        topic = f"The special number for {one} is larger than the one for {other}."
        sides = (("affirmative", "true", one), ("negative", "false", other))
        debaters = tuple(
            Question(
                f"The topic of the debate: {topic}\nArgue in two sentences that this is {claim}, "
                f"and quote the special number for {city} from the text.",
                (numbers[side],),
                INSTRUCTION,
                f"You are the {name} side of a debate. You argue from the documents alone.",
                (("The affirmative side said:", 0),) if side else (),
            )
            for side, (name, claim, city) in enumerate(sides)
        )
        moderator = Question(
            f"The topic of the debate: {topic}\nEvaluate both sides. Which city has the larger "
            "special number in the text? Answer with the city and its number only.",
            (max(numbers[:2]),),
            INSTRUCTION,
            _MODERATOR,
            (("The affirmative side said:", 0), ("The negative side said:", 1)),
        )
        questions = (*debaters, moderator)
        hidden = space.spread(needle_lines(cities, numbers))
        return Problem(hide(space, rng, self.corpus, hidden, questions), questions)

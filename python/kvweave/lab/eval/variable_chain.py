"""`chain`: assignments that lead from document to document (SparseX, B.3)."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvweave.lab.eval.corpus import DEFAULT_CORPUS
from kvweave.lab.eval.hidden_text import hide
from kvweave.lab.eval.problem import Problem, Space
from kvweave.lab.eval.sample import check_asked, distinct_numbers
from kvweave.lab.eval.wording import Question


@dataclass(frozen=True)
class VariableChain:
    """`chains` values, each assigned through `links` variables; one chain is asked for.

    The answer is generated: forced tokens would exaggerate how far a policy is off, since a
    policy often answers rightly in another format.
    """

    chains: int = 2
    links: int = 4
    corpus: str = DEFAULT_CORPUS
    name: ClassVar[str] = "chain"
    score_name: ClassVar[str] = "recall"
    gap: ClassVar[str] = "\n\n"
    asks: ClassVar[int] = 1
    least_documents: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_asked(self.chains, 8)
        check_asked(self.links, 8)

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """The links of a chain go round the documents."""
        names = _variables(rng, self.chains * self.links)
        values = distinct_numbers(rng, self.chains)
        assignments = []
        for chain, value in enumerate(values):
            source = value
            for name in names[chain * self.links : (chain + 1) * self.links]:
                assignments.append(f"VAR {name} = {source}.")
                source = f"VAR {name}"
        question = Question(
            f"Which variables are assigned the value {values[0]} in the text, directly or through "
            "another variable? Answer with the names of the variables only.",
            tuple(names[: self.links]),
            "Memorise and track the variable assignments hidden in the following text.",
        )
        hidden = space.spread(assignments)
        return Problem(hide(space, rng, self.corpus, hidden, [question]), (question,))


def _variables(rng: np.random.Generator, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice(list(string.ascii_uppercase), 5))] = None
    return list(names)

"""`LaidOut`: a family of questions under a layout at a length, as a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.layout import Body, Plain
from kvweave.lab.eval.problem import Family, Problem, Space
from kvweave.lab.eval.sample import Sample
from kvweave.lab.eval.wording import chat_prompt, turn_of


@dataclass(frozen=True)
class LaidOut:
    """Samples of a family: what is asked comes from it, how it stands from the layout.

    Raises InvalidArgument for a layout that the family cannot be asked in.
    """

    family: Family
    layout: Plain
    length: int

    def __post_init__(self) -> None:
        least = self.family.least_documents
        if self.layout.documents < least:
            raise InvalidArgument(
                f"{self.name}: expected {least} documents or more, got {self.layout.documents}"
            )
        if self.layout.question_first and self.family.asks != 1:
            raise InvalidArgument(
                f"{self.layout.name}: expected a family that asks one question, "
                f"got {self.name}, which asks {self.family.asks or 'none'}"
            )

    @property
    def name(self) -> str:
        """The family's."""
        return self.family.name

    @property
    def score_name(self) -> str:
        """The family's."""
        return self.family.score_name

    @property
    def corpus(self) -> str | None:
        """The family's."""
        return self.family.corpus

    def sample(self, tokenizer: Any, rng: np.random.Generator) -> Sample:
        """The next sample of a generator.

        Raises InvalidArgument for a length that the family cannot fill, that does not hold what is
        asked, or that leaves a document shorter than the layout can stand.
        """
        space = self.layout.space(tokenizer, self.length, rng, self.family.gap)
        problem = self.family.problem(space, rng)
        self._check(problem, space)
        body = self.layout.lay(problem.documents, space, rng)
        return self._asked(problem, body, tokenizer)

    def _check(self, problem: Problem, space: Space) -> None:
        shortest = min(len(document.ids(space.encode)) for document in problem.documents)
        if shortest < self.layout.least_tokens:
            raise InvalidArgument(
                f"length: expected more than {self.length} tokens for {self.layout.documents} "
                f"documents under {self.layout.name}, whose shortest would have {shortest} tokens "
                f"where {self.layout.least_tokens} are needed"
            )

    def _asked(self, problem: Problem, body: Body, tokenizer: Any) -> Sample:
        if not problem.questions:
            scored = len(tokenizer(problem.continuation, add_special_tokens=False).input_ids)
            parts = (*body.parts, problem.continuation)
            return Sample(parts, (), scored, body.encoded, body.discover)
        first, *later = problem.questions
        return Sample(
            chat_prompt(tokenizer, first, body.parts, self.layout.question_first),
            first.answers,
            encoded=body.encoded,
            discover=body.discover,
            turns=tuple(
                turn_of(tokenizer, question, number, body.parts)
                for number, question in enumerate(later, 1)
            ),
        )

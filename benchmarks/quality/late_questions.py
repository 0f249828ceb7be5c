"""Questions of tasks that come behind many generated tokens, as a second turn of a chat.

A short answer right behind its prompt says little of pages that are chosen while an answer grows:
it is read off the first ranking. Here a model is first asked to say at length what the text is
about, and only then what the task asks: pages with the answer are far from the newest by then, and
were of no use to the tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from kvweave.lab.eval import draw
from kvweave.lab.eval.laid_out import LaidOut
from kvweave.lab.eval.problem import Family, Problem, Space
from kvweave.lab.eval.sample import Sample, task_encoder
from kvweave.lab.eval.wording import Question
from kvweave.runner import Segment

OPENING = "Tell me at length what all of this is about, one paragraph after the other."


@dataclass(frozen=True)
class Late:
    """A family whose question is the second one: the first has no right answer."""

    family: Family
    asks: ClassVar[int] = 2

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

    @property
    def least_documents(self) -> int:
        """The family's."""
        return self.family.least_documents

    @property
    def gap(self) -> str:
        """The family's."""
        return self.family.gap

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """The family's next problem, its question asked behind another."""
        problem = self.family.problem(space, rng)
        (asked,) = problem.questions
        first = Question(OPENING, (), asked.instruction, asked.system)
        return replace(problem, questions=(first, replace(asked, continues=True)))


@dataclass(frozen=True)
class LateQuestion:
    """Token ids of a prompt, and of the question behind what is said to it; its right answers."""

    prompt: tuple[int, ...]
    question: tuple[int, ...]
    answers: Sample

    def recall(self, text: str) -> float:
        """The share of the right answers that stand in a text."""
        return self.answers.recall(text)


def late_questions(task: LaidOut, tokenizer: Any, count: int, seed: int) -> list[LateQuestion]:
    """So many samples of a task that asks one question, which then comes late.

    The i-th depends on the seed and i alone. Errors as `LaidOut.sample`.
    """
    encode = task_encoder(tokenizer)

    def ids(parts: Sequence[Any]) -> tuple[int, ...]:
        found: list[int] = []
        for part in parts:
            if isinstance(part, Segment):
                found += part.tokens or encode(part.text or "")
            elif isinstance(part, str):
                found += encode(part)
        return tuple(found)

    late = replace(task, family=Late(task.family))
    return [
        LateQuestion(
            ids(sample.parts), ids(sample.turns[0].parts), replace(sample, answers=answers)
        )
        for sample in draw(late, tokenizer, count, seed)
        for answers in [sample.turns[0].answers]
    ]

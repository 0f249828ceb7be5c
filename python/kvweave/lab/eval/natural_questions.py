"""`natural`, `natural-pair`: questions that people asked, over paragraphs for other questions.

Rows come from a file of the user's: JSON Lines in the form in which NQ-open was given out with
retrieved contexts (Kwiatkowski et al. 2019; Liu et al. 2024, *Lost in the Middle*).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.hidden_text import cut_short
from kvweave.lab.eval.problem import Document, Problem, Space
from kvweave.lab.eval.sample import AnyOf, check_asked, plain_words
from kvweave.lab.eval.wording import Question

_Field = TypeVar("_Field")

_INSTRUCTION = (
    "Below are paragraphs from an encyclopedia. Only some of them help to answer the question at "
    "the end."
)


@dataclass(frozen=True)
class NaturalQuestion:
    """A question, the wordings of its answer, and the paragraph that has it.

    `plain`: the paragraph's words, as answers are compared.
    """

    text: str
    answer: AnyOf
    paragraph: str
    plain: str

    @property
    def answerable(self) -> bool:
        """Whether the paragraph has the answer, and the question does not give it away."""
        return self.answer.among(self.plain) and not self.answer.stands_in(self.text)


@dataclass(frozen=True)
class NaturalQuestions:
    """`asked` questions at once, each answered by one paragraph in another document.

    Documents are paragraphs of other questions, none of which has one of the answers. An answer
    is right when one of its wordings stands in the generated text. `corpus`: the path of the file.
    """

    corpus: str
    asked: int = 1
    score_name: ClassVar[str] = "recall"
    gap: ClassVar[str] = "\n\n"
    asks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_asked(self.asked, 2)

    @property
    def name(self) -> str:
        """`natural` for one question, `natural-pair` for two."""
        return "natural" if self.asked == 1 else "natural-pair"

    @property
    def least_documents(self) -> int:
        """One for each question."""
        return self.asked

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """Paragraphs are whole but for the last one before a document's room ends.

        Raises InvalidArgument for a length that the file's paragraphs do not fill, or that does
        not hold those with the answers.
        """
        rows = natural_questions(self.corpus)
        order = [rows[i] for i in rng.permutation(len(rows))]
        chosen = self._chosen(order)
        question = _question(chosen)
        hidden = space.spread([row.paragraph for row in chosen])
        rooms = space.rooms(["\n\n".join(own) or "." for own in hidden], [question])
        others = (
            row.paragraph for row in order if not any(c.answer.among(row.plain) for c in chosen)
        )
        documents = []
        for own, room in zip(hidden, rooms, strict=True):
            paragraphs = list(self._filled(others, space, room))
            for paragraph in own:
                paragraphs.insert(int(rng.integers(len(paragraphs) + 1)), paragraph)
            documents.append(Document(tuple(paragraphs), "\n\n"))
        return Problem(tuple(documents), (question,))

    def _chosen(self, order: Sequence[NaturalQuestion]) -> list[NaturalQuestion]:
        """The first questions that can be asked, none answered by another's paragraph."""
        chosen: list[NaturalQuestion] = []
        for row in order:
            apart = (
                not row.answer.among(c.plain) and not c.answer.among(row.plain) for c in chosen
            )
            if row.answerable and all(apart):
                chosen.append(row)
            if len(chosen) == self.asked:
                return chosen
        raise InvalidArgument(
            f"{self.corpus}: expected {self.asked} rows whose paragraph has the answer and whose "
            f"question has not, got {len(chosen)} of {len(order)}"
        )

    def _filled(self, others: Iterator[str], space: Space, room: int) -> Iterator[str]:
        whole = True
        while whole and room > 0:
            paragraph = next(others, None)
            if paragraph is None:
                raise InvalidArgument(
                    f"{self.name}: expected a length that the paragraphs of {self.corpus} fill, "
                    f"got {space.length}"
                )
            text = cut_short(paragraph, space.encode, room)
            whole = text == paragraph
            room -= len(space.encode("\n\n" + text))
            if text:
                yield text


@lru_cache(maxsize=4)
def natural_questions(path: str) -> tuple[NaturalQuestion, ...]:
    """The rows of a file: `question`, `answers`, and `ctxs` of which one has `isgold`.

    A context is `{"title": …, "text": …, "isgold": …}`; other fields are passed over.

    Raises InvalidArgument naming file and line for what is no such row, or a file without rows.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: expected a JSON Lines file, got {error}") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InvalidArgument(f"{path}: expected rows with questions, got none")
    return tuple(rows)


def _row(path: str, number: int, line: str) -> NaturalQuestion:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{path}, line {number}: expected JSON, got {error}") from error
    question = _of(path, number, row, "question", str)
    answers = _of(path, number, row, "answers", list)
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise _unexpected(path, number, "answers: a list of one string or more", answers)
    for context in _of(path, number, row, "ctxs", list):
        if _of(path, number, context, "isgold", bool):
            title = _of(path, number, context, "title", str)
            paragraph = f"{title}\n{_of(path, number, context, 'text', str)}"
            plain = plain_words(paragraph)
            return NaturalQuestion(question, AnyOf(tuple(answers)), paragraph, plain)
    raise _unexpected(path, number, "a context with isgold", row["ctxs"])


def _of(path: str, number: int, row: Any, field: str, kind: type[_Field]) -> _Field:
    """A field of a row, of one type."""
    value = row.get(field) if isinstance(row, dict) else row
    if not isinstance(row, dict) or not isinstance(value, kind):
        held = sorted(row) if isinstance(row, dict) and field not in row else value
        raise _unexpected(path, number, f"{field}: a {kind.__name__}", held)
    return value


def _unexpected(path: str, number: int, expected: str, got: object) -> InvalidArgument:
    shown = f"{got!r}"
    shown = shown if len(shown) <= 80 else shown[:80] + "…"
    return InvalidArgument(f"{path}, line {number}: expected {expected}, got {shown}")


def _question(chosen: Sequence[NaturalQuestion]) -> Question:
    answers = tuple(row.answer for row in chosen)
    asked = [row.text.strip().rstrip("?") + "?" for row in chosen]
    if len(asked) == 1:
        text = f"Question: {asked[0]}\nAnswer in a few words."
    else:
        numbered = "\n".join(f"Question {i}: {text}" for i, text in enumerate(asked, 1))
        text = f"{numbered}\nAnswer each question in a few words."
    return Question(text, answers, _INSTRUCTION)

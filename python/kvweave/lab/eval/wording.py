"""Questions in chat prompts: of one user, of a conversation, of agents that read each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import Encode
from kvweave.lab.eval.sample import Answer, Said, Turn
from kvweave.runner import Part, Segment, chat_parts


@dataclass(frozen=True)
class Question:
    """One question, its right answers, and who is asked.

    `instruction`: what stands before the documents. `system`: the system prompt; None for the chat
    template's own. `hears`: (heading, turn) of earlier answers that are shown between documents
    and question, each a reused segment. `continues`: it is asked behind the answer before it, in
    the same conversation, and the documents are not shown again.
    """

    text: str
    answers: tuple[Answer, ...]
    instruction: str = ""
    system: str | None = None
    hears: tuple[tuple[str, int], ...] = ()
    continues: bool = False


def chat_prompt(
    tokenizer: Any, question: Question, body: Sequence[Part], question_first: bool = False
) -> tuple[Part, ...]:
    """The chat prompt [instruction, documents, messages, question], without what was said.

    With `question_first` it ends in the last document, which then has the chat template's closing
    text as its own last tokens.
    """
    if question_first:
        opening = f"{question.instruction} {question.text}\n\n"
        *before, last, closing = chat_parts(tokenizer, [opening, *body], question.system)
        ids = (*_ids(tokenizer, last), *_ids(tokenizer, closing))
        return (*before, Segment(tokens=ids))
    whole: list[Part] = [question.instruction + "\n\n", *body, "\n\n" + question.text]
    return tuple(chat_parts(tokenizer, whole, question.system))


def turn_of(tokenizer: Any, question: Question, number: int, body: Sequence[Part]) -> Turn:
    """The question as turn `number` (1 or more) of a sample."""
    if question.continues:
        closing, opening = turn_borders(tokenizer)
        return Turn((Said(number - 1), closing + question.text + opening), question.answers)
    *before, asked, end = chat_prompt(tokenizer, question, body)
    heard: list[Part | Said] = []
    for heading, turn in question.hears:
        heard += [f"\n\n{heading}\n", Said(turn, reused=True)]
    return Turn((*before, *heard, asked, end), question.answers, continues=False)


def turn_borders(tokenizer: Any) -> tuple[str, str]:
    """The chat template's text between an answer and the next question, and behind that one.

    Raises InvalidArgument when the template has no such text: when it alters messages, or writes
    a first question otherwise than a later one.
    """
    marks = [f"\x1e<kvweave-turn-{i}>\x1e" for i in range(3)]
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": mark} for r, mark in zip(roles, marks, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if any(text.count(mark) != 1 for mark in marks):
        raise InvalidArgument(
            "chat template: expected three messages once each and unchanged, got "
            + ", ".join(str(text.count(mark)) for mark in marks)
        )
    answered, rest = text.split(marks[0])[1].split(marks[1])
    closing, opening = rest.split(marks[2])
    if answered != opening:
        raise InvalidArgument(
            "chat template: expected the same text behind a first and a later question, "
            f"got {answered!r} and {opening!r}"
        )
    return closing, opening


def prompt_tokens(encode: Encode, parts: Sequence[Part | Said]) -> int:
    """Tokens of a prompt, each part encoded alone; nothing for what is yet to be said."""
    return sum(
        len(encode(part)) if isinstance(part, str) else _segment_tokens(encode, part)
        for part in parts
        if not isinstance(part, Said)
    )


def _segment_tokens(encode: Encode, segment: Segment) -> int:
    return len(encode(segment.text or "") if segment.tokens is None else segment.tokens)


def _ids(tokenizer: Any, part: Part) -> tuple[int, ...]:
    if isinstance(part, Segment) and part.tokens is not None:
        return tuple(part.tokens)
    text = part if isinstance(part, str) else part.text or ""
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)

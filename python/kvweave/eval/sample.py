"""What an evaluation task hands out: prompts with their answers, made from a seed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.eval.corpus import Encode, corpus_of
from kvweave.runner import Part, Segment, chat_parts

SEGMENTS = 4
"""Segments a prompt is cut into; each is encoded apart (SparseX, appendix B.2, B.3)."""

_PASSED_OVER = 24

# fmt: off
NAMES = (
    "Aleppo", "Bergen", "Cusco", "Dakar", "Esbjerg", "Fukuoka", "Ghent", "Hobart", "Izmir",
    "Jaipur", "Kazan", "Lagos", "Madrid", "Nairobi", "Odessa", "Porto", "Quito", "Rouen",
    "Sapporo", "Tampere", "Utrecht", "Varna", "Windhoek", "Yangon",
)
# fmt: on


@dataclass(frozen=True)
class Sample:
    """One prompt to measure.

    `parts`: fresh text and segments, as `Runner.prefill` takes them. `answers`: the strings that
    a right answer contains. Without answers nothing is generated: the last `scored_tokens`
    tokens of the prompt, real text, are scored as they stand.
    """

    parts: tuple[Part, ...]
    answers: tuple[str, ...] = ()
    scored_tokens: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The reusable parts, in prompt order."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    def recall(self, answer: str) -> float:
        """The share of the expected answers that stand in the generated text as whole words."""
        found = [re.search(rf"(?<!\w){re.escape(a)}(?!\w)", answer) for a in self.answers]
        return sum(match is not None for match in found) / len(found)


class Task(Protocol):
    """A generator of samples: the same seed and tokenizer give the same samples."""

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        ...

    @property
    def length(self) -> int:
        """Prompt length in tokens that samples come near to, never above by more than a line."""
        ...

    @property
    def score_name(self) -> str:
        """What the score means: `recall` (higher is better) or `nll` (lower is better)."""
        ...

    @property
    def corpus(self) -> str | None:
        """Name or path of the text that samples are made of; None for a task without text."""
        ...

    def sample(self, tokenizer: Any, rng: np.random.Generator) -> Sample:
        """The next sample of a generator."""
        ...


def task_encoder(tokenizer: Any) -> Encode:
    """Text to ids without special tokens."""
    return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)


def ask(tokenizer: Any, instruction: str, texts: Sequence[str], question: str) -> tuple[Part, ...]:
    """The chat prompt [instruction, segment, gap, segment, …, question] as parts."""
    parts: list[Part] = [instruction + "\n\n"]
    for index, text in enumerate(texts):
        parts += ["\n\n", Segment(text=text)] if index else [Segment(text=text)]
    return tuple(chat_parts(tokenizer, [*parts, "\n\n" + question]))


def hide(
    tokenizer: Any,
    rng: np.random.Generator,
    corpus: str,
    length: int,
    hidden: Sequence[Sequence[str]],
    instruction: str,
    question: str,
) -> tuple[Part, ...]:
    """A chat prompt of `length` tokens with sentences hidden in the text of a corpus.

    `hidden[i]` are the sentences of segment i; they stand at random sentence borders of it.

    Raises InvalidArgument when the length does not hold even the hidden sentences.
    """
    encode = task_encoder(tokenizer)
    bare = ask(tokenizer, instruction, [" ".join(lines) or "." for lines in hidden], question)
    room = (length - prompt_tokens(encode, bare)) // len(hidden)
    if room < 0:
        raise InvalidArgument(
            f"length: expected at least {prompt_tokens(encode, bare)} tokens for what is hidden, "
            f"got {length}"
        )
    source = corpus_of(corpus).sentences(rng)
    texts = []
    for lines in hidden:
        noise = list(_fill(source, encode, room))
        for line in lines:
            noise.insert(int(rng.integers(len(noise) + 1)), line)
        texts.append(" ".join(noise))
    return ask(tokenizer, instruction, texts, question)


def _fill(source: Iterator[str], encode: Encode, room: int) -> Iterator[str]:
    """Sentences that fit the room together; a few too long ones are passed over for a fit."""
    passed = 0
    while passed < _PASSED_OVER:
        sentence = next(source)
        cost = len(encode(" " + sentence))
        if cost > room:
            passed += 1
        else:
            room -= cost
            yield sentence


def prompt_tokens(encode: Encode, parts: Sequence[Part]) -> int:
    """Tokens of a prompt, each part encoded alone."""
    texts = [part.text or "" if isinstance(part, Segment) else part for part in parts]
    return sum(len(encode(text)) for text in texts)


def distinct_numbers(rng: np.random.Generator, count: int) -> list[str]:
    """Different five-digit numbers."""
    return [str(n) for n in 10_000 + rng.permutation(90_000)[:count]]


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def check_asked(asked: int, of: int) -> None:
    """Raises InvalidArgument unless 1 <= asked <= of."""
    if not 1 <= asked <= of:
        raise InvalidArgument(f"asked: expected 1..{of}, got {asked}")

"""What an evaluation task hands out: prompts with their answers, made from a seed."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import Encode
from kvweave.runner import Part, Segment

# fmt: off
NAMES = (
    "Aleppo", "Bergen", "Cusco", "Dakar", "Esbjerg", "Fukuoka", "Ghent", "Hobart", "Izmir",
    "Jaipur", "Kazan", "Lagos", "Madrid", "Nairobi", "Odessa", "Porto", "Quito", "Rouen",
    "Sapporo", "Tampere", "Utrecht", "Varna", "Windhoek", "Yangon",
)
# fmt: on


@dataclass(frozen=True)
class AnyOf:
    """One answer that may be worded in several ways; case, articles and punctuation are free.

    The normalisation is the usual one of open-domain question answering (SQuAD, Rajpurkar et al.
    2016), and an answer counts where it stands anywhere in the generated text, as whole words.
    """

    accepted: tuple[str, ...]

    def stands_in(self, text: str) -> bool:
        """Whether one of the wordings is in the text."""
        return self.among(plain_words(text))

    def among(self, plain: str) -> bool:
        """The same for a text that `plain_words` has been through."""
        wordings = (plain_words(wording) for wording in self.accepted)
        return any(wording and f" {wording} " in f" {plain} " for wording in wordings)


Answer = str | AnyOf
"""A string that a right answer contains as whole words, letter by letter, or one of several."""


@dataclass(frozen=True)
class Said:
    """Stands in a turn's parts for what was answered before; see `Sample.at_turn`.

    `turn`: whose answer (0 is the sample's own question). `reused`: the answer is a segment that
    is encoded alone; otherwise it is fresh text.
    """

    turn: int
    reused: bool = False


@dataclass(frozen=True)
class Turn:
    """A further question of a sample, with its right answers.

    `continues`: the parts follow the prompt of the turn before; otherwise they are a whole prompt
    of their own, of an agent who has another system prompt.
    """

    parts: tuple[Part | Said, ...]
    answers: tuple[Answer, ...]
    continues: bool = True

    def spoken_parts(self, said: Sequence[str]) -> tuple[Part, ...]:
        """Its parts, given what was said in the turns before it; an empty answer leaves none.

        They are what `Runner.conversation` takes as its next turn, where it continues.
        """
        made = (_spoken(part, said) if isinstance(part, Said) else part for part in self.parts)
        return tuple(part for part in made if part is not None)


@dataclass(frozen=True)
class Sample:
    """One prompt to measure, and what is in the knowledge base before it comes.

    `parts`: fresh text and segments, as `Runner.prefill` takes them. `answers`: what a right
    answer contains. Without answers nothing is generated: the last `scored_tokens` tokens of the
    prompt, real text, are scored as they stand.

    `encoded`: what is encoded first, each alone, in this order; empty where that is the parts' own
    segments. `discover`: reused text is not marked in the parts and has to be found by its content.

    `turns`: questions that come after the first one. Turn t (0 is the first question) is measured
    as the sample `at_turn(t, said)`, where `said[i]` is the text that `full` generated in turn i,
    without its stop token. So all policies answer the same prompt in every turn.
    """

    parts: tuple[Part, ...]
    answers: tuple[Answer, ...] = ()
    scored_tokens: int = 0
    encoded: tuple[Segment, ...] = ()
    discover: bool = False
    turns: tuple[Turn, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The reusable parts, in prompt order."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    @property
    def knowledge(self) -> tuple[Segment, ...]:
        """What is encoded before the prompt comes, each once."""
        return tuple(dict.fromkeys(self.encoded or self.segments))

    def recall(self, answer: str) -> float:
        """The share of the expected answers that stand in the generated text as whole words."""
        found = [_stands(expected, answer) for expected in self.answers]
        return sum(found) / len(found)

    def at_turn(self, turn: int, said: Sequence[str]) -> Sample:
        """Turn `turn` as a sample of one question, given what was said in the turns before it.

        Its parts are the whole prompt. Answers that are reused join what is encoded. An empty
        answer leaves no part.

        Raises InvalidArgument for a turn that there is none of, or fewer answers than turns.
        """
        if not 0 <= turn <= len(self.turns):
            raise InvalidArgument(f"turn: expected 0..{len(self.turns)}, got {turn}")
        if len(said) < turn:
            raise InvalidArgument(f"turn {turn}: expected {turn} earlier answers, got {len(said)}")
        parts, answers, heard = self.parts, self.answers, list[Segment]()
        for this in self.turns[:turn]:
            if not this.continues:
                parts, heard = (), []
            answered = (_spoken(part, said) for part in this.parts if isinstance(part, Said))
            heard += [made for made in answered if isinstance(made, Segment)]
            parts += this.spoken_parts(said)
            answers = this.answers
        encoded = (*self.encoded, *heard) if self.encoded else ()
        return Sample(parts, answers, self.scored_tokens, encoded, self.discover)


class Task(Protocol):
    """A generator of samples: the same seed and tokenizer give the same samples."""

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        ...

    @property
    def length(self) -> int:
        """Prompt length in tokens that samples come near to, never above by more than a line.

        Of a sample with turns the first prompt's, or the longest agent's without messages.
        """
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


def plain_words(text: str) -> str:
    """Lower-case words without punctuation and articles, parted by single spaces."""
    bare = text.casefold().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


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


def _stands(expected: Answer, text: str) -> bool:
    if isinstance(expected, AnyOf):
        return expected.stands_in(text)
    return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", text) is not None


def _spoken(said: Said, answers: Sequence[str]) -> Part | None:
    text = answers[said.turn]
    if not text:
        return None
    return Segment(text=text) if said.reused else text

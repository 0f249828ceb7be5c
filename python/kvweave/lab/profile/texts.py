"""What a model is profiled on: plain text and hidden numbers, and held-out text beside it.

Every second document of a corpus is profiled, the others are held out; a corpus of one document is
cut into halves. So a bound on quality is never checked on text that classes were chosen on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import Corpus, Encode, corpus_of, halves
from kvweave.lab.eval.sample import NAMES, distinct_numbers
from kvweave.plan import Rows
from kvweave.runner import Runner

HIDDEN = 4
"""Numbers hidden in one prompt."""

Kind = Literal["text", "needle"]


@dataclass(frozen=True)
class ProfileText:
    """One prompt: token ids i32 [T], and for hidden numbers the rows that must find them.

    `targets`: (row, first, end) for each token of each answer: the row that predicts it, and the
    span of the sentence that holds it, further back than the local window.
    """

    kind: Kind
    corpus: str
    tokens: Rows
    targets: tuple[tuple[int, int, int], ...] = ()

    @property
    def rows(self) -> Rows:
        """The rows that predict an answer's tokens, i32, sorted."""
        return np.unique([row for row, _, _ in self.targets]).astype(np.int32)


def parted(name: str) -> tuple[Corpus, Corpus]:
    """A corpus as (to profile on, held out), by name or path; errors as `corpus_of`."""
    first, second = halves(corpus_of(name))
    return replace(first, name=name), replace(second, name=name)


class TextMaker:
    """Makes prompts of exact lengths; the same seed and text give the same tokens.

    # Errors
    `InvalidArgument` for a runner without a tokenizer.
    """

    def __init__(self, runner: Runner, *, sink: int, recent: int, seed: int) -> None:
        if runner.prompts.tokenizer is None:
            raise InvalidArgument("profile: expected a runner with a tokenizer, got none")
        self.encode: Encode = runner.prompts.encode
        whole = runner.tokenize("text").tokens
        # What the tokenizer puts before every text: heads use it as their sink.
        self.lead = whole[: len(whole) - len(self.encode("text"))].tolist()
        self.sink, self.recent, self.seed = sink, recent, seed

    def plain(self, corpus: Corpus, length: int, index: int = 0) -> ProfileText:
        """Running text; raises InvalidArgument when no document is that long."""
        body = corpus.token_slice(self._numbers(0, length, index), self.encode, length)
        tokens = (self.lead + body)[:length]
        return ProfileText("text", corpus.name, np.asarray(tokens, np.int32))

    def pair(self, corpus: Corpus, length: int, index: int = 0) -> tuple[Rows, Rows]:
        """A prefix and a segment of other text, each half of the length."""
        prefix = self.plain(corpus, length // 2, 2 * index)
        rng = self._numbers(1, length, index)
        segment = corpus.token_slice(rng, self.encode, length - length // 2)
        return prefix.tokens, np.asarray(segment, np.int32)

    def needle(self, corpus: Corpus, length: int, index: int = 0) -> ProfileText:
        """Text with numbers hidden in it, and at its end the answers that need them.

        The answers are written out, so that each of their tokens is asked of a row of its own.
        Between the last sentence and the first answer lies more text than the local window.

        # Errors
        `InvalidArgument` when the length does not hold that.
        """
        rng = self._numbers(2, length, index)
        cities = [str(city) for city in rng.permutation(NAMES)[:HIDDEN]]
        numbers = distinct_numbers(rng, HIDDEN)
        lines = [
            self.encode(f" The special number for {city} is {number}.")
            for city, number in zip(cities, numbers, strict=True)
        ]
        tail = _Answers(self.encode, cities, numbers, rng.permutation(HIDDEN).tolist())
        room = length - len(self.lead) - sum(map(len, lines)) - len(tail.tokens)
        places = room - self.sink - self.recent
        if places < HIDDEN:
            least = length - places + HIDDEN
            raise InvalidArgument(
                f"lengths: expected at least {least} tokens, so that numbers can be hidden "
                f"outside {self.sink} + {self.recent} tokens, got {length}"
            )
        text = corpus.token_slice(rng, self.encode, room)
        # One in each quarter of what lies between sink and window.
        cuts = [
            self.sink + places * i // HIDDEN + int(rng.integers(places // HIDDEN))
            for i in range(HIDDEN)
        ]
        tokens, spans, last = list(self.lead), [], 0
        for cut, line in zip(cuts, lines, strict=True):
            tokens += text[last:cut]
            spans.append((len(tokens), len(tokens) + len(line)))
            tokens, last = tokens + line, cut
        tokens += text[last:]
        targets = tuple((len(tokens) + row, *spans[which]) for row, which in tail.asking)
        filled = np.asarray(tokens + tail.tokens, np.int32)
        return ProfileText("needle", corpus.name, filled, targets)

    def _numbers(self, use: int, length: int, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, use, length, index])


def held_out(
    runner: Runner, texts: Sequence[str], length: int, *, sink: int, recent: int, seed: int
) -> tuple[ProfileText, ...]:
    """Prompts to measure a map on: of each text a stretch, and one with hidden numbers.

    They come from documents (or the half of one) that `profile_heads` does not read. Errors as
    there.
    """
    maker = TextMaker(runner, sink=sink, recent=recent, seed=seed)
    corpora = [parted(name)[1] for name in texts]
    return tuple(
        made
        for corpus in corpora
        for made in (maker.plain(corpus, length), maker.needle(corpus, length))
    )


class _Answers:
    """The end of a needle prompt: its tokens, and (row among them, number) of each answer token."""

    def __init__(
        self, encode: Encode, cities: Sequence[str], numbers: Sequence[str], order: Sequence[int]
    ) -> None:
        self.tokens = encode("\n\nWhat are the special numbers mentioned in the text?")
        self.asking: list[tuple[int, int]] = []
        for which in order:
            self.tokens += encode(f" The special number for {cities[which]} is")
            answer = encode(f" {numbers[which]}")
            first = len(self.tokens)
            # The row before a token predicts it.
            self.asking += [(first - 1 + i, which) for i in range(len(answer))]
            self.tokens += answer + encode(".")

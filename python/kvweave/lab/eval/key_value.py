"""`lookup`, `lookups`: one or four keys of a table that fills the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.problem import Document, Problem, Space
from kvweave.lab.eval.sample import NAMES, check_asked, distinct_numbers, listed
from kvweave.lab.eval.wording import Question

# fmt: off
_THINGS = (
    "anchor", "basket", "candle", "drum", "engine", "feather", "goblet", "harp", "inkwell",
    "jacket", "kettle", "lantern", "mirror", "nail", "oar", "pillow", "quilt", "ribbon", "saddle",
    "trumpet", "umbrella", "vase", "wagon", "zither",
)
_COLOURS = ("amber", "black", "blue", "brown", "green", "grey", "red", "white")
# fmt: on
_PAIRS = tuple(f"{city}-{thing}" for city in NAMES for thing in _THINGS)
_TRIPLES = tuple(f"{pair}-{colour}" for pair in _PAIRS for colour in _COLOURS)
_INSTRUCTION = "Here is a table of keys and values, one entry a line."


@dataclass(frozen=True)
class KeyValue:
    """Lines `city-thing: number` in all documents; `asked` of the keys are looked up.

    A table too long for all pairs has keys `city-thing-colour`.
    """

    asked: int = 1
    score_name: ClassVar[str] = "recall"
    corpus: ClassVar[None] = None
    gap: ClassVar[str] = "\n\n"
    asks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_asked(self.asked, 4)

    @property
    def name(self) -> str:
        """`lookup` for one key, `lookups` for several."""
        return "lookup" if self.asked == 1 else "lookups"

    @property
    def least_documents(self) -> int:
        """Two where several keys are asked for."""
        return min(self.asked, 2)

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """As many lines as the length holds; keys asked for stand in as many documents."""
        lines, fit = self._table(space, rng, _PAIRS)
        if fit == len(lines):
            lines, fit = self._table(space, rng, _TRIPLES)
        ends = _long_enough(space, lines, _cuts(space, fit))
        cut = [np.arange(start, end) for start, end in pairwise((0, *ends))]
        asked_in = rng.permutation(space.documents)[: self.asked]
        chosen: list[int] = []
        for index in range(self.asked):
            choices = cut[asked_in[index % len(asked_in)]]
            at = int(rng.choice(choices))
            while at in chosen:
                at = int(rng.choice(choices))
            chosen.append(at)
        keys, numbers = zip(*(lines[i].split(": ") for i in chosen), strict=True)
        documents = (Document(tuple(lines[i] for i in part), "\n") for part in cut)
        return Problem(tuple(documents), (_question(keys, numbers),))

    def _table(
        self, space: Space, rng: np.random.Generator, known: Sequence[str]
    ) -> tuple[list[str], int]:
        """Lines with all keys, and how many of them fit.

        Raises InvalidArgument for a length that holds less than two lines a document, or more
        than there are of the longest keys.
        """
        keys = [str(key) for key in rng.permutation(known)]
        numbers = distinct_numbers(rng, len(known))
        lines = [f"{key}: {number}" for key, number in zip(keys, numbers, strict=True)]
        longest = sorted((line.partition(":")[0] for line in lines), key=len)[-self.asked :]
        outside = space.outside(["."] * space.documents, [_question(longest, ())])
        whole = np.cumsum([len(space.encode(line + "\n")) for line in lines])
        fit = int(np.searchsorted(whole, space.length - outside, side="right"))
        least = self._least_lines(space)
        if fit < least or (fit == len(lines) and known is _TRIPLES):
            raise InvalidArgument(
                f"{self.name}: expected a length between {outside + int(whole[least - 1])} "
                f"and {outside + int(whole[-1])} tokens, got {space.length}"
            )
        return lines, fit

    def _least_lines(self, space: Space) -> int:
        """Lines with which the shortest document has one, or one for each key it is asked for."""
        each = -(-self.asked // space.documents)
        weights = space.weights or (1.0,) * space.documents
        return int(np.ceil(each * sum(weights) / min(weights)))


def _cuts(space: Space, lines: int) -> list[int]:
    """Where the table is cut; with equal weights the first documents have a line more."""
    if space.weights is not None:
        return space.cuts(lines)
    return [int(part[-1]) + 1 for part in np.array_split(np.arange(lines), space.documents)]


def _long_enough(space: Space, lines: Sequence[str], ends: Sequence[int]) -> Sequence[int]:
    """The same cuts, but a document of too few tokens has lines more, and the longest less."""
    sizes = np.diff((0, *ends))
    for _ in lines:
        ends = np.cumsum(sizes).tolist()
        texts = ["\n".join(lines[start:end]) for start, end in pairwise((0, *ends))]
        short = [i for i, text in enumerate(texts) if len(space.encode(text)) < space.least_tokens]
        longest = int(np.argmax(sizes))
        if not short or longest in short:
            break
        sizes[short[0]] += 1
        sizes[longest] -= 1
    return ends


def _question(keys: Sequence[str], numbers: Sequence[str]) -> Question:
    value = "value stands beside the key" if len(keys) == 1 else "values stand beside the keys"
    text = f"What {value} {listed(keys)}? Answer with each key and its value only."
    return Question(text, tuple(numbers), _INSTRUCTION)

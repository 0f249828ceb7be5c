"""`needle`, `needles`: one or four of eight numbers hidden in real text (SparseX, B.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvweave.eval.corpus import DEFAULT_CORPUS
from kvweave.eval.sample import (
    NAMES,
    SEGMENTS,
    Sample,
    check_asked,
    distinct_numbers,
    hide,
    listed,
)


@dataclass(frozen=True)
class Needle:
    """`asked` of `hidden` numbers, each tied to a city.

    A single hidden number does not tell policies apart, so the others stand beside it.
    """

    length: int = 1024
    hidden: int = 8
    asked: int = 1
    corpus: str = DEFAULT_CORPUS
    score_name: ClassVar[str] = "recall"

    def __post_init__(self) -> None:
        check_asked(self.hidden, len(NAMES))
        check_asked(self.asked, self.hidden)

    @property
    def name(self) -> str:
        """`needle` for one question, `needles` for several."""
        return "needle" if self.asked == 1 else "needles"

    def sample(self, tokenizer: Any, rng: np.random.Generator) -> Sample:
        """The cities asked for are drawn from all, in random order."""
        cities = [str(city) for city in rng.permutation(NAMES)[: self.hidden]]
        numbers = distinct_numbers(rng, self.hidden)
        lines = [
            f"The special number for {city} is {number}."
            for city, number in zip(cities, numbers, strict=True)
        ]
        chosen = [int(i) for i in rng.permutation(self.hidden)[: self.asked]]
        wanted = listed([cities[i] for i in chosen])
        is_or_are = "is the special number" if self.asked == 1 else "are the special numbers"
        parts = hide(
            tokenizer,
            rng,
            self.corpus,
            self.length,
            [lines[i::SEGMENTS] for i in range(SEGMENTS)],
            "Some special numbers are hidden in the following text. Memorise them.",
            f"What {is_or_are} for {wanted} mentioned in the text? "
            "Answer with each city and its number only.",
        )
        return Sample(parts, tuple(numbers[i] for i in chosen))

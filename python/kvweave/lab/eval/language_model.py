"""`lm`: a text in documents encoded apart, then its continuation as fresh text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import DEFAULT_CORPUS, corpus_of
from kvweave.lab.eval.problem import Document, Problem, Space


@dataclass(frozen=True)
class LanguageModel:
    """KL to full at each token of real text, whose negative log-likelihood is the score.

    The last `continuation` prompt tokens are fresh and scored. Plain loss does not tell policies
    apart: read the KL. `corpus`: where the text comes from.
    """

    continuation: int = 64
    corpus: str = DEFAULT_CORPUS
    name: ClassVar[str] = "lm"
    score_name: ClassVar[str] = "nll"
    gap: ClassVar[str] = ""
    asks: ClassVar[int] = 0
    least_documents: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.continuation < 2:
            raise InvalidArgument(
                f"lm: expected a continuation of 2 tokens or more, got {self.continuation}"
            )

    def problem(self, space: Space, rng: np.random.Generator) -> Problem:
        """Documents are given as tokens, so that their lengths are exact."""
        length = space.length - sum(len(space.encode(gap)) for gap in space.gaps)
        ids = corpus_of(self.corpus).token_slice(rng, space.encode, length)
        # A cut inside a character of several bytes leaves its rest as a replacement mark.
        tail = space.tokenizer.decode(ids[-self.continuation :]).lstrip("\ufffd")
        cuts = pairwise((0, *space.cuts(length - self.continuation)))
        documents = (Document(tokens=tuple(ids[start:end])) for start, end in cuts)
        return Problem(tuple(documents), continuation=tail)

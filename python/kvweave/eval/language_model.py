"""`lm`: a text in four segments encoded apart, then its continuation as fresh text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.eval.corpus import DEFAULT_CORPUS, corpus_of
from kvweave.eval.sample import SEGMENTS, Sample, task_encoder
from kvweave.runner import Segment


@dataclass(frozen=True)
class LanguageModel:
    """KL to full at each token of real text, whose negative log-likelihood is the score.

    `length` prompt tokens in all; the last `continuation` of them are fresh and scored. Plain
    loss does not tell policies apart: read the KL. `corpus`: where the text comes from.
    """

    length: int = 1024
    continuation: int = 64
    corpus: str = DEFAULT_CORPUS
    name: ClassVar[str] = "lm"
    score_name: ClassVar[str] = "nll"

    def __post_init__(self) -> None:
        if self.continuation < 2 or self.length < 2 * self.continuation:
            raise InvalidArgument(
                "lm: expected a continuation of 2 tokens or more and a length of at least twice "
                f"that, got {self.continuation} and {self.length}"
            )

    def sample(self, tokenizer: Any, rng: np.random.Generator) -> Sample:
        """Segments are given as tokens, so that their lengths are exact."""
        encode = task_encoder(tokenizer)
        ids = corpus_of(self.corpus).token_slice(rng, encode, self.length)
        # A cut inside a character of several bytes leaves its rest as a replacement mark.
        tail = tokenizer.decode(ids[-self.continuation :]).lstrip("\ufffd")
        cuts = np.linspace(0, self.length - self.continuation, SEGMENTS + 1).astype(int)
        segments = (Segment(tokens=tuple(ids[start:end])) for start, end in pairwise(cuts))
        return Sample(parts=(*segments, tail), scored_tokens=len(encode(tail)))

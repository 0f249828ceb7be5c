"""`chain`: assignments that lead from segment to segment (SparseX, B.3)."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvweave.eval.corpus import DEFAULT_CORPUS
from kvweave.eval.sample import SEGMENTS, Sample, check_asked, distinct_numbers, hide


@dataclass(frozen=True)
class VariableChain:
    """`chains` values, each assigned through `links` variables; one chain is asked for.

    The answer is generated: forced tokens would exaggerate how far a policy is off, since a
    policy often answers rightly in another format.
    """

    length: int = 1024
    chains: int = 2
    links: int = 4
    corpus: str = DEFAULT_CORPUS
    name: ClassVar[str] = "chain"
    score_name: ClassVar[str] = "recall"

    def __post_init__(self) -> None:
        check_asked(self.chains, 8)
        check_asked(self.links, 8)

    def sample(self, tokenizer: Any, rng: np.random.Generator) -> Sample:
        """Link i of every chain stands in segment i (mod 4)."""
        names = _variables(rng, self.chains * self.links)
        values = distinct_numbers(rng, self.chains)
        hidden: list[list[str]] = [[] for _ in range(SEGMENTS)]
        for chain in range(self.chains):
            source = values[chain]
            for link in range(self.links):
                name = names[chain * self.links + link]
                hidden[link % SEGMENTS].append(f"VAR {name} = {source}.")
                source = f"VAR {name}"
        parts = hide(
            tokenizer,
            rng,
            self.corpus,
            self.length,
            hidden,
            "Memorise and track the variable assignments hidden in the following text.",
            f"Which variables are assigned the value {values[0]} in the text, directly or through "
            "another variable? Answer with the names of the variables only.",
        )
        return Sample(parts, tuple(names[: self.links]))


def _variables(rng: np.random.Generator, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice(list(string.ascii_uppercase), 5))] = None
    return list(names)

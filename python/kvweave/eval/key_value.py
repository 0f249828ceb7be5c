"""`lookup`, `lookups`: one or four keys of a table that fills the whole prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from kvweave.errors import InvalidArgument
from kvweave.eval.sample import (
    NAMES,
    SEGMENTS,
    Sample,
    ask,
    check_asked,
    distinct_numbers,
    encoder,
    listed,
    prompt_tokens,
)

# fmt: off
_THINGS = (
    "anchor", "basket", "candle", "drum", "engine", "feather", "goblet", "harp", "inkwell",
    "jacket", "kettle", "lantern", "mirror", "nail", "oar", "pillow", "quilt", "ribbon", "saddle",
    "trumpet", "umbrella", "vase", "wagon", "zither",
)
# fmt: on
_MOST = len(NAMES) * len(_THINGS)


@dataclass(frozen=True)
class KeyValue:
    """Lines `city-thing: number` in four segments; `asked` of the keys are looked up."""

    length: int = 1024
    asked: int = 1
    score_name: ClassVar[str] = "recall"

    def __post_init__(self) -> None:
        check_asked(self.asked, SEGMENTS)

    @property
    def name(self) -> str:
        """`lookup` for one key, `lookups` for several."""
        return "lookup" if self.asked == 1 else "lookups"

    def sample(self, tokenizer: Any, rng: np.random.Generator) -> Sample:
        """As many lines as the length holds; each key asked for stands in another segment."""
        pairs = [f"{city}-{thing}" for city in NAMES for thing in _THINGS]
        keys = [str(key) for key in rng.permutation(pairs)]
        numbers = distinct_numbers(rng, _MOST)
        lines = [f"{key}: {number}" for key, number in zip(keys, numbers, strict=True)]
        per_segment = self._lines_that_fit(tokenizer, lines)
        asked_in = rng.permutation(SEGMENTS)[: self.asked]
        chosen = [int(s) * per_segment + int(rng.integers(per_segment)) for s in asked_in]
        texts = ["\n".join(lines[s * per_segment : (s + 1) * per_segment]) for s in range(SEGMENTS)]
        parts = ask(tokenizer, _INSTRUCTION, texts, _question([keys[i] for i in chosen]))
        return Sample(parts, tuple(numbers[i] for i in chosen))

    def _lines_that_fit(self, tokenizer: Any, lines: list[str]) -> int:
        encode = encoder(tokenizer)
        longest = sorted((line.partition(":")[0] for line in lines), key=len)[-self.asked :]
        bare = ask(tokenizer, _INSTRUCTION, ["."] * SEGMENTS, _question(longest))
        room = (self.length - prompt_tokens(encode, bare)) // SEGMENTS
        whole = np.cumsum([len(encode(line + "\n")) for line in lines])
        per_segment = int(np.searchsorted(whole, room * SEGMENTS, side="right")) // SEGMENTS
        if per_segment < 1 or per_segment * SEGMENTS == _MOST:
            raise InvalidArgument(
                f"{self.name}: expected a length between "
                f"{prompt_tokens(encode, bare) + int(whole[SEGMENTS - 1])} and "
                f"{prompt_tokens(encode, bare) + int(whole[-1])} tokens, got {self.length}"
            )
        return per_segment


_INSTRUCTION = "Here is a table of keys and values, one entry a line."


def _question(keys: list[str]) -> str:
    value = "value stands beside the key" if len(keys) == 1 else "values stand beside the keys"
    return f"What {value} {listed(keys)}? Answer with each key and its value only."

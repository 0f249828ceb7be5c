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
    listed,
    prompt_tokens,
    task_encoder,
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
    corpus: ClassVar[None] = None

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
        cut = np.array_split(np.arange(self._lines_that_fit(tokenizer, lines)), SEGMENTS)
        asked_in = rng.permutation(SEGMENTS)[: self.asked]
        chosen = [int(rng.choice(cut[segment])) for segment in asked_in]
        texts = ["\n".join(lines[i] for i in part) for part in cut]
        parts = ask(tokenizer, _INSTRUCTION, texts, _question([keys[i] for i in chosen]))
        return Sample(parts, tuple(numbers[i] for i in chosen))

    def _lines_that_fit(self, tokenizer: Any, lines: list[str]) -> int:
        encode = task_encoder(tokenizer)
        longest = sorted((line.partition(":")[0] for line in lines), key=len)[-self.asked :]
        bare = ask(tokenizer, _INSTRUCTION, ["."] * SEGMENTS, _question(longest))
        outside = prompt_tokens(encode, bare)
        whole = np.cumsum([len(encode(line + "\n")) for line in lines])
        fit = int(np.searchsorted(whole, self.length - outside, side="right"))
        if fit < SEGMENTS or fit == _MOST:
            raise InvalidArgument(
                f"{self.name}: expected a length between {outside + int(whole[SEGMENTS - 1])} "
                f"and {outside + int(whole[-1])} tokens, got {self.length}"
            )
        return fit


_INSTRUCTION = "Here is a table of keys and values, one entry a line."


def _question(keys: list[str]) -> str:
    value = "value stands beside the key" if len(keys) == 1 else "values stand beside the keys"
    return f"What {value} {listed(keys)}? Answer with each key and its value only."

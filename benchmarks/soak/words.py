"""A tokenizer whose tokens are words: `w7` is token 7, so that any ids can be said as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def word_tokenizer(vocabulary: int) -> Any:
    """A tokenizer of transformers with so many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def words_of(tokens: Sequence[int]) -> str:
    """The text of some tokens."""
    return " ".join(f"w{token}" for token in tokens)

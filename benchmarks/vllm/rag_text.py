"""Texts of a load of retrieved documents, and a tokenizer that knows no others.

A prompt is several documents and a question. Documents are drawn by Zipf's law, so that few come
often, and stand in another order each time: a cache of prefixes finds little of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

END = "</s>"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True)
class RagLoad:
    """`documents` to draw from, of `document_tokens`; `together` of them in a prompt, ranges.

    `exponent` of Zipf's law: the k-th document comes 1 / k^exponent as often as the first.
    """

    requests: int = 64
    documents: int = 64
    document_tokens: tuple[int, int] = (2048, 8192)
    together: tuple[int, int] = (4, 16)
    question_tokens: int = 64
    answer_tokens: int = 128
    exponent: float = 1.0
    most_tokens: int = 100_000
    seed: int = 0


def write_tokenizer(folder: Path, vocabulary: int, *marks: str) -> None:
    """A tokenizer of whole words, `w0` and so on, with an end of text and a chat template.

    `marks` are special tokens beyond the vocabulary, from the number `vocabulary` on.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary - 1)} | {END: vocabulary - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    known = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token=END)
    known.add_tokens(list(marks), special_tokens=True)
    known.chat_template = TEMPLATE
    known.save_pretrained(folder)


def prompts(load: RagLoad, vocabulary: int) -> list[str]:
    """The prompts, each of at most `most_tokens` words."""
    numbers = np.random.default_rng(load.seed)

    def words(length: int) -> str:
        return " ".join(f"w{number}" for number in numbers.integers(1, vocabulary - 1, length))

    low, high = load.document_tokens
    lengths = numbers.integers(low, high + 1, load.documents)
    texts = [words(int(length)) for length in lengths]
    shares = 1 / np.arange(1, load.documents + 1) ** load.exponent
    made = []
    for _ in range(load.requests):
        count = min(int(numbers.integers(load.together[0], load.together[1] + 1)), load.documents)
        chosen = numbers.choice(load.documents, count, replace=False, p=shares / shares.sum())
        parts, room = [], load.most_tokens - load.question_tokens
        for document in chosen:
            if lengths[document] <= room:
                parts.append(texts[document])
                room -= int(lengths[document])
        made.append(" ".join([*parts, words(load.question_tokens)]))
    return made


def write_custom(path: Path, load: RagLoad, vocabulary: int) -> None:
    """The prompts as a `custom` data set of `vllm bench`: an object of JSON a line."""
    rows = (
        {"prompt": text, "output_tokens": load.answer_tokens} for text in prompts(load, vocabulary)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

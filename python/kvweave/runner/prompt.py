"""Prompts as lists of fresh text and reusable segments, and their tokens.

A prompt `[O1, R1, O2, R2, …]` (SparseX §3.2) is a list of parts: a `str` is fresh text, a
`Segment` is text whose KV may be reused wherever it stands. Each part is tokenised alone, so a
segment has the same token ids in every prompt; the user's text is never padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.arguments import several, shown, word
from kvweave.errors import InvalidArgument

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Segment:
    """Reusable text: exactly one of `text` and `tokens`, in one namespace.

    Segments of different namespaces never match each other, whatever their text.
    """

    text: str | None = None
    tokens: Sequence[int] | None = None
    namespace: str = ""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            raise InvalidArgument(
                "segment: expected exactly one of text and tokens, got "
                + ("neither" if self.text is None else "both")
            )
        if self.text is not None:
            word("segment text", self.text)
        word("segment namespace", self.namespace)

    @staticmethod
    def of(content: str | Sequence[int], namespace: str = "") -> Segment:
        """Text or tokens as a segment."""
        if isinstance(content, str):
            return Segment(text=content, namespace=namespace)
        return Segment(tokens=content, namespace=namespace)


Part = str | Segment
Prompt = str | Sequence[Part] | Sequence[int] | torch.Tensor | npt.NDArray[np.integer]


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids i32 [T] and the marked segments as (start, end, namespace), half-open."""

    tokens: Tokens
    segments: tuple[tuple[int, int, str], ...]


def token_array(tokens: Any, vocabulary: int) -> Tokens:
    """Checks ids against the vocabulary size and returns them as i32 [T].

    # Errors
    `InvalidArgument` for a wrong rank or dtype, or an id outside [0, vocabulary).
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        # Sequences of uneven lengths, or a tensor that numpy cannot read where it lies.
        raise InvalidArgument(
            f"token ids: expected a 1-D integer array, got {shown(tokens)}"
        ) from error
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"token ids: expected a 1-D integer array, got {array.ndim}-D {array.dtype}"
        )
    if array.size and (int(array.min()) < 0 or int(array.max()) >= vocabulary):
        worst = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise InvalidArgument(f"token ids: expected 0 <= id < {vocabulary}, got {worst}")
    return np.ascontiguousarray(array, dtype=np.int32)


class PromptTokenizer:
    """Turns parts into tokens; holds the tokenizer (or none) and the vocabulary size."""

    def __init__(self, tokenizer: Any | None, vocabulary: int) -> None:
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise InvalidArgument(
                f"tokenizer: expected one of transformers or None, got {shown(tokenizer)}"
            )
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._prefix = [] if tokenizer is None else self._special_prefix(tokenizer)

    @staticmethod
    def _special_prefix(tokenizer: Any) -> list[int]:
        """The ids (a BOS, or none) that the tokenizer itself puts before every text."""
        return [int(i) for i in tokenizer("").input_ids if i != tokenizer.eos_token_id]

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without special tokens."""
        if self.tokenizer is None:
            raise InvalidArgument("text prompt: expected a runner with a tokenizer, got none")
        told = self.tokenizer(word("text", text), add_special_tokens=False)
        return [int(i) for i in told.input_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some ids; the empty string when there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def segment_tokens(self, segment: Segment) -> Tokens:
        """The ids i32 of a segment, given as text or as tokens."""
        ids: Any = segment.tokens
        if ids is None:
            ids = self.encode(segment.text or "")
        return token_array(ids.tolist() if isinstance(ids, torch.Tensor) else ids, self.vocabulary)

    def tokenize(self, prompt: Prompt, *, begins: bool = True) -> TokenizedPrompt:
        """Tokenises each part alone and joins them.

        The tokenizer's own leading special ids (a BOS) come first when the prompt begins with
        text that does not already carry them; not where it goes on from others (`begins` False).

        # Errors
        `InvalidArgument` for an empty prompt, an unknown part, or ids out of range.
        """
        if isinstance(prompt, torch.Tensor):
            return self._checked(prompt.tolist(), [])
        if isinstance(prompt, np.ndarray):
            return self._checked(prompt, [])
        if not isinstance(prompt, str):
            several("prompt", prompt, "parts or token ids")
        if not isinstance(prompt, str) and len(prompt) and _is_token_list(prompt):
            return self._checked(list(prompt), [])
        parts: Sequence[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
        pieces: list[Tokens] = []
        segments: list[tuple[int, int, str]] = []
        start = 0
        for part in parts:
            if isinstance(part, Segment):
                ids = self.segment_tokens(part)
                if len(ids):
                    segments.append((start, start + len(ids), part.namespace))
            elif isinstance(part, str):
                ids = token_array(self.encode(part), self.vocabulary)
            else:
                raise InvalidArgument(
                    f"prompt part: expected a str or a Segment, got {type(part).__name__}"
                )
            pieces.append(ids)
            start += len(ids)
        tokens = np.concatenate([np.zeros(0, np.int32), *pieces])
        prefix = self._prefix if begins and parts and isinstance(parts[0], str) else []
        if prefix and tokens[: len(prefix)].tolist() != prefix:
            tokens = np.concatenate((np.asarray(prefix, np.int32), tokens))
            n = len(prefix)
            segments = [(start + n, end + n, name) for start, end, name in segments]
        return self._checked(tokens, segments)

    def _checked(self, tokens: Any, segments: list[tuple[int, int, str]]) -> TokenizedPrompt:
        array = token_array(tokens, self.vocabulary)
        if array.size == 0:
            raise InvalidArgument("prompt: expected at least one token, got an empty prompt")
        return TokenizedPrompt(array, tuple(segments))


def _is_token_list(prompt: Any) -> bool:
    # A prompt has many tokens of few types.
    kinds = set(map(type, prompt))
    return bool not in kinds and all(issubclass(kind, (int, np.integer)) for kind in kinds)

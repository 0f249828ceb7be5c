"""What ends an answer: token ids, and strings that may stand across the borders of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvweave.arguments import shown, whole, word
from kvweave.errors import InvalidArgument

Stops: TypeAlias = str | Collection[int | str]
"""What callers name: a string, or several strings and token ids."""


@dataclass(frozen=True)
class Stop:
    """Token ids and strings, of which the first that comes ends an answer.

    An id belongs to the answer's tokens and not to its text. A string is looked for in the text,
    which ends before it: of strings that end at the same character before the longest.
    """

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()

    @staticmethod
    def of(stop: Stops | None, tokenizer: Any, vocabulary: int) -> Stop:
        """What a caller named. None, or strings alone: the tokenizer's end of sequence ends it too.

        A string that is a special token of the tokenizer stands for its id, as special tokens are
        not written out.

        # Errors
        `InvalidArgument` for anything but strings and ids, an id outside the vocabulary, an empty
        string, or strings where there is no tokenizer.
        """
        given = [stop] if isinstance(stop, str) else stop
        if given is None:
            given, wants_end = [], True
        elif not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray, memoryview)):
            raise InvalidArgument(f"stop: expected strings and token ids, got {shown(given)}")
        else:
            given = list(given)
            wants_end = bool(given) and all(isinstance(one, str) for one in given)
        texts = tuple(dict.fromkeys(word("stop", one) for one in given if isinstance(one, str)))
        if "" in texts:
            raise InvalidArgument("stop: expected strings of at least one character, got ''")
        if texts and tokenizer is None:
            raise InvalidArgument(
                f"stop: expected token ids, as the runner has no tokenizer, got {shown(texts[0])}"
            )
        ids = {whole("stop", one, 0, vocabulary - 1) for one in given if not isinstance(one, str)}
        end = getattr(tokenizer, "eos_token_id", None)
        if wants_end and end is not None:
            ids.add(int(end))
        special = _special_ids(tokenizer) if texts else {}
        ids |= {special[text] for text in texts if text in special}
        return Stop(frozenset(ids), tuple(text for text in texts if text not in special))


class StopStrings:
    """Looks for some strings in a text that comes in pieces.

    Of the text so much is held back as may yet turn out to be one of them.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self._strings = [_Progress(text) for text in texts]
        self._held = ""
        self.found = False

    def hear(self, piece: str) -> str:
        """What of the text so far is shown now; nothing more once a string was found."""
        if self.found:
            return ""
        text = self._held + piece
        for at, character in enumerate(piece, len(self._held) + 1):
            said = [string.text for string in self._strings if string.hears(character)]
            if said:
                self.found, self._held = True, ""
                return text[: at - max(map(len, said))]
        keep = len(text) - max((string.length for string in self._strings), default=0)
        self._held = text[keep:]
        return text[:keep]

    def rest(self) -> str:
        """What was held back, as nothing more comes."""
        held, self._held = self._held, ""
        return held


class _Progress:
    """How much of one string the text heard so far ends in (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        # Of each beginning of the string, the longest shorter one that it ends in.
        self._shorter = [0]
        for character in text[1:]:
            self._shorter.append(self._after(self._shorter[-1], character))

    def hears(self, character: str) -> bool:
        """Takes in one character; whether the string stands there whole."""
        self.length = self._after(self.length, character)
        return self.length == len(self.text)

    def _after(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._shorter[length - 1]
        return length + (self.text[length] == character)


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """The ids of special tokens by their text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): int(i) for i, token in added.items() if getattr(token, "special", False)}
